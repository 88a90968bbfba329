"""``outrider distill``: trains a draft model or a head for a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import JsonOption, flat
from outrider.cli.shared.output import console_for, print_command, progress_bar, write_json
from outrider.cli.shared.pair_options import AllowPickleOption, set_threads
from outrider.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from outrider.decoder import Decoder
    from outrider.distill.data import Mixture
    from outrider.distill.kinds import Student
    from outrider.distill.watch import Check
    from outrider.runtime.lm import LM
    from outrider.scoring.teacher_forcing import Text

_DEFAULT_MINUTES = 10.0
_DEFAULT_DEPTHS = {"eagle3": 5, "dflash": 7}
_KINDS = ("model", *_DEFAULT_DEPTHS)

_SHAPE, _TRAINING, _MACHINE = "Shape", "Training", "Machine"


@flat
def distill(
    target: Annotated[
        str,
        typer.Argument(help="Known name, folder or hub id. 'outrider models' lists the names."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the draft. An interrupted run resumes.")],
    kind: Annotated[
        str,
        typer.Option(
            help="model, or a head on the target's hidden states: eagle3 (drafts token by token), dflash (all tokens "
            "of a round at once).",
            rich_help_panel=_SHAPE,
        ),
    ] = "model",
    layers: Annotated[
        int | None,
        typer.Option(
            help="Number of layers. Default: a sixteenth of the target's; of a dflash head an eighth, at most 5.",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(help="Hidden size. Default: the target's.", rich_help_panel=_SHAPE)
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Feed-forward size. Default: in proportion.", rich_help_panel=_SHAPE)
    ] = None,
    init: Annotated[
        str,
        typer.Option(
            help="Initial weights: target (some of its layers, part of its width), scratch (random), or an existing "
            "draft (known name, folder or hub id).",
            rich_help_panel=_SHAPE,
        ),
    ] = "target",
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Of a head: it drafts this many tokens, the most frequent. Default: all.", rich_help_panel=_SHAPE
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Text file for training and for the target's prompts.")] = None,
    written: Annotated[int, typer.Option(help="Training sequences to generate with the target first.")] = 1024,
    written_fraction: Annotated[
        float, typer.Option(help="With --data: fraction of generated sequences in training.")
    ] = 0.5,
    length: Annotated[int, typer.Option(help="Tokens per sequence.", rich_help_panel=_TRAINING)] = 256,
    steps: Annotated[int | None, typer.Option(help="Number of training steps.", rich_help_panel=_TRAINING)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of training. Default: 10.", rich_help_panel=_TRAINING)
    ] = None,
    loss: Annotated[str, typer.Option(help="Loss: kl, reverse-kl, jsd, tv or lk.", rich_help_panel=_TRAINING)] = "kl",
    depth: Annotated[
        int | None,
        typer.Option(
            help="Of a head: tokens that it drafts in a row in training; a dflash head drafts at most these. Default: "
            "5; dflash: 7.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step on each device.", rich_help_panel=_TRAINING)] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_TRAINING)] = 2e-3,
    patience: Annotated[
        int, typer.Option(help="Stop after this many checks (of 20) without a better alpha.", rich_help_panel=_TRAINING)
    ] = 8,
    seed: Annotated[int, typer.Option(rich_help_panel=_TRAINING)] = 0,
    models: Annotated[Path | None, typer.Option(help="TOML file with more model names.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", rich_help_panel=_MACHINE)] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="CPU threads. Default: OMP_NUM_THREADS; else one for each physical core, without efficiency cores.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    allow_pickle: AllowPickleOption = False,
    json_target: JsonOption = None,
) -> None:
    """Train a draft to match the target's distribution. Checks measure alpha and tokens per second."""
    for name, value in (("--written", written), ("--length", length)):
        if value < 2:
            raise OptionError(name, value, "a whole number >= 2")
    if not 0 <= written_fraction <= 1:
        raise OptionError("--written-fraction", written_fraction, "a number from 0 to 1")
    if data is None and written_fraction == 0:
        raise OptionError("--written-fraction", written_fraction, "without --data there is nothing else to train on")
    _check_kind(kind, init, (layers, hidden_size, intermediate_size), draft_vocab, depth, length)

    set_threads(threads)

    from accelerate import PartialState

    from outrider.api import load
    from outrider.distill.kinds import ModelStudent
    from outrider.distill.recipe import Budget, Recipe
    from outrider.distill.train import check_same_run, distil
    from outrider.models.reading import stored_dtype
    from outrider.models.registry import resolve

    if steps is None and minutes is None:
        minutes = _DEFAULT_MINUTES
    budget = Budget(steps, None if minutes is None else 60 * minutes)
    recipe = Recipe(loss, batch_size, learning_rate, patience, seed)
    processes = PartialState()  # before loading the target: under `accelerate launch` it sets this process's GPU
    decoder = load(target, device=device, models_file=models, allow_pickle=allow_pickle)
    lm = decoder.target
    if lm.device.type == "cuda" and lm.device.index not in (None, processes.device.index or 0):
        raise OptionError("--device", device, "choose the GPU by CUDA_VISIBLE_DEVICES, as the trainer does")
    if length > lm.context_len:
        raise OptionError("--length", length, f"{lm.name} accepts {lm.context_len} tokens")
    if draft_vocab is not None and draft_vocab > lm.vocab_size:
        raise OptionError("--draft-vocab", draft_vocab, f"{lm.name} has {lm.vocab_size} tokens")
    student: Student | None = None
    if kind == "model":
        draft = _new_draft(decoder, init, layers, hidden_size, intermediate_size, seed, length, models, allow_pickle)
        student = ModelStudent(lm, draft, decoder.tokenizer)
    text = None if data is None else _text(decoder, data, length, written_fraction)
    options: dict[str, Any] = {
        "target": target,
        "kind": kind,
        "init": init,
        "layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "draft_vocab": draft_vocab,
        "data": None if data is None else str(data),
        "written": written,
        "written_fraction": written_fraction,
        "length": length,
        "steps": steps,
        "minutes": minutes,
        "loss": loss,
        "depth": depth,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "patience": patience,
        "seed": seed,
    }
    if processes.is_main_process:
        check_same_run(output, options)
    mixture, held_out = _data(decoder, text, output, written, written_fraction, length, seed)
    if student is None:
        student = _new_head(kind, lm, mixture, draft_vocab, depth or _DEFAULT_DEPTHS[kind], layers, seed)

    console = console_for(json_target)
    console.quiet = not processes.is_main_process
    num_params = sum(parameter.numel() for parameter in student.module.parameters())
    console.print(
        f"{output.name}: {num_params / 1e6:.2f} M parameters, for {lm.name}; held-out sequences: {len(held_out)}"
    )
    with progress_bar("training, per mille", 1000) as advance:
        done = 0

        def on_step(spent: float) -> None:
            nonlocal done
            advance(round(1000 * spent) - done)
            done = round(1000 * spent)

        checks = distil(
            student,
            output,
            mixture,
            held_out,
            recipe,
            budget,
            save_dtype=stored_dtype(resolve(target, models)),
            on_step=on_step,
            on_check=lambda check: _print_above_bar(console, _line(check)),
        )
    best = max(checks, key=lambda check: check.mean_alpha)
    console.print(f"Best: {_line(best)}")
    print_command(console, f"outrider generate --target {target} --draft {output}")
    if processes.is_main_process:
        machine = {"device": device, "threads": threads, "allow_pickle": allow_pickle}
        body = {
            "checks": [check.to_json() for check in checks],
            "best": best.to_json(),
            "num_params": num_params,
            "num_held_out": len(held_out),
        }
        write_json(json_target, "distill", options | machine, body, lm)
        write_json(str(output / "distill.json"), "distill", options | machine, body, lm)


