"""Wraps a model so that its steps are compiled."""

from __future__ import annotations

from outrider.compile.compiled import CompiledExecution
from outrider.compile.cuda_graphs import CapturedExecution
from outrider.compile.service import CompileService
from outrider.errors import CompileError
from outrider.models.quantize import num_bytes
from outrider.runtime.lm import LM

_MOST_ROUNDS, _BYTES_PER_LOOK = 8, 100_000_000


def compiled_lm(lm: LM, *, waits: bool = True, service: CompileService | None = None) -> LM:
    """This model with compiled steps (on a CUDA device: captured ones), prepared when they are first run.

    Args:
        waits: see ``Execution``.
        service: compiles the programs; None for the one of this process.

    Raises:
        CompileError: on the CPU, several processes share the model, or it has recurrent states, or other tokens.
    """
    if lm.num_shares > 1 and lm.device.type != "cuda":
        raise CompileError(
            f"{lm.name} cannot be compiled: {lm.num_shares} processes share it, and torch.export cannot trace "
            "their all-reduce (leave out --compile)"
        )
    if lm.has_states and lm.device.type != "cuda":
        raise CompileError(
            f"{lm.name} cannot be compiled: it has recurrent states, whose programs take many minutes to compile "
            "(leave out --compile: it then runs eagerly)"
        )
    if lm.own_ids and lm.device.type != "cuda":
        raise CompileError(
            f"{lm.name} cannot be compiled: it has another tokenizer than the target, and programs cannot hold the "
            "table of its tokens yet (leave out --compile: it then runs eagerly)"
        )
    lm.mixers  # noqa: B018 - found now, or that forward would be captured with a step
    if lm.device.type == "cuda":
        return lm.with_execution(CapturedExecution())
    return lm.with_execution(
        CompiledExecution(waits=waits, service=service, rounds_per_look=_rounds_per_look(num_bytes(lm.model)))
    )


def _rounds_per_look(weights: int) -> int:
    """Rounds of a few milliseconds together: after each one the host's code and data have to be read again, since the
    weights have displaced them in the CPU's caches. (A function of the model and not of measured time, as the bounds of
    lengths, and so the views, depend on it.)

    Args:
        weights: bytes, all of which a round reads.
    """
    return max(1, min(_MOST_ROUNDS, _BYTES_PER_LOOK // weights))
