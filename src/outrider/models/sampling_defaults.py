"""Defaults of sampling: those that a checkpoint states, taken as vLLM and llama.cpp take them; and those of chats,
where it states none. Imports no torch, but for a GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import FileError, OptionError, OutriderError
from outrider.models.kinds import ids_of, read_object
from outrider.models.registry import ModelSpec
from outrider.options import Sampling
from outrider.system.files import read_text

if TYPE_CHECKING:
    from outrider.models.gguf.file import GgufFile

FOR_CHATS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of chats with a model that states none: those of llama.cpp, so that people find what they know."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_NAMES = dict(zip(_SAMPLING, ("temp", "top_k", "top_p", "min_p", "penalty_repeat"), strict=True))
_OFF = {"mirostat": 0, "xtc_probability": 0.0}
"""Values of GGUF keys that change nothing; the other options of such a sampler have no effect then."""
_OF_GGUF = "general.sampling."


def check_choice(choice: str) -> None:
    """Raises OptionError: ``stated_sampling`` has no such choice."""
    if choice not in ("auto", "none"):
        raise OptionError("generation_config", choice, "auto (the checkpoint's sampling defaults) or none")


@dataclass(frozen=True, slots=True)
class StatedSampling:
    """Sampling options that a checkpoint states.

    Attributes:
        options: fields of ``Sampling``.
        others: names, in its file, of options that we do not have.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        own = Sampling()
        return {name: value for name, value in self.options.items() if value != getattr(own, name)}

    def text(self, name: str, taken: Mapping[str, Any]) -> str:
        """The line for users: which of its options are taken, and which are not honoured. Empty: it states none."""
        parts = [f"sampling as {name} states: {values_text(taken)}"] if taken else []
        if self.others:
            named = ", ".join(one if one.isidentifier() else repr(one)[:40] for one in self.others)
            parts.append(f"not honoured: {named}" if taken else f"sampling that {name} states is not honoured: {named}")
        return f"{'; '.join(parts)} (--generation-config none does without)" if parts else ""


def stated_sampling(spec: ModelSpec, choice: str = "auto", file: GgufFile | None = None) -> StatedSampling:
    """Sampling options that a checkpoint states, in its file ``generation_config.json`` or in its GGUF file (keys
    ``general.sampling.*``, llama.cpp's pull request 17120). (Transformers' ``GenerationConfig`` fills in others, which
    the authors of the model did not choose.) ``do_sample`` is not read: a temperature of 0 is greedy, any other
    samples. Nor is ``max_new_tokens``: the length belongs to the request. The choice "none" takes nothing. A GGUF file
    is opened if it is not given. Raises OptionError: there is no such choice; FileError: the file cannot be read, or
    states an impossible value."""
    check_choice(choice)
    if choice == "none":
        return StatedSampling()
    place: Path | str = spec.name
    others: tuple[str, ...] = ()
    try:
        if spec.gguf is not None:
            document, others = _of_gguf(spec, file)
        elif (path := generation_config_file(spec)) is not None:
            place, document = path, json.loads(read_text(path))
        else:
            return StatedSampling()
        options = {name: document[name] for name in _SAMPLING if document.get(name) is not None}
        Sampling(**options)
    except (OptionError, ValueError, AttributeError, TypeError) as error:
        raise FileError(f"{place}: {error}; --generation-config none does without it") from None
    return StatedSampling(options, others)


def stated_end_ids(spec: ModelSpec) -> Any:
    """``eos_token_id`` of a checkpoint's generation_config.json; None if it states none. Raises ModelCorrupt."""
    file = generation_config_file(spec)
    stated = None if file is None else read_object(file).get("eos_token_id")
    ids_of(str(file), stated)
    return stated


def values_text(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())


def generation_config_file(spec: ModelSpec) -> Path | None:
    """The file of a checkpoint, if it has one. Raises ModelNotFound: it cannot be fetched."""
    with contextlib.suppress(OSError, ValueError):  # of the hub: a model that is missing is reported where it is loaded
        return None if spec.gguf is not None else spec.file("generation_config.json")
    return None


def _of_gguf(spec: ModelSpec, file: GgufFile | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Options that a GGUF file states, under our names; and the names of others. A file that cannot be read is reported
    where it is loaded."""
    from outrider.models.gguf.checkpoint import gguf_file

    stated: dict[str, Any] = {}
    with contextlib.suppress(OutriderError, OSError):
        for key, value in (file or gguf_file(spec)).metadata.items():
            if key.startswith(_OF_GGUF):
                # Stored in float32: the decimals that were meant.
                stated[key.removeprefix(_OF_GGUF)] = float(f"{value:.6g}") if isinstance(value, float) else value
    for key in ("temp", "top_k"):  # below 0 is greedy there, and off
        if isinstance(stated.get(key), int | float) and stated[key] < 0:
            stated[key] = 0
    options = {name: stated.pop(key, None) for name, key in _GGUF_NAMES.items()}
    off = tuple(name.partition("_")[0] for name, value in _OFF.items() if stated.get(name, value) == value)
    off += ("penalty_last_n",) if options["repetition_penalty"] in (None, 1.0) else ()
    return options, tuple(sorted(key for key in stated if not key.startswith(off)))
