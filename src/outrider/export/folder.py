"""Exported folder: configuration, scripts, checkpoints and a README."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import FileError
from outrider.export.checks import DescribedModel
from outrider.export.engine_files import Handover
from outrider.export.engine_rules import Outlook
from outrider.export.engines import Converter, ServingEngine
from outrider.export.gguf import obstacle, write_gguf
from outrider.models.registry import ModelSpec
from outrider.system.files import write_text


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts for the README.

    Attributes:
        outlooks: predictions by the engine's setting; empty without recorded output.
        basis: where recorded output and costs come from.
    """

    target: DescribedModel
    draft: DescribedModel
    outlooks: Mapping[str, Outlook]
    basis: str


def location(spec: ModelSpec, name: str) -> str:
    """Path of a model in the files: a hub id, or a link of this name beside them."""
    return str(spec.hub) if spec.path is None else name


def write_folder(
    output: Path, engine: ServingEngine, handover: Handover, facts: Facts, dtype: torch.dtype | None
) -> list[str]:
    """Write all files. Checkpoints are linked, or referred to by hub id; llama.cpp gets GGUF files.

    Args:
        dtype: of GGUF files; None for that of the checkpoint.

    Returns:
        The names of the files, links included.

    Raises:
        FileError: the folder cannot be written, or contains other files with these names.
        MissingExtra, UnsupportedModel: see ``write_gguf``.
    """
    files = engine.files(handover)
    models = {"target": facts.target.spec, "draft": facts.draft.spec}
    notes = list(engine.notes)
    convert = conversion(engine, facts.draft)
    try:
        links = []
        if convert is not None:  # first, since it may be refused
            head = models.pop("draft")
            _free(output / "draft")
            convert(head.location, facts.target.config.num_hidden_layers, output / "draft", head.name)
            links.append("draft")
        output.mkdir(parents=True, exist_ok=True)
        for name, spec in models.items():
            if spec.path is not None and not engine.needs_gguf:
                links.append(_link(output / name, spec))
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}") from None
    if engine.needs_gguf:
        commands = []
        for name, spec in models.items():
            is_head = name == "draft" and facts.draft.head is not None
            reason = "it is a head" if is_head else obstacle(spec)
            if reason is None:
                write_gguf(spec, output / f"{name}.gguf", dtype)
                links.append(f"{name}.gguf")
            else:
                notes.append(f"{name}.gguf was not created, since {reason}: `convert.sh` runs llama.cpp's converter.")
                commands.append(_conversion(name, spec, facts.target.spec if is_head else None))
        if commands:
            files["convert.sh"] = "#!/bin/sh\nset -eu\n" + "\n".join(commands) + "\n"
    files["README.md"] = readme(engine, handover, facts, notes, sorted([*files, *links]))
    for name, text in files.items():
        write_text(output / name, text)
        if name.endswith(".sh"):
            (output / name).chmod(0o755)
    return sorted([*files, *links])


def _link(path: Path, spec: ModelSpec) -> str:
    """Link to the checkpoint."""
    assert spec.path is not None
    _free(path)
    path.symlink_to(spec.path.resolve(), target_is_directory=True)
    return path.name


