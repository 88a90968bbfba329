"""The model that a GGUF file states: the fields of a configuration, and how its tensors are named and stored."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from outrider.errors import ModelCorrupt, OutriderError, UnsupportedModel, reason_of
from outrider.models.families.table import FAMILIES
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import GgufForm, place_of

ARCHITECTURES = {name: (family, form) for family in FAMILIES for name, form in FAMILIES[family].gguf.items()}
"""By GGUF's name: the model_type, unless the file's keys are those of another, and the form of the file."""
_LOG = logging.getLogger(__name__)


class StatedModel(NamedTuple):
    """The model that a file states."""

    fields: dict[str, Any]  # of the config.json that would state the same
    form: GgufForm
    mtp: frozenset[str]  # names of the tensors of a head for later tokens, whose layers follow those of the model
    # Tensors that are no parameters: MTP, image encoders, and tensors read into the configuration or without effect:
    others: frozenset[str]


def stated_model(file: GgufFile, name: str) -> StatedModel:
    """The model that a file states. Raises UnsupportedModel: the architecture is not known here, or the file states
    more than is known; or ModelCorrupt: the file lacks a key, or has an impossible value."""
    stated = Stated(file, name)
    if file.metadata.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{name} is no model, but of GGUF's type {file.metadata['general.type']!r:.40}")
    if stated.architecture not in ARCHITECTURES:
        told = f"GGUF files of the architecture {stated.architecture!r:.40} are not read"
        raise UnsupportedModel(f"{name}: {told}: {', '.join(ARCHITECTURES)} are")
    family, form = ARCHITECTURES[stated.architecture]
    with _stating(name, family):
        fields = {"model_type": family} | config_fields(stated, form, FAMILIES[family].epsilon)
    of_mtp = range(stated.num_layers, stated.take("block_count"))
    mtp = frozenset(name for name in file.tensors if int(place_of(name)[0] or -1) in of_mtp)
    images = frozenset(one for one in file.tensors if one.startswith(("v.", "a.", "mm.")))  # as Ollama has them
    if images:
        _LOG.info("%s reads no images: %d tensors of their encoder are left out", name, len(images))
    return StatedModel(fields, form, mtp, mtp | images | stated.read_tensors)


def transformers_config(model: StatedModel, name: str) -> Any:
    """Transformers' configuration of the model that a file states. Raises ModelCorrupt."""
    from transformers import AutoConfig

    with _stating(name, model.fields["model_type"]):
        return AutoConfig.for_model(**copy.deepcopy(model.fields))


@contextmanager
def _stating(name: str, family: str) -> Iterator[None]:
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:  # values of another kind, and whatever Transformers' validation raises
        raise ModelCorrupt(f"{name}: the file's metadata is no {family} model ({reason_of(error)})") from None


def config_fields(stated: Stated, form: GgufForm, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """Fields of the configuration that a file states, that of the norms' epsilon among them. Raises UnsupportedModel,
    ModelCorrupt."""
    vocab_size, num_tensors = stated.rows("token_embd.weight"), len(stated.file.tensors)
    if (num_tokens := len(stated.file.metadata.get("tokenizer.ggml.tokens", ()))) > vocab_size:
        raise ModelCorrupt(f"{stated.name}: the file has {num_tokens} tokens, but embeddings of {vocab_size} alone")
    if not 0 < (num_layers := stated.num_layers) <= num_tensors:  # each layer has some
        raise ModelCorrupt(f"{stated.name}: the file states {num_layers} layers, and has {num_tensors} tensors")
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {role: stated.file.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    values = {
        "vocab_size": vocab_size,
        "hidden_size": stated.take("embedding_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": stated.take("context_length"),
        "tie_word_embeddings": not stated.has("output.weight"),
        epsilon: stated.take(form.epsilon),
        **{f"{role}_token_id": i if i in range(vocab_size) else None for role, i in ids.items()},
        **form.fields(stated),
    }
    stated.check_all_read()
    return values