def _check_kind(
    kind: str, init: str, sizes: tuple[int | None, ...], draft_vocab: int | None, depth: int | None, length: int
) -> None:
    """Raises OptionError: options that do not fit the kind of draft."""
    if kind not in _KINDS:
        raise OptionError("--kind", kind, f"choose one of {', '.join(_KINDS)}")
    if kind == "model":
        for option, value in (("--draft-vocab", draft_vocab), ("--depth", depth)):
            if value is not None:
                raise OptionError(option, value, "only heads have it: add --kind eagle3 or --kind dflash")
        return
    layers, *widths = sizes
    if kind == "eagle3" and layers is not None:
        raise OptionError("--layers", layers, "an EAGLE-3 head has one layer: leave it out")
    if init != "target" or any(size is not None for size in widths):
        raise OptionError("--kind", kind, "a head has its target's width: leave out --init and the sizes")
    for option, value in (("--draft-vocab", draft_vocab), ("--layers", layers)):
        if value is not None and value < 1:
            raise OptionError(option, value, "a whole number >= 1")
    num_drafted = _DEFAULT_DEPTHS[kind] if depth is None else depth
    if not 1 <= num_drafted < length - 1:
        raise OptionError("--depth", num_drafted, "a whole number >= 1, and less than --length - 1")


