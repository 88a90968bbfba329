"""Sampling defaults that a checkpoint states in its ``generation_config.json``, taken as vLLM takes them.

Only values in the file count. (Transformers' ``GenerationConfig`` fills in others, which the authors of the model did
not choose.) ``do_sample`` is not read: a temperature of 0 is greedy, any other samples. Nor is ``max_new_tokens``: the
length belongs to the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import FileError, OptionError
from outrider.models.registry import ModelSpec
from outrider.options import Sampling
from outrider.system.files import read_text

CHOICES = ("auto", "none")
_FILE = "generation_config.json"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_choice(choice: str) -> None:
    """Raises OptionError."""
    if choice not in CHOICES:
        raise OptionError("generation_config", choice, "auto (the checkpoint's sampling defaults) or none")


def sampling_defaults(spec: ModelSpec, choice: str = "auto") -> dict[str, Any]:
    """Fields of ``Sampling`` that a checkpoint states, if these are other than ours.

    Args:
        choice: "auto", or "none" for nothing.

    Raises:
        OptionError: there is no such choice.
        FileError: the file cannot be read, or states an impossible value.
    """
    check_choice(choice)
    if choice == "none" or (path := _path_of(spec)) is None:
        return {}
    try:
        document = json.loads(read_text(path))
        default = Sampling()
        stated = {name: document[name] for name in _NAMES if document.get(name) is not None}
        found = {name: value for name, value in stated.items() if value != getattr(default, name)}
        Sampling(**found)
    except (OptionError, ValueError, AttributeError, TypeError) as error:
        raise FileError(f"{path}: {error}; --generation-config none does without it") from None
    return found


def defaults_text(name: str, defaults: Mapping[str, Any]) -> str:
    """The line that says so."""
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"sampling as {name} states in its {_FILE}: {values} (--generation-config none does without)"


def generation_config_of(spec: ModelSpec) -> Any | None:
    """Transformers' ``GenerationConfig`` of a checkpoint, with its end tokens; None if it has none."""
    from transformers import GenerationConfig

    path = _path_of(spec)
    return None if path is None else GenerationConfig.from_pretrained(path.parent)


def _path_of(spec: ModelSpec) -> Path | None:
    """The file of a checkpoint, if it has one."""
    if spec.gguf is not None:
        return None
    if spec.path is not None:
        path = spec.path / _FILE
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    # It has none; or the hub cannot be reached, and what is missing of the model is reported where it is loaded.
    with suppress(Exception):
        return Path(hf_hub_download(str(spec.hub), _FILE))
    return None
