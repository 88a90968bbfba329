"""From a model to one whose steps are compiled."""

from __future__ import annotations

from outrider.compile.compiled import CompiledExecution
from outrider.compile.cuda_graphs import CapturedExecution
from outrider.compile.service import CompileService
from outrider.errors import CompileError
from outrider.runtime.lm import LM


def compiled_lm(lm: LM, *, waits: bool = True, service: CompileService | None = None) -> LM:
    """A model with the same weights, its steps compiled (on a CUDA device: captured) when they are first run.

    Args:
        waits: see ``Execution``.
        service: that compiles the programs; None for that of this process.

    Raises:
        CompileError: several processes share the model, or it has recurrent states. (Captured, both work.)
    """
    if lm.num_shares > 1 and lm.device.type != "cuda":
        raise CompileError(
            f"{lm.name} cannot be compiled: it is shared by {lm.num_shares} processes, and torch.export cannot trace "
            "the sums over their shares (leave out --compile)"
        )
    if lm.has_states and lm.device.type != "cuda":
        raise CompileError(
            f"{lm.name} cannot be compiled: it has recurrent states, whose programs take many minutes to compile "
            "(leave out --compile: it then runs eagerly)"
        )
    lm.mixers  # noqa: B018 - a forward to find them would be recorded with a step
    return lm.with_execution(
        CapturedExecution() if lm.device.type == "cuda" else CompiledExecution(waits=waits, service=service)
    )
