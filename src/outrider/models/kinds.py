"""Kinds of models that are known not to work: refused by name before their weights are read.

So are checkpoints that are not models by themselves: adapters, and heads that draft from the hidden states of their
target; and pickled weights, which may run code of their author, unless they are asked for. Where they are allowed,
PyTorch's restricted unpickler reads them (``weights_only``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import FileError, ModelCorrupt, ModelError, UnsupportedModel, reason_of
from outrider.models.registry import ModelSpec
from outrider.system.files import parse_row, read_text
from outrider.system.resources import memory_errors

# Attention that position-based masks describe, states, and layers without a cache.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_LAYER_TYPES = _ATTENDING | {"linear_attention", "conv", "hybrid", "mlp", "moe"}
# Words in the names of a head's architectures and type, and fields that only its configuration has.
_HEADS = {
    "lilicorr": "a LiLiCorr draft",
    "dspark": "a DSpark draft",
    "peagle": "a P-EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash draft",
    "draft_vocab_size": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "medusa": "a set of Medusa heads",
    "hydra": "a set of Hydra heads",
    "mlpspeculator": "an MLP speculator",
    "mlp_speculator": "an MLP speculator",
    "assistant": "a Gemma 4 assistant",
    "mtp": "a multi-token prediction (MTP) head",
    "speculator": "a speculator",
}
_FIELDS_OF_HEADS = ("draft_vocab_size", "medusa_num_heads", "hydra_num_heads", "dflash_config", "eagle_config")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_CONFIG = "adapter_config.json"

# Ends of the names of counts and sizes, of Transformers and of GGUF. Of some, lists are made before a weight is read.
_COUNT = re.compile(
    r"((^|_)(num|n)_(\w+_)?layers?|heads?|head_dim|groups?|experts|per_tok|rank|kernel|scalar|n_embd|n_inner"
    r"|(inner|state|hidden|intermediate)_size|(block|head|dimension|expert|used|group|shared)_count(_\w+)?"
    r"|(embedding|feed_forward|key|value)_length(_\w+)?)$"
)
FAILURES = (TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, LookupError, AssertionError)
"""Errors of modelling code that expects another configuration, or another cache."""


def read_object(file: Path) -> dict[str, Any]:
    """JSON object in a file of a checkpoint. Raises ModelCorrupt."""
    try:
        return parse_row(str(file), read_text(file))
    except FileError as error:
        raise ModelCorrupt(f"{error}: download the file again") from None


def check_counts(name: str, stated: Any, field: str = "") -> None:
    """Refuse a count or a size that no model has, in the document of a file or in the value of a field. (Zeros may have
    a meaning.) Raises ModelCorrupt, which names the field."""
    if isinstance(stated, Mapping):
        for key, value in stated.items():
            check_counts(name, value, str(key))
    elif isinstance(stated, list) and _COUNT.search(field):
        for value in stated:
            check_counts(name, value, field)
    elif isinstance(stated, int | float) and _COUNT.search(field) and not 0 <= stated <= 2**24:
        raise ModelCorrupt(f"{name} states {field} = {stated}, which no model has: the file is damaged")


def ids_of(name: str, stated: Any, field: str = "eos_token_id") -> list[int]:
    """Ids of tokens in a field that may have none, one, or a list. Raises ModelCorrupt, which names the field."""
    ids = [] if stated is None else [*stated] if isinstance(stated, list | tuple) else [stated]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelCorrupt(f"{name} states {field} = {stated!r:.60}, which is no token id or list of ids: correct it")
    return ids


@contextmanager
def building(told: str, config: Any | None = None, kind: type[ModelError] = ModelCorrupt) -> Iterator[None]:
    """Translate errors of Transformers' and torch's classes, of many types, for configurations that make no sense."""
    import torch

    try:
        with memory_errors():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not isinstance(error, FAILURES) and "StrictDataclass" not in type(error).__name__:  # of huggingface_hub
            raise
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise kind(f"{told} ({reason}){odd_numbers(config)}") from error


def odd_numbers(config: Any | None) -> str:
    """Numbers of a configuration that may have led to an error, in words; empty if there are none."""
    # A part of a damaged configuration may be a dictionary.
    stated: dict[str, Any] = {} if config is None else getattr(config.get_text_config(decoder=True), "to_dict", dict)()
    numbers = {key: value for key, value in stated.items() if type(value) in (int, float) and not key.endswith("_id")}
    odd = [f"{key} = {one}" for key, one in numbers.items() if one == 0 and type(one) is int or not 0 <= one < 2**31]
    return f"; its configuration has {', '.join(odd)}" if odd else ""


def check_adapter(name: str, file: Path | None) -> None:
    """Refuse an adapter, by its adapter_config.json, if there is one: Transformers would ignore it, or load it together
    with its base. Raises UnsupportedModel."""
    if file is None:
        return
    base = read_object(file).get("base_model_name_or_path") or "its base"
    raise UnsupportedModel(
        f"{name} is a PEFT adapter of {base}, or has one beside it: merge it (PEFT's merge_and_unload), save the model "
        f"and give that, or the model without {ADAPTER_CONFIG}"
    )


def check_head(name: str, stated: Mapping[str, Any]) -> None:
    """Refuse a head, by its config.json: it is not a model by itself. Raises UnsupportedModel."""
    if (thing := head_named(stated)) is not None:
        raise UnsupportedModel(
            f"{name} is {thing}, which works only together with its base model: the target is that model, and a head "
            "of a known kind its draft ('outrider generate --help')"
        )


def head_named(stated: Mapping[str, Any]) -> str | None:
    """Kind of head that a config.json names, in words; None for models."""
    if "vision_config" in stated:  # some multimodal models are called Eagle too
        return None
    names = [*(stated.get("architectures") or []), stated.get("model_type"), stated.get("speculators_model_type")]
    names += [field for field in _FIELDS_OF_HEADS if stated.get(field) is not None]
    words = " ".join(map(str, names)).lower()
    return next((thing for word, thing in _HEADS.items() if word in words), None)


def check_missing(name: str, missing: Iterable[str]) -> None:
    """Raises ModelCorrupt: a checkpoint lacks weights."""
    if lacking := sorted(missing):
        raise ModelCorrupt(f"{name} lacks {len(lacking)} of the model's weights, {lacking[0]} among them")


def auto_class(name: str, config: Any) -> Any:
    """Auto class of Transformers that loads a model of this kind: of the text model alone where there is one, else of
    all of a multimodal model, which continues text too. Raises UnsupportedModel: there is none."""
    import transformers

    classes = (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
        (transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
    )
    for known, auto in classes:
        if type(config) in known:
            return auto
    if getattr(config, "auto_map", None):  # which Transformers refuses, as its code is not run
        return transformers.AutoModelForCausalLM
    raise UnsupportedModel(
        f"{name} is of the type {config.model_type}, for which Transformers {transformers.__version__} has no model "
        "that continues text: if its own class does, load it with that, and pass the model and its tokenizer"
    )


def check_task(name: str, config: Any) -> None:
    """Refuse a model that does not continue text, by its configuration."""
    architectures = config.architectures or []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise ModelCorrupt(f"{name}: its config.json states architectures = {architectures!r:.60}, no list of names")
    if config.is_encoder_decoder:
        kind = f"an encoder-decoder model ({config.model_type})"
        raise UnsupportedModel(f"{name} is {kind}: only causal language models work")
    if architectures and not any(map(_continues_text, architectures)):
        raise ModelCorrupt(f"{name} is not a causal language model: its config.json says {', '.join(architectures)}")


def check_kind(name: str, config: Any) -> None:
    """Refuse a kind of model by name before its weights are read."""
    check_task(name, config)
    kind, text_config = config.model_type, config.get_text_config(decoder=True)
    if strange := set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise UnsupportedModel(
            f"{name} ({kind}) has layers of type {', '.join(sorted(strange))}, whose cache cannot be rolled back to an "
            "earlier token here: attention must be full, sliding-window or chunked"
        )
    if kind in ("minimax", "recurrent_gemma", "rwkv", "xlstm"):  # the probe's verdict, without loading weights
        raise UnsupportedModel(
            f"{name} ({kind}) keeps its state outside of the common cache of Transformers, where it cannot be rolled "
            "back to an earlier token"
        )
    if kind in ("bloom", "mpt") or getattr(text_config, "alibi", False):
        raise UnsupportedModel(f"{name} ({kind}) uses ALiBi, which ignores position ids")


def _continues_text(architecture: str) -> bool:
    if any(part in architecture for part in ("CausalLM", "LMHead", "Conditional")):
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return architecture in NAMES.values()


def check_unpickled(spec: ModelSpec, config: Any) -> None:
    """Raises UnsupportedModel: the weights of a model would be read from a pickled file."""
    stated = getattr(config, "transformers_weights", None)  # goes before the usual names
    if stated is not None and not str(stated).endswith((".safetensors", ".safetensors.index.json")):
        raise _refusal_of_pickle(spec.location, str(stated))
    if spec.gguf is None and stated is None:
        check_no_pickle(spec.location, (WHOLE, INDEX), (PICKLED, _PICKLED_INDEX))


def check_no_pickle(location: str, plain: Sequence[str] = (), pickled: Sequence[str] = (PICKLED,)) -> None:
    """Raises UnsupportedModel: a folder or hub repository has pickled weights, and no plain ones."""
    from transformers.utils import has_file

    if not any(has_file(location, name) for name in plain):
        for name in pickled:
            if has_file(location, name):
                raise _refusal_of_pickle(location, name)


def _refusal_of_pickle(location: str, file: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights of {location} are in {file}, a pickle, which may run code: take them in safetensors; or, if you "
        "trust their author, --allow-pickle (in Python allow_pickle=True)"
    )