def _new_head(
    kind: str, lm: LM, data: Mixture, draft_vocab: int | None, depth: int, layers: int | None, seed: int
) -> Student:
    """Head to train."""
    from outrider.distill.blocks import BlockStudent, default_layers, mask_token, new_dflash
    from outrider.distill.chains import ChainStudent, new_eagle3
    from outrider.distill.heads import most_frequent

    counts = data.token_counts(lm.vocab_size)
    token_ids = None
    if draft_vocab is not None and draft_vocab < lm.vocab_size:
        token_ids = most_frequent(counts, draft_vocab)
    if kind == "eagle3":
        return ChainStudent(lm, new_eagle3(lm, token_ids, seed), depth)
    mask_id = mask_token(lm, counts)
    return BlockStudent(lm, new_dflash(lm, layers or default_layers(lm), depth, mask_id, token_ids, seed))


def _new_draft(
    decoder: Decoder,
    init: str,
    layers: int | None,
    hidden_size: int | None,
    intermediate_size: int | None,
    seed: int,
    length: int,
    models: Path | None,
    allow_pickle: bool,
) -> Any:
    """Draft to train, in float32.

    Raises:
        OptionError, ModelError, TokenizerMismatch
    """
    from outrider.distill.student import Shape, copy_slices, default_shape, new_draft
    from outrider.models.loading import context_len, load_checkpoint
    from outrider.models.registry import Placement, resolve
    from outrider.text.tokenizer import check_same_tokens

    target: Any = decoder.target.model
    if init in ("target", "scratch"):
        default = default_shape(target.config)
        num_layers = default.num_layers if layers is None else layers
        shape = Shape(num_layers, default.hidden_size if hidden_size is None else hidden_size, intermediate_size)
        draft = new_draft(target.config, shape, seed)
        if init == "target":
            copy_slices(target, draft)
        return draft
    if (layers, hidden_size, intermediate_size) != (None, None, None):
        raise OptionError("--init", init, "an existing draft has its own shape: leave out the sizes")
    placement = Placement(str(decoder.target.device), "float32", store="plain", allow_pickle=allow_pickle)
    checkpoint = load_checkpoint(resolve(init, models), placement)
    if decoder.tokenizer is not None and checkpoint.tokenizer is not None:
        check_same_tokens(decoder.tokenizer, checkpoint.tokenizer, decoder.target.name, checkpoint.name)
    if length > context_len(checkpoint.model.config):
        raise OptionError("--length", length, f"{init} accepts {context_len(checkpoint.model.config)} tokens")
    return checkpoint.model


def _text(decoder: Decoder, data: Path, length: int, written_fraction: float) -> Tensor:
    """Tokens of the user's text. Raises FileError, OptionError if it is too short."""
    from outrider.distill.data import text_tokens

    text = text_tokens(decoder.tokenizer, data)
    if written_fraction < 1 and len(text) < 2 * length:
        raise OptionError("--length", length, f"{data} has only {len(text)} tokens, for training and for checks")
    return text


def _data(
    decoder: Decoder, text: Tensor | None, output: Path, written: int, written_fraction: float, length: int, seed: int
) -> tuple[Mixture, list[Text]]:
    """Training data and held-out data. Held-out data comes from the target's own sequences if there are any, since a
    draft is used on such text."""
    from accelerate import PartialState

    from outrider.distill.data import (
        Mixture,
        beginning,
        generate_sequences,
        hold_out_text,
        hold_out_written,
        read_sequences,
    )

    start = beginning(decoder.tokenizer)
    if text is not None and written_fraction == 0:
        rest, held_out = hold_out_text(text, length)
        return Mixture(rest, None, length, 0.0, seed, start), held_out
    processes, folder = PartialState(), output / "training"
    share = processes.process_index, processes.num_processes
    with progress_bar("sequences generated by the target", written // share[1]) as advance:
        generate_sequences(
            decoder, text, folder, num_sequences=written, length=length, seed=seed, share=share, on_done=advance
        )
    processes.wait_for_everyone()
    sequences, held_out = hold_out_written(*read_sequences(folder, num_sequences=written, length=length))
    trained_on = None if written_fraction == 1 else text
    return Mixture(trained_on, sequences, length, written_fraction, seed, start), held_out


def _print_above_bar(console: Console, line: str) -> None:
    """Print a line. On a terminal it goes through sys.stdout, which a progress bar replaces to make room."""
    if console.is_terminal and not console.quiet:
        print(line)
    else:
        console.print(line)


def _line(check: Check) -> str:
    loss = "" if check.loss is None else f", loss {check.loss:.3f}"
    with_k = f"{check.tokens_per_s:.0f} tokens/s predicted (K = {check.k})"
    # No intervals: they do not apply to changes between checks.
    alpha = f"alpha {' '.join(f'{alpha.value:.3f}' for alpha in check.alphas)}"
    return f"step {check.step}, {check.seconds / 60:.1f} min{loss}, {alpha}, {with_k}"
