"""Exported folder: configuration, scripts, checkpoints and a README."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import FileError
from outrider.export.checks import DescribedModel
from outrider.export.engines import FAMILIES, RULES, Engine, Handover
from outrider.models.registry import ModelSpec
from outrider.system.files import write_text


def location(spec: ModelSpec, name: str) -> str:
    """Path of a model in the files: a hub id, or a link of this name beside them."""
    return str(spec.hub) if spec.path is None else name


def is_converted(engine: Engine, draft: DescribedModel) -> bool:
    """Whether the draft is a head in a layout that the engine does not read."""
    return engine.convert is not None and "transformer_layer_config" in (draft.head or {})


def write_folder(
    output: Path, engine: Engine, handover: Handover, target: DescribedModel, draft: DescribedModel
) -> list[str]:
    """Write all files. Checkpoints are linked, or referred to by hub id; for llama.cpp a script converts them.

    Returns:
        The names of the files, links included.

    Raises:
        FileError: the folder cannot be written, or contains other files with these names.
        UnsupportedModel: the engine's layout of heads cannot state a part of the draft.
    """
    files = engine.files(handover)
    models = {"target": target.spec, "draft": draft.spec}
    links = []
    try:
        if is_converted(engine, draft):  # first, since it may be refused
            assert engine.convert is not None
            del models["draft"]
            _free(output / "draft")
            engine.convert(draft.spec.location, target.config.num_hidden_layers, output / "draft", draft.spec.name)
            links.append("draft")
        output.mkdir(parents=True, exist_ok=True)
        for name, spec in models.items():
            if spec.path is not None and not engine.needs_gguf:
                _free(output / name)
                (output / name).symlink_to(spec.path.resolve(), target_is_directory=True)
                links.append(name)
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}") from None
    if engine.needs_gguf:
        head_of = None if draft.head is None else target.spec
        commands = [*_conversion("target", target.spec), *_conversion("draft", draft.spec, head_of)]
        files["convert.sh"] = "\n".join(["#!/bin/sh", "set -eu", *commands, ""])
    files["README.md"] = _readme(engine, handover, target, draft, sorted([*files, "README.md", *links]))
    for name, text in files.items():
        write_text(output / name, text)
        if name.endswith(".sh"):
            (output / name).chmod(0o755)
    return sorted([*files, *links])


def _free(path: Path) -> None:
    """Remove an existing link, but nothing else."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        raise FileError(f"{path} already exists and is not a link: choose another folder, or remove it")


def _conversion(name: str, spec: ModelSpec, target: ModelSpec | None = None) -> list[str]:
    """Shell commands for llama.cpp's own converter, in its repository.

    Args:
        target: of a head.
    """
    folder = _checkpoint(name, spec)
    words = ["python", "convert_hf_to_gguf.py", folder, "--outfile", f"{name}.gguf"]
    if target is not None:
        words += ["--target-model-dir", _checkpoint("target", target)]
    fetch = [] if spec.path is not None else [shlex.join(["hf", "download", str(spec.hub), "--local-dir", folder])]
    return [*fetch, shlex.join(words)]


def _checkpoint(name: str, spec: ModelSpec) -> str:
    """Folder of a checkpoint, for a converter."""
    return str(spec.path.resolve()) if spec.path is not None else f"{name}-checkpoint"


def _readme(
    engine: Engine, handover: Handover, target: DescribedModel, draft: DescribedModel, names: Sequence[str]
) -> str:
    """README: files, acceptance, checks and notes."""
    rule = engine.rules[handover.setting]
    lines = [
        f"# {target.spec.name} with the draft {draft.spec.name}, for {engine.name}",
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
        what = "`target` is a link" if is_converted(engine, draft) else "`target` and `draft` are links"
        lines.append(f"{what} to the checkpoints; `cp -rL` copies the folder with them.")
    lines += ["", "## Acceptance", "", f"{engine.name} accepts a drafted token with probability {RULES[rule]}."]
    if handover.sampling.temperature == 0:
        lines.append("At temperature 0 all lossless acceptance rules are equal.")
    else:
        lines.append("This is lossless, but tau (tokens per round) depends on the rule; other engines differ.")
    name = f"{draft.spec.name}:greedy" if rule == "greedy" else draft.spec.name
    lines += [
        f"K = {handover.k}. `outrider replay LOG --draft {name} --acceptance rejection` predicts tau for every K.",
        "",
        "## Checked",
        "",
        *(f"- {line}" for line in _checks(engine, target, draft)),
        "",
        "## Notes",
        "",
        *(f"- {note}" for note in engine.notes),
    ]
    return "\n".join(lines) + "\n"


def _checks(engine: Engine, target: DescribedModel, draft: DescribedModel) -> list[str]:
    architectures = {target.architecture}
    if draft.head is None:
        architectures.add(draft.architecture)
        lines = [
            "Both tokenizers have the same tokens under the same ids.",
            f"vocab_size {target.vocab_size} and {draft.vocab_size}; context {target.context_len} and "
            f"{draft.context_len}.",
        ]
    else:
        lines = [f"The head is for a target of {draft.vocab_size} tokens."]
    if unknown := sorted(architectures - FAMILIES):
        lines.append(f"**{' and '.join(unknown)}: not among the architectures checked** in {engine.version}.")
    else:
        lines.append(f"{' and '.join(sorted(architectures))}: known to {engine.name} {engine.version}.")
    return lines
