"""``outrider distill``: trains a draft model or a head for a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption
from outrider.cli.shared.output import clear_line, console_for, write_json
from outrider.cli.shared.own_text import open_log
from outrider.cli.shared.pair_options import AllowPickleOption, set_threads
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.distill.data import Mixture
    from outrider.distill.student import Student
    from outrider.distill.train import Check
    from outrider.scoring.teacher_forcing import Text

_DEFAULT_MINUTES = 10.0
_DEFAULT_DEPTHS = {"eagle3": 5, "dflash": 7}
_KINDS = ("model", *_DEFAULT_DEPTHS)

_SHAPE, _TRAINING, _MACHINE = "Shape", "Training", "Machine"


@dataclass(frozen=True)
class ShapeOptions:
    """Kind, size and initial weights of a draft."""

    kind: Annotated[
        str,
        typer.Option(
            help="model, or a head on the target's hidden states: eagle3 (drafts token by token), dflash (all tokens "
            "of a round at once).",
            rich_help_panel=_SHAPE,
        ),
    ] = "model"
    layers: Annotated[
        int | None,
        typer.Option(
            help="Number of layers. Default: a sixteenth of the target's; of a dflash head an eighth, at most 5.",
            rich_help_panel=_SHAPE,
        ),
    ] = None
    hidden_size: Annotated[
        int | None, typer.Option(help="Hidden size. Default: the target's.", rich_help_panel=_SHAPE)
    ] = None
    init: Annotated[
        str,
        typer.Option(
            help="Initial weights: target (some of its layers, part of its width), scratch (random), or an existing "
            "draft (known name, folder or hub id).",
            rich_help_panel=_SHAPE,
        ),
    ] = "target"
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Tokens that the draft can draft, the most frequent. Default: all.", rich_help_panel=_SHAPE),
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(
            help="Of a head: tokens that it drafts in a row in training; a dflash head drafts at most these. Default: "
            "5; dflash: 7.",
            rich_help_panel=_SHAPE,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise OptionError("--kind", self.kind, f"choose one of {', '.join(_KINDS)}")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise OptionError("--draft-vocab", self.draft_vocab, "a whole number >= 1")
        if self.kind == "model":
            if self.depth is not None:
                raise OptionError("--depth", self.depth, "only heads have it: add --kind eagle3 or --kind dflash")
            return
        if self.kind == "eagle3" and self.layers is not None:
            raise OptionError("--layers", self.layers, "an EAGLE-3 head has one layer: leave it out")
        if self.init != "target" or self.hidden_size is not None:
            raise OptionError("--kind", self.kind, "a head has its target's width: leave out --init and the sizes")
        for option, value in (("--layers", self.layers), ("--depth", self.depth)):
            if value is not None and value < 1:
                raise OptionError(option, value, "a whole number >= 1")

    @property
    def num_drafted(self) -> int:
        """Tokens that a head drafts in a row in training; 0 for a model."""
        return self.depth or _DEFAULT_DEPTHS.get(self.kind, 0)


@dataclass(frozen=True)
class TrainingOptions:
    """Data, budget and hyperparameters of training."""

    data: Annotated[Path | None, typer.Option(help="Text file for training and for the target's prompts.")] = None
    written: Annotated[
        int | None, typer.Option(help="Training sequences to generate with the target first. Default: 1024.")
    ] = None
    written_from: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="LOG", help="Instead: the target's outputs in a log of outrider record. Repeat it for several."
        ),
    ] = None
    keep_states: Annotated[
        bool,
        typer.Option(
            "--keep-states",
            help="Keep the target's hidden states of sequences in files, so that it reads each once; alpha is then "
            "that of states in bfloat16. They take 2 bytes for each number: 1,152 for a token of a target of width "
            "576, four times as many with a head.",
        ),
    ] = False
    written_fraction: Annotated[
        float, typer.Option(help="With --data: fraction of generated sequences in training.")
    ] = 0.5
    length: Annotated[int, typer.Option(help="Tokens per sequence.", rich_help_panel=_TRAINING)] = 256
    steps: Annotated[int | None, typer.Option(help="Number of training steps.", rich_help_panel=_TRAINING)] = None
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of training. Default: 10.", rich_help_panel=_TRAINING)
    ] = None
    loss: Annotated[str, typer.Option(help="Loss: kl, tv or lk.", rich_help_panel=_TRAINING)] = "kl"
    batch_size: Annotated[int, typer.Option(help="Sequences per step on each device.", rich_help_panel=_TRAINING)] = 8
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_TRAINING)] = 2e-3
    patience: Annotated[
        int, typer.Option(help="Stop after this many checks (of 20) without a better alpha.", rich_help_panel=_TRAINING)
    ] = 8
    seed: Annotated[int, typer.Option(rich_help_panel=_TRAINING)] = 0

    def __post_init__(self) -> None:
        for name, value in (("--written", self.num_written), ("--length", self.length)):
            if value < 2:
                raise OptionError(name, value, "a whole number >= 2")
        if self.written is not None and self.written_from:
            raise OptionError("--written", self.written, "leave it out: the sequences are those of --written-from")
        if self.keep_states and self.data is not None and self.written_fraction < 1:
            raise OptionError("--keep-states", True, "pieces of a text do not repeat: add --written-fraction 1")
        if not 0 < self.written_fraction <= 1:
            raise OptionError("--written-fraction", self.written_fraction, "a number above 0, and at most 1")

    @property
    def num_written(self) -> int:
        """Sequences to generate, unless there is a log."""
        return 1024 if self.written is None else self.written


@flat
def distill(
    target: Annotated[str, typer.Argument(help="Known name, folder or hub id. 'outrider models' lists the names.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft. An interrupted run resumes.")],
    shape: ShapeOptions,
    training: TrainingOptions,
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
    length, minutes = training.length, training.minutes
    if shape.num_drafted >= length - 1:
        raise OptionError("--depth", shape.num_drafted, "less than --length - 1")
    set_threads(threads)

    with progress("loading libraries"):
        from accelerate import PartialState

        from outrider.api import load
        from outrider.distill.student import TOKENS
        from outrider.distill.train import Recipe, distil
        from outrider.models.reading import stored_dtype
        from outrider.models.registry import resolve

    if training.steps is None and minutes is None:
        minutes = _DEFAULT_MINUTES
    recipe = Recipe(
        num_steps=training.steps,
        seconds=None if minutes is None else 60 * minutes,
        loss=training.loss,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        patience=training.patience,
        seed=training.seed,
    )
    processes = PartialState()  # before loading the target: under `accelerate launch` it sets this process's GPU
    with progress(f"loading {short_name(target)}"):
        decoder = load(target, device=device, models_file=models, allow_pickle=allow_pickle)
    lm = decoder.target
    if lm.device.type == "cuda" and lm.device.index not in (None, processes.device.index or 0):
        raise OptionError("--device", device, "choose the GPU by CUDA_VISIBLE_DEVICES, as the trainer does")
    if length > lm.context_len:
        raise OptionError("--length", length, f"{lm.name} accepts {lm.context_len} tokens")
    if shape.draft_vocab is not None and shape.draft_vocab > lm.vocab_size:
        raise OptionError("--draft-vocab", shape.draft_vocab, f"{lm.name} has {lm.vocab_size} tokens")
    model = _new_model(decoder, shape, training, models, allow_pickle) if shape.kind == "model" else None
    options = {"target": target, **asdict(shape), **asdict(training), "minutes": minutes}
    logs = [str(path) for path in training.written_from or ()]
    options |= {"data": training.data and str(training.data), "written": None if logs else training.num_written}
    options |= {"written_from": logs or None, "keep_states": training.keep_states or None}
    mixture, held_out = _data(decoder, training, output, options)
    states = output / "training" / "states" if training.keep_states else None
    student = _student(decoder, shape, mixture, model, training.seed, states)

    console = console_for(json_target)
    console.quiet = not processes.is_main_process
    num_params = sum(parameter.numel() for parameter in student.module.parameters())
    console.print(
        f"{output.name}: {num_params / 1e6:.2f} M parameters, for {lm.name}; held-out sequences: {len(held_out)}"
    )
    with progress("training, percent", 100) as advance:
        done = 0

        def on_step(spent: float) -> None:
            nonlocal done
            advance(round(100 * spent) - done)
            done = round(100 * spent)

        def on_check(check: Check) -> None:
            clear_line()
            console.print(_line(check))

        checks = distil(
            student,
            output,
            mixture,
            held_out,
            recipe,
            save_dtype=stored_dtype(resolve(target, models)),
            on_step=on_step,
            on_check=on_check,
        )
    best = max(checks, key=lambda check: check.mean_alpha)
    console.print(f"Best: {_line(best)}")
    few = f":vocab={output / TOKENS}" if (output / TOKENS).is_file() else ""
    console.print(f"Draft: {output}{few}", markup=False)
    if processes.is_main_process:
        options |= {"device": device, "threads": threads, "allow_pickle": allow_pickle}
        body: dict[str, Any] = {"checks": [asdict(check) for check in checks], "best": asdict(best)}
        body |= {"num_params": num_params, "num_held_out": len(held_out)}
        write_json(json_target, "distill", options, body, lm)
        write_json(str(output / "distill.json"), "distill", options, body, lm)


def _student(
    decoder: Decoder, shape: ShapeOptions, data: Mixture, model: Any | None, seed: int, states: Path | None
) -> Student:
    """The draft in training.

    Args:
        model: of ``--kind model``, before training.
        states: folder for the target's hidden states, if they are kept.
    """
    from outrider.distill.blocks import BlockStudent, default_layers, mask_token, new_dflash
    from outrider.distill.chains import ChainStudent, new_eagle3
    from outrider.distill.heads import most_frequent
    from outrider.distill.student import ModelStudent

    lm = decoder.target
    counts = data.token_counts(lm.vocab_size)
    token_ids = None
    if shape.draft_vocab is not None and shape.draft_vocab < lm.vocab_size:
        token_ids = most_frequent(counts, shape.draft_vocab)
    if model is not None:
        return ModelStudent(lm, model, decoder.tokenizer, token_ids, states)
    if shape.kind == "eagle3":
        return ChainStudent(lm, new_eagle3(lm, token_ids, seed), shape.num_drafted, states)
    layers, mask_id = shape.layers or default_layers(lm), mask_token(lm, counts)
    return BlockStudent(lm, new_dflash(lm, layers, shape.num_drafted, mask_id, token_ids, seed), states)


def _new_model(
    decoder: Decoder, shape: ShapeOptions, training: TrainingOptions, models: Path | None, allow_pickle: bool
) -> Any:
    """Draft model to train, in float32. Raises OptionError, ModelError, TokenizerMismatch."""
    from outrider.distill.student import Shape, copy_slices, default_shape, new_draft
    from outrider.models.loading import context_len, load_checkpoint
    from outrider.models.registry import Placement, resolve
    from outrider.text.tokenizer import check_same_tokens

    lm, init = decoder.target, shape.init
    target = lm.model
    if init in ("target", "scratch"):
        default = default_shape(target.config)
        num_layers = default.num_layers if shape.layers is None else shape.layers
        hidden_size = default.hidden_size if shape.hidden_size is None else shape.hidden_size
        draft = new_draft(target.config, Shape(num_layers, hidden_size), training.seed)
        if init == "target":
            copy_slices(target, draft)
        return draft
    if (shape.layers, shape.hidden_size) != (None, None):
        raise OptionError("--init", init, "an existing draft has its own shape: leave out the sizes")
    # Eager: the native engine would keep experts in tensors of its own, which are not trained.
    placement = Placement(str(lm.device), "float32", store="plain", execution="eager", allow_pickle=allow_pickle)
    checkpoint = load_checkpoint(resolve(init, models), placement)
    if decoder.tokenizer is not None and checkpoint.tokenizer is not None:
        check_same_tokens(decoder.tokenizer, checkpoint.tokenizer, lm.name, checkpoint.name)
    if training.length > context_len(checkpoint.model.config):
        raise OptionError("--length", training.length, f"{init} accepts {context_len(checkpoint.model.config)} tokens")
    return checkpoint.model


def _data(
    decoder: Decoder, training: TrainingOptions, output: Path, options: dict[str, Any]
) -> tuple[Mixture, list[Text]]:
    """Training data, from logs or generated unless an earlier run has done so, and held-out data: the target's own
    sequences, since a draft is used on such text.

    Args:
        options: of the run, which the folder belongs to.

    Raises:
        FileError: the folder belongs to another run, or the text cannot be read.
        OptionError: the text is too short, or a log is of another target.
    """
    from accelerate import PartialState

    from outrider.distill.data import (
        Mixture,
        beginning,
        generate_sequences,
        hold_out,
        pack,
        read_sequences,
        text_tokens,
    )
    from outrider.distill.train import check_same_run

    length, fraction, lm = training.length, training.written_fraction, decoder.target
    text = None if training.data is None else text_tokens(decoder.tokenizer, training.data)
    if text is not None and fraction < 1 and len(text) < 2 * length:
        raise OptionError("--length", length, f"{training.data} has only {len(text)} tokens to train on")
    logs = [open_log(path, lm.name, decoder.tokenizer, "--written-from") for path in training.written_from or ()]
    texts = [record.text for log in logs for record in log.records]
    packed = pack(texts, length, training.seed) if logs else None
    processes, folder = PartialState(), output / "training"
    if processes.is_main_process:
        check_same_run(output, options | {"num_logged_tokens": sum(len(one.ids) for one in texts) or None})
    if packed is None:
        num_sequences, share = training.num_written, (processes.process_index, processes.num_processes)
        with progress("sequences generated by the target", num_sequences // share[1]) as advance:
            generate_sequences(
                decoder,
                text,
                folder,
                num_sequences=num_sequences,
                length=length,
                seed=training.seed,
                share=share,
                on_done=advance,
            )
        processes.wait_for_everyone()
        packed = hold_out(*read_sequences(folder, num_sequences=num_sequences, length=length))
    sequences, held_out = packed
    trained_on = None if fraction == 1 else text
    return Mixture(trained_on, sequences, length, fraction, training.seed, beginning(decoder.tokenizer)), held_out


def _line(check: Check) -> str:
    loss = "" if check.loss is None else f", loss {check.loss:.3f}"
    with_k = f"{check.tokens_per_s:.0f} tokens/s predicted (K = {check.k})"
    # No intervals: they do not apply to changes between checks.
    alpha = f"alpha {' '.join(f'{alpha.value:.3f}' for alpha in check.alphas)}"
    return f"step {check.step}, {check.seconds / 60:.1f} min{loss}, {alpha}, {with_k}"
