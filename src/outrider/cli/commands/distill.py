"""``outrider distill``: trains a draft model or a head for a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption
from outrider.cli.shared.output import clear_line, console_for, write_json
from outrider.cli.shared.pair_options import AllowPickleOption, set_threads
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.distill.data import Mixture
    from outrider.distill.student import Student
    from outrider.distill.train import Check
    from outrider.measure.teacher_forcing import Text

_shape, _training, _machine = (partial(typer.Option, rich_help_panel=name) for name in ("Shape", "Training", "Machine"))


@dataclass(frozen=True)
class ShapeOptions:
    """Kind, size and initial weights of a draft."""

    kind: Annotated[str, _shape(help="model, or eagle3: a head on the target's hidden states.")] = "model"
    layers: Annotated[int | None, _shape(help="Number of layers. Default: a sixteenth of the target's.")] = None
    hidden_size: Annotated[int | None, _shape(help="Hidden size. Default: the target's.")] = None
    init: Annotated[
        str,
        _shape(
            help="Initial weights: target (some of its layers, part of its width), scratch (random), or an existing "
            "draft (known name, folder or hub id)."
        ),
    ] = "target"
    draft_vocab: Annotated[
        int | None, _shape(help="Tokens that the draft can draft, the most frequent. Default: all.")
    ] = None
    depth: Annotated[int | None, _shape(help="Of a head: tokens drafted in a row in training. Default: 5.")] = None

    def __post_init__(self) -> None:
        if self.kind not in ("model", "eagle3"):
            remedy = "eagle3 is the head that is trained here" if self.kind == "dflash" else "choose model or eagle3"
            raise OptionError("--kind", self.kind, remedy)
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise OptionError("--draft-vocab", self.draft_vocab, "a whole number >= 1")
        if self.kind == "model":
            if self.depth is not None:
                raise OptionError("--depth", self.depth, "only heads have it: add --kind eagle3")
            return
        if self.layers is not None:
            raise OptionError("--layers", self.layers, "an EAGLE-3 head has one layer: leave it out")
        if self.init != "target" or self.hidden_size is not None:
            raise OptionError("--kind", self.kind, "a head has its target's width: leave out --init and the sizes")
        if self.depth is not None and self.depth < 1:
            raise OptionError("--depth", self.depth, "a whole number >= 1")

    @property
    def num_drafted(self) -> int:
        """Tokens that a head drafts in a row in training; 0 for a model."""
        return 0 if self.kind == "model" else self.depth or 5


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
            metavar="LOG", help="Instead: the target's outputs in a log of generate --output. Repeat it for several."
        ),
    ] = None
    written_fraction: Annotated[
        float, typer.Option(help="With --data: fraction of generated sequences in training.")
    ] = 0.5
    length: Annotated[int, _training(help="Tokens per sequence.")] = 256
    steps: Annotated[int | None, _training(help="Number of training steps.")] = None
    minutes: Annotated[float | None, _training(help="Minutes of training. Default: 10.")] = None
    loss: Annotated[str, _training(help="Loss: kl, tv or lk.")] = "kl"
    batch_size: Annotated[int, _training(help="Sequences per step on each device.")] = 8
    learning_rate: Annotated[float, _training(help="Peak learning rate.")] = 2e-3
    patience: Annotated[int, _training(help="Stop after this many checks (of 20) without a better alpha.")] = 8
    seed: Annotated[int, _training()] = 0

    def __post_init__(self) -> None:
        for name, value in (("--written", self.num_written), ("--length", self.length)):
            if value < 2:
                raise OptionError(name, value, "a whole number >= 2")
        if self.written is not None and self.written_from:
            raise OptionError("--written", self.written, "leave it out: the sequences are those of --written-from")
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
    device: Annotated[str, _machine(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    threads: Annotated[
        int | None,
        _machine(
            min=1,
            metavar="N",
            help="CPU threads. Default: OMP_NUM_THREADS; else one for each physical core, without efficiency cores.",
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
        from outrider.distill.heads import HeadStudent, new_eagle3
        from outrider.distill.student import TOKENS, ModelStudent
        from outrider.distill.train import Recipe, distil
        from outrider.models.reading import stored_dtype
        from outrider.models.registry import resolve

    if training.steps is None and minutes is None:
        minutes = 10.0
    same = {name: getattr(training, name) for name in ("loss", "batch_size", "learning_rate", "patience", "seed")}
    recipe = Recipe(num_steps=training.steps, seconds=None if minutes is None else 60 * minutes, **same)
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
    logs = [str(path) for path in training.written_from or ()]
    options = {
        "target": target,
        **asdict(shape),
        **asdict(training),
        "minutes": minutes,
        "data": training.data and str(training.data),
        "written": None if logs else training.num_written,
        "written_from": logs or None,
    }
    mixture, held_out = _data(decoder, training, output, options)
    token_ids = None
    if shape.draft_vocab is not None and shape.draft_vocab < lm.vocab_size:
        token_ids = mixture.most_frequent(shape.draft_vocab, lm.vocab_size)
    student: Student = (
        HeadStudent(lm, new_eagle3(lm, token_ids, training.seed), shape.num_drafted)
        if model is None
        else ModelStudent(lm, model, decoder.tokenizer, token_ids)
    )

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


def _new_model(
    decoder: Decoder, shape: ShapeOptions, training: TrainingOptions, models: Path | None, allow_pickle: bool
) -> Any:
    """Draft model to train, in float32. Raises OptionError, ModelError, TokenizerMismatch."""
    from outrider.distill.student import copy_slices, default_shape, new_draft
    from outrider.models.loading import context_len, load_checkpoint
    from outrider.models.registry import Placement, resolve
    from outrider.text.tokenizer import check_same_tokens

    lm, init = decoder.target, shape.init
    target = lm.model
    if init in ("target", "scratch"):
        own = (shape.layers, shape.hidden_size)
        sizes = [usual if one is None else one for one, usual in zip(own, default_shape(target.config), strict=True)]
        draft = new_draft(target.config, (sizes[0], sizes[1]), training.seed)
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
    """Training data, from logs or generated unless an earlier run with these options has done so; and held-out data,
    the target's own sequences, since a draft is used on such text. Raises FileError: the folder belongs to another
    run, or the text cannot be read; OptionError: the text is too short, or a log is of another target."""
    from accelerate import PartialState

    from outrider.distill import data
    from outrider.distill.train import check_same_run
    from outrider.measure.log import open_log

    length, fraction, lm = training.length, training.written_fraction, decoder.target
    text = None if training.data is None else data.text_tokens(decoder.tokenizer, training.data)
    if text is not None and fraction < 1 and len(text) < 2 * length:
        raise OptionError("--length", length, f"{training.data} has only {len(text)} tokens to train on")
    logs = [open_log(path, lm.name, decoder.tokenizer, "--written-from") for path in training.written_from or ()]
    texts = [record.text for log in logs for record in log.records]
    packed = data.pack(texts, length, training.seed) if logs else None
    processes, folder = PartialState(), output / "training"
    if processes.is_main_process:
        check_same_run(output, options | {"num_logged_tokens": sum(len(one.ids) for one in texts) or None})
    if packed is None:
        num_sequences, share = training.num_written, (processes.process_index, processes.num_processes)
        with progress("sequences generated by the target", num_sequences // share[1]) as advance:
            sizes = {"num_sequences": num_sequences, "length": length, "seed": training.seed}
            data.generate_sequences(decoder, text, folder, **sizes, share=share, on_done=advance)
        processes.wait_for_everyone()
        packed = data.read_sequences(folder, num_sequences=num_sequences, length=length)
    sequences, held_out = packed
    trained_on = None if fraction == 1 else text
    return data.Mixture(
        trained_on, sequences, length, fraction, training.seed, data.beginning(decoder.tokenizer)
    ), held_out


def _line(check: Check) -> str:
    loss = "" if check.loss is None else f", loss {check.loss:.3f}"
    with_k = f"{check.tokens_per_s:.0f} tokens/s predicted (K = {check.k})"
    # No intervals: they do not apply to changes between checks.
    alpha = f"alpha {' '.join(f'{alpha.value:.3f}' for alpha in check.alphas)}"
    return f"step {check.step}, {check.seconds / 60:.1f} min{loss}, {alpha}, {with_k}"
