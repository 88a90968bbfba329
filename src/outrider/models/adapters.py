"""Adapters of PEFT (LoRA and its kin): merged into their base while it is loaded.

The merged model is the one that is served and certified. PEFT's own code merges; its logits before and after must agree
beyond rounding, so that kinds of adapters that cannot be merged are refused, whatever they are called.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch

from outrider.errors import MissingExtra, ModelCorrupt, OptionError, UnsupportedModel
from outrider.models.probe import relative_error, tolerance
from outrider.models.registry import Placement

_NUM_COMPARED = 8  # tokens


def check_mergeable(name: str, placed: Placement, size: int, method: str | None) -> None:
    """Refuse a placement in which an adapter cannot be merged.

    Args:
        size: processes that share the model.
        method: by which the base is quantized, if it is.

    Raises:
        OptionError, MissingExtra
    """
    stored = method if method != "gguf" else None  # whose weights Transformers widens
    quantization = stored or (placed.quantization if placed.quantization != "none" else None)
    if quantization is not None:
        raise OptionError(
            "quantization",
            quantization,
            f"the adapter of {name} is merged into weights in full: merge and save them first (merge_and_unload), or "
            "load it without quantization",
        )
    if size > 1:
        raise OptionError("tensor_parallel", size, f"the adapter of {name} is merged in one process: merge it first")
    if find_spec("peft") is None:
        raise MissingExtra("peft", "peft", f"the adapter of {name}")


def merge(name: str, model: Any, adapter: str) -> Any:
    """Merge an adapter into a model.

    Args:
        adapter: its folder, or its repository on the hub.

    Raises:
        UnsupportedModel: it is of a kind that cannot be merged.
        ModelCorrupt: it does not fit the model.
    """
    import peft
    from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    config = peft.PeftConfig.from_pretrained(adapter)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise UnsupportedModel(f"{name} has an adapter of prompts ({kind}), which cannot be merged into weights")
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about training
        try:
            wrapped = peft.get_peft_model(model, config)
        except ValueError as error:  # no such modules
            raise _unfit(name, adapter, str(error)) from None
        wanted = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        weights = load_peft_weights(adapter, device="cpu")
        wrong = [key for key, weight in weights.items() if key in wanted and wanted[key].shape != weight.shape]
        if wrong:
            shapes = f"{list(weights[wrong[0]].shape)} rather than {list(wanted[wrong[0]].shape)}"
            raise _unfit(name, adapter, f"{wrong[0]} has the shape {shapes}")
        unexpected = set_peft_model_state_dict(wrapped, weights).unexpected_keys
        lacking = wanted.keys() - weights.keys()
        for what, keys in (("its file lacks", lacking), ("the base has no place for", set(unexpected))):
            if keys:
                raise _unfit(name, adapter, f"{what} {len(keys)} of its weights, {min(keys)} among them")
        wrapped.eval()
        want = _logits(wrapped)
        model = wrapped.merge_and_unload(safe_merge=True)
    difference = relative_error(_logits(model), want)
    if not difference <= tolerance(model.dtype):
        raise UnsupportedModel(
            f"{name} has an adapter ({kind}) that cannot be merged into the weights: the logits of the merged model "
            f"differ by {difference:.1e} of their spread"
        )
    return model


def _unfit(name: str, adapter: str, reason: str) -> ModelCorrupt:
    return ModelCorrupt(f"the adapter {adapter} does not fit the base of {name}: {' '.join(reason.split())[:300]}")


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor:
    """[1, T, V]"""
    width = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(width, (1, _NUM_COMPARED), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
    return logits
