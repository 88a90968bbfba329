"""``outrider distill``: trains a draft model or a head for a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, ModelsOption, field_of
from outrider.cli.shared.output import clear_line, console_for, write_json
from outrider.cli.shared.pair_options import AllowPickleOption, DeviceOption, ThreadsOption, set_threads
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.distill.data import Mixture
    from outrider.distill.student import Student
    from outrider.distill.train import Check
    from outrider.measure.teacher_forcing import Text

_shape, _training, _machine = (partial(field_of, panel) for panel in ("Shape", "Training", "Machine"))
_data_option = partial(field_of, None)


def _refuse(*checks: tuple[bool, str, object, str]) -> None:
    """Check options: whether each is wrong, its name, its value and the remedy. Raises OptionError."""
    for is_wrong, name, value, remedy in checks:
        if is_wrong:
            raise OptionError(name, value, remedy)


@dataclass(frozen=True)
class ShapeOptions:
    """Kind, size and initial weights of a draft."""

    kind: str = _shape("model", "model, or eagle3: a head on the target's hidden states.")
    layers: int | None = _shape(None, "Number of layers. Default: a sixteenth of the target's.")
    hidden_size: int | None = _shape(None, "Hidden size. Default: the target's.")
    init: str = _shape(
        "target",
        "Initial weights: target (some of its layers, part of its width), scratch (random), or an existing draft "
        "(known name, folder or hub id).",
    )
    draft_vocab: int | None = _shape(None, "Tokens that the draft can draft, the most frequent. Default: all.")
    depth: int | None = _shape(None, "Of a head: tokens drafted in a row in training. Default: 5.")

    def __post_init__(self) -> None:
        is_head, has_shape = self.kind != "model", self.init != "target" or self.hidden_size is not None
        known = "eagle3 is the head that is trained here" if self.kind == "dflash" else "choose model or eagle3"
        width = "a head has its target's width: leave out --init and the sizes"
        least = "a whole number >= 1"
        _refuse(
            (self.kind not in ("model", "eagle3"), "--kind", self.kind, known),
            (self.draft_vocab is not None and self.draft_vocab < 1, "--draft-vocab", self.draft_vocab, least),
            (not is_head and self.depth is not None, "--depth", self.depth, "only heads have it: add --kind eagle3"),
            (
                is_head and self.layers is not None,
                "--layers",
                self.layers,
                "an EAGLE-3 head has one layer: leave it out",
            ),
            (is_head and has_shape, "--kind", self.kind, width),
            (self.depth is not None and self.depth < 1, "--depth", self.depth, least),
        )

    @property
    def num_drafted(self) -> int:
        """Tokens that a head drafts in a row in training; 0 for a model."""
        return 0 if self.kind == "model" else self.depth or 5


@dataclass(frozen=True)
class TrainingOptions:
    """Data, budget and hyperparameters of training."""

    data: Path | None = _data_option(None, "Text file for training and for the target's prompts.")
    written: int | None = _data_option(None, "Training sequences to generate with the target first. Default: 1024.")
    written_from: list[Path] | None = _data_option(
        None, "Instead: the target's outputs in a log of generate --output. Repeat it for several.", metavar="LOG"
    )
    written_fraction: float = _data_option(0.5, "With --data: fraction of generated sequences in training.")
    length: int = _training(256, "Tokens per sequence.")
    steps: int | None = _training(None, "Number of training steps.")
    minutes: float | None = _training(None, "Minutes of training. Default: 10.")
    loss: str = _training("kl", "Loss: kl, tv or lk.")
    batch_size: int = _training(8, "Sequences per step on each device.")
    learning_rate: float = _training(2e-3, "Peak learning rate.")
    patience: int = _training(8, "Stop after this many checks (of 20) without a better alpha.")
    seed: int = _training(0, "")

    def __post_init__(self) -> None:
        logged, share = "leave it out: the sequences are those of --written-from", self.written_fraction
        _refuse(
            (self.num_written < 2, "--written", self.num_written, "a whole number >= 2"),
            (self.length < 2, "--length", self.length, "a whole number >= 2"),
            (self.written is not None and bool(self.written_from), "--written", self.written, logged),
            (not 0 < share <= 1, "--written-fraction", share, "a number above 0, and at most 1"),
        )

    @property
    def num_written(self) -> int:
        """Sequences to generate, unless there is a log."""
        return 1024 if self.written is None else self.written

    @property
    def budget(self) -> float | None:
        """Minutes; None if the number of steps alone is given."""
        return 10.0 if self.steps is None and self.minutes is None else self.minutes


@flat
def distill(
    target: Annotated[str, typer.Argument(help="Known name, folder or hub id. 'outrider models' lists the names.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft. An interrupted run resumes.")],
    shape: ShapeOptions,
    training: TrainingOptions,
    models: ModelsOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    allow_pickle: AllowPickleOption = False,
    json_target: JsonOption = None,
) -> None:
    """Train a draft to match the target's distribution. Checks measure alpha and tokens per second."""
    length = training.length
    _refuse((shape.num_drafted >= length - 1, "--depth", shape.num_drafted, "less than --length - 1"))
    set_threads(threads)

    with progress("loading libraries"):
        from accelerate import PartialState

        from outrider.api import load
        from outrider.distill.heads import HeadStudent, new_eagle3
        from outrider.distill.student import TOKENS, ModelStudent
        from outrider.distill.train import Recipe, distil
        from outrider.models.reading import stored_dtype
        from outrider.models.registry import resolve

    same = {name: getattr(training, name) for name in ("loss", "batch_size", "learning_rate", "patience", "seed")}
    minutes = training.budget
    recipe = Recipe(num_steps=training.steps, seconds=None if minutes is None else 60 * minutes, **same)
    processes = PartialState()  # before loading the target: under `accelerate launch` it sets this process's GPU
    with progress(f"loading {short_name(target)}"):
        decoder = load(target, models_file=models, device=device, allow_pickle=allow_pickle)
    lm, few = decoder.target, shape.draft_vocab
    is_other_gpu = lm.device.type == "cuda" and lm.device.index not in (None, processes.device.index or 0)
    _refuse(
        (is_other_gpu, "--device", device, "choose the GPU by CUDA_VISIBLE_DEVICES, as the trainer does"),
        (length > lm.context_len, "--length", length, f"{lm.name} accepts {lm.context_len} tokens"),
        (few is not None and few > lm.vocab_size, "--draft-vocab", few, f"{lm.name} has {lm.vocab_size} tokens"),
    )
    model = _new_model(decoder, shape, training, models, allow_pickle) if shape.kind == "model" else None
    logs = [str(path) for path in training.written_from or ()]
    given = {"minutes": minutes, "data": training.data and str(training.data), "written_from": logs or None}
    given["written"] = None if logs else training.num_written
    options = {"target": target, **asdict(shape), **asdict(training), **given}
    mixture, held_out = _data(decoder, training, output, options)
    token_ids = None if few is None or few == lm.vocab_size else mixture.most_frequent(few, lm.vocab_size)
    student: Student
    if model is None:
        student = HeadStudent(lm, new_eagle3(lm, token_ids, training.seed), shape.num_drafted)
    else:
        student = ModelStudent(lm, model, decoder.tokenizer, token_ids)

    console = console_for(json_target)
    console.quiet = not processes.is_main_process
    num_params = sum(parameter.numel() for parameter in student.module.parameters())
    size = f"{num_params / 1e6:.2f} M parameters, for {lm.name}; held-out sequences: {len(held_out)}"
    console.print(f"{output.name}: {size}")
    dtype = stored_dtype(resolve(target, models))
    with progress("training, percent", 100) as advance:
        done = 0

        def on_step(spent: float) -> None:
            nonlocal done
            advance(round(100 * spent) - done)
            done = round(100 * spent)

        def on_check(check: Check) -> None:
            clear_line()
            console.print(_line(check))

        how: dict[str, Any] = {"save_dtype": dtype, "on_step": on_step, "on_check": on_check}
        checks = distil(student, output, mixture, held_out, recipe, **how)
    best = max(checks, key=lambda check: check.mean_alpha)
    console.print(f"Best: {_line(best)}")
    vocab = f":vocab={output / TOKENS}" if (output / TOKENS).is_file() else ""
    console.print(f"Draft: {output}{vocab}", markup=False)
    if processes.is_main_process:
        options |= {"device": device, "threads": threads, "allow_pickle": allow_pickle}
        body: dict[str, Any] = {"checks": [asdict(check) for check in checks], "best": asdict(best)}
        body |= {"num_params": num_params, "num_held_out": len(held_out)}
        for path in (json_target, str(output / "distill.json")):
            write_json(path, "distill", options, body, lm)