def _free(path: Path) -> None:
    """Remove an existing link, but nothing else."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        raise FileError(f"{path} already exists and is not a link: choose another folder, or remove it")


def conversion(engine: ServingEngine, draft: DescribedModel) -> Converter | None:
    """The conversion that a draft needs: if it is a head in a layout that the engine does not read."""
    return engine.convert if "transformer_layer_config" in (draft.head or {}) else None


def _conversion(name: str, spec: ModelSpec, target: ModelSpec | None) -> str:
    """Shell commands for llama.cpp's own converter, in its repository.

    Args:
        target: of a head.
    """
    folder = _checkpoint(name, spec)
    words = ["python", "convert_hf_to_gguf.py", folder, "--outfile", f"{name}.gguf"]
    if target is not None:
        words += ["--target-model-dir", _checkpoint("target", target)]
    command = shlex.join(words)
    fetch = [] if spec.path is not None else [shlex.join(["hf", "download", str(spec.hub), "--local-dir", folder])]
    return "\n".join([*fetch, command])


def _checkpoint(name: str, spec: ModelSpec) -> str:
    """Folder of a checkpoint, for a converter."""
    return str(spec.path.resolve()) if spec.path is not None else f"{name}-checkpoint"


def readme(engine: ServingEngine, handover: Handover, facts: Facts, notes: Sequence[str], names: Sequence[str]) -> str:
    """README: files, acceptance, predictions and checks."""
    rule = engine.rules[handover.setting]
    lines = [
        f"# {facts.target.spec.name} with the draft {facts.draft.spec.name}, for {engine.name}",
        "",
        f"Written by `outrider export` from the sources of {engine.name} {engine.version}.",
        "",
        f"    {engine.start}",
    ]
    if engine.port is not None:
        url = f"http://127.0.0.1:{engine.port}/v1/completions"
        lines.append(f"    curl {url} -H 'Content-Type: application/json' -d @request.json")
    lines += ["", f"Files: {', '.join(names)}."]
    if "target" in names or "draft" in names:
        what = "`target` is a link" if conversion(engine, facts.draft) is not None else "`target` and `draft` are links"
        lines.append(f"{what} to the checkpoints; `cp -rL` copies the folder with them.")
    lines += ["", "## Acceptance", "", f"{engine.name} accepts a drafted token with probability {rule.about}."]
    if handover.sampling.temperature == 0:
        lines.append("At temperature 0 all lossless acceptance rules are equal.")
    else:
        lines.append("This is lossless, but tau (tokens per round) depends on the rule; other engines differ.")
    lines += ["", *_table(engine, handover, facts), ""]
    lines += ["## Checked", "", *(f"- {line}" for line in _checks(engine, facts)), "", "## Notes", ""]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _table(engine: ServingEngine, handover: Handover, facts: Facts) -> list[str]:
    if not facts.outlooks:
        return [
            f"**tau is not known**, so K = {handover.k} was not tuned. Use `--log LOG` with recorded output of the "
            "target (`outrider record --probs 1`), or `--measure` to generate some."
        ]
    settings = [key for key in engine.rules if key in facts.outlooks]
    outlook = facts.outlooks[handover.setting]
    heads = [f"tau, {key}" if key else "tau" for key in settings]
    lines = [
        facts.basis,
        "",
        f"| K | {' | '.join(heads)} | speed-up, predicted |",
        "|" + "---|" * (len(heads) + 2),
    ]
    for k in outlook.tau:
        taus = [facts.outlooks[key].tau[k].tau for key in settings]
        texts = ["-" if tau is None else f"{tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]" for tau in taus]
        speed_up = f"{outlook.speed_up[k]:.2f}" if k in outlook.speed_up else "-"
        mark = "**" if k == handover.k else ""
        lines.append(f"| {mark}{k}{mark} | {' | '.join(texts)} | {speed_up} |")
    best = outlook.best_k
    if best is None:
        lines += ["", f"Written: K = {handover.k}. The best K is not known: set `--draft-cost` or `--measure`."]
    else:
        gain = outlook.speed_up[best]
        verdict = f"Best: K = {best}, {gain:.2f} times as fast as plain decoding, by this prediction."
        if gain <= 1:
            verdict = f"**By this prediction no K is faster than plain decoding** (K = {best}: {gain:.2f})."
        lines += ["", f"Written: K = {handover.k}. {verdict}"]
    if outlook.k_by_rows:
        by_rows = ", ".join(f"{rows}: {k or 'none'}" for rows, k in outlook.k_by_rows)
        lines.append(f"Best K by batch size, measured on this machine: {by_rows}.")
    return lines


def _checks(engine: ServingEngine, facts: Facts) -> list[str]:
    target, draft = facts.target, facts.draft
    architectures = sorted({target.architecture, draft.architecture})
    if draft.head is None:
        lines = [
            "Both tokenizers have the same tokens under the same ids.",
            f"vocab_size {target.vocab_size} and {draft.vocab_size}; context {target.context_len} and "
            f"{draft.context_len}.",
        ]
    else:
        lines = [f"The head is for a target of {draft.vocab_size} tokens."]
        architectures.remove(draft.architecture)
    if unknown := [name for name in architectures if name not in engine.families]:
        lines.append(f"**{' and '.join(unknown)}: not among the architectures checked** in {engine.version}.")
    else:
        lines.append(f"{' and '.join(architectures)}: known to {engine.name} {engine.version}.")
    return lines
