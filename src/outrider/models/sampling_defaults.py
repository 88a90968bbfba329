"""Defaults of sampling: those that a checkpoint states, taken as vLLM and llama.cpp take them; and those of chats,
where it states none. Imports no torch, but for a GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import FileError, OptionError, OutriderError
from outrider.models.registry import ModelSpec
from outrider.options import Sampling
from outrider.system.files import read_text

FOR_CHATS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of chats with a model that states none: those of llama.cpp, so that people find what they know."""

_GENERATION_CONFIG = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_GGUF = dict(zip(_SAMPLING, ("temp", "top_k", "top_p", "min_p", "penalty_repeat"), strict=True))


def check_choice(choice: str) -> None:
    """Raises OptionError: ``sampling_defaults`` has no such choice."""
    if choice not in ("auto", "none"):
        raise OptionError("generation_config", choice, "auto (the checkpoint's sampling defaults) or none")


def sampling_defaults(spec: ModelSpec, choice: str = "auto") -> dict[str, Any]:
    """Fields of ``Sampling`` that a checkpoint states, if these are other than ours.

    Args:
        choice: "auto", or "none" for nothing.

    Raises:
        OptionError: there is no such choice.
        FileError: see ``stated_sampling``.
    """
    check_choice(choice)
    default = Sampling()
    stated = {} if choice == "none" else stated_sampling(spec)
    return {name: value for name, value in stated.items() if value != getattr(default, name)}


def stated_sampling(spec: ModelSpec) -> dict[str, Any]:
    """Fields of ``Sampling`` that a checkpoint states, in its file ``generation_config.json`` or in its GGUF file (keys
    ``general.sampling.*``, llama.cpp's pull request 17120). (Transformers' ``GenerationConfig`` fills in others, which
    the authors of the model did not choose.) ``do_sample`` is not read: a temperature of 0 is greedy, any other
    samples. Nor is ``max_new_tokens``: the length belongs to the request.

    Raises:
        FileError: the file cannot be read, or states an impossible value.
    """
    place: Path | str = spec.name
    try:
        if spec.gguf is not None:
            document = _of_gguf(spec)
        elif (file := generation_config_file(spec)) is not None:
            place, document = file, json.loads(read_text(file))
        else:
            return {}
        stated = {name: document[name] for name in _SAMPLING if document.get(name) is not None}
        Sampling(**stated)
    except (OptionError, ValueError, AttributeError, TypeError) as error:
        raise FileError(f"{place}: {error}; --generation-config none does without it") from None
    return stated


def defaults_text(name: str, defaults: Mapping[str, Any]) -> str:
    """The line that says which defaults a checkpoint states."""
    return f"sampling as {name} states: {values_text(defaults)} (--generation-config none does without)"


def values_text(sampling: Mapping[str, Any]) -> str:
    """Sampling options in words."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())


def generation_config_file(spec: ModelSpec) -> Path | None:
    """The file of a checkpoint, if it has one."""
    if spec.gguf is not None:
        return None
    if spec.path is not None:
        path = spec.path / _GENERATION_CONFIG
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    # It has none; or the hub cannot be reached, and what is missing of the model is reported where it is loaded.
    with contextlib.suppress(Exception):
        return Path(hf_hub_download(str(spec.hub), _GENERATION_CONFIG))
    return None


def _of_gguf(spec: ModelSpec) -> dict[str, Any]:
    """Options that a GGUF file states, under our names; a file that cannot be read is reported where it is loaded."""
    from outrider.models.gguf.checkpoint import gguf_file

    found: dict[str, Any] = {}
    with contextlib.suppress(OutriderError, OSError):
        metadata = gguf_file(spec).metadata
        for name, key in _OF_GGUF.items():
            value = metadata.get(f"general.sampling.{key}")
            # Stored in float32: the decimals that were meant. A top-k below 0 is off there.
            found[name] = float(f"{value:.6g}") if isinstance(value, float) else value
            if name == "temperature" and value is not None:  # below 0 is greedy there
                found[name] = max(0.0, found[name])
            if name == "top_k" and value is not None:
                found[name] = max(0, int(value))
    return found