def _new_model(
    decoder: Decoder, shape: ShapeOptions, training: TrainingOptions, models: Path | None, allow_pickle: bool
) -> Any:
    """Draft model to train, in float32. Raises OptionError, ModelError, TokenizerMismatch."""
    from outrider.distill.student import copy_slices, default_shape, new_draft
    from outrider.models.loading import context_len, load_checkpoint
    from outrider.models.registry import Placement, resolve
    from outrider.text.tokenizer import check_same_tokens

    lm, init, own = decoder.target, shape.init, (shape.layers, shape.hidden_size)
    target = lm.model
    if init in ("target", "scratch"):
        sizes = [usual if one is None else one for one, usual in zip(own, default_shape(target.config), strict=True)]
        draft = new_draft(target.config, (sizes[0], sizes[1]), training.seed)
        if init == "target":
            copy_slices(target, draft)
        return draft
    _refuse((own != (None, None), "--init", init, "an existing draft has its own shape: leave out the sizes"))
    # Eager: the native engine would keep experts in tensors of its own, which are not trained.
    placement = Placement(str(lm.device), "float32", store="plain", execution="eager", allow_pickle=allow_pickle)
    checkpoint = load_checkpoint(resolve(init, models), placement)
    if decoder.tokenizer is not None and checkpoint.tokenizer is not None:
        check_same_tokens(decoder.tokenizer, checkpoint.tokenizer, lm.name, checkpoint.name)
    most = context_len(checkpoint.model.config)
    _refuse((training.length > most, "--length", training.length, f"{init} accepts {most} tokens"))
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

    length, fraction, seed, tokenizer = training.length, training.written_fraction, training.seed, decoder.tokenizer
    text = None if training.data is None else data.text_tokens(tokenizer, training.data)
    if text is not None and fraction < 1 and len(text) < 2 * length:
        raise OptionError("--length", length, f"{training.data} has only {len(text)} tokens to train on")
    logs = [open_log(path, decoder.target.name, tokenizer, "--written-from") for path in training.written_from or ()]
    texts = [record.text for log in logs for record in log.records]
    packed = data.pack(texts, length, seed) if logs else None
    processes, folder = PartialState(), output / "training"
    if processes.is_main_process:
        check_same_run(output, options | {"num_logged_tokens": sum(len(one.ids) for one in texts) or None})
    if packed is None:
        sizes, share = (training.num_written, length), (processes.process_index, processes.num_processes)
        with progress("sequences generated by the target", training.num_written // share[1]) as advance:
            data.generate_sequences(decoder, text, folder, *sizes, seed, share, advance)
        processes.wait_for_everyone()
        packed = data.read_sequences(folder, *sizes)
    trained_on = None if fraction == 1 else text
    return data.Mixture(trained_on, packed[0], length, fraction, seed, data.beginning(tokenizer)), packed[1]


def _line(check: Check) -> str:
    loss = "" if check.loss is None else f", loss {check.loss:.3f}"
    # No intervals: they do not apply to changes between checks.
    alpha = f"alpha {' '.join(f'{alpha.value:.3f}' for alpha in check.alphas)}"
    with_k = f"{check.tokens_per_s:.0f} tokens/s predicted (K = {check.k})"
    return f"step {check.step}, {check.seconds / 60:.1f} min{loss}, {alpha}, {with_k}"
