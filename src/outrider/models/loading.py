"""Loads an LM that is known to work, from a name or from objects in memory.

Models that are known not to work are refused by name; all others are probed (probe.py) before use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outrider.errors import (
    DeviceError,
    ModelCorrupt,
    OptionError,
    TokenizerMismatch,
    UnsupportedModel,
)
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.adapters import check_mergeable, merge
from outrider.models.block_weights import BlockWeights
from outrider.models.cpu_weights import has_kernel, kept_type, narrow_weights, widen_weights
from outrider.models.executions import choose_execution
from outrider.models.generation_config import generation_config_of
from outrider.models.group_rounding import predict_groups, round_to_groups
from outrider.models.kinds import auto_class, check_kind, check_missing
from outrider.models.memory import skeleton, weights_bytes
from outrider.models.memory_fit import check_fits, fastest_with_room, forms, room_of, stored_bytes
from outrider.models.notes import has_notes, notes_name, read_notes, write_notes
from outrider.models.parallel import check_shares, num_shares
from outrider.models.pickled import check_unpickled
from outrider.models.placement import DTYPES, Placement, device_map_of, max_memory_of, pick_device
from outrider.models.quantize import (
    by_groups,
    check_quantization,
    method_of,
    picks_outliers,
    plain_config,
    quantization_config,
    quantized_share,
    require_quantizer,
    without_outliers,
)
from outrider.models.reading import held_file, load_processor, load_tokenizer, read_config, reading
from outrider.models.registry import ARITHMETICS, QUANTIZATIONS, ModelSpec
from outrider.models.reopening import reopen
from outrider.models.stored_blocks import are_in_groups, stored_blocks
from outrider.runtime.huge_pages import move_weights
from outrider.runtime.lm import LM
from outrider.runtime.media import takes_images
from outrider.runtime.stand_in import StandIn
from outrider.system.ranks import current_ranks
from outrider.text.tokenizer import has_token, vocab_size

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger(__name__)
_ANYWHERE = Placement()
_ATTENTION = ("eager", "sdpa")  # implementations that take 4-D masks
_UNBOUNDED = 2**31  # context of a model that states none (or -1, as XLNet does)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face model and its tokenizer, its processor if it takes images, and how it is to run.

    Attributes:
        execution: one of EXECUTIONS (registry.py); eager for a model in memory, which may be changed.
        notes: name of the notes about the model (notes.py).
    """

    name: str
    model: Any
    tokenizer: Any | None
    processor: Any | None = None
    execution: str = "eager"
    notes: str | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        for owner in (getattr(self.model, "generation_config", None), self.model.config, self.tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()


def load_checkpoint(
    spec: ModelSpec,
    placement: Placement = _ANYWHERE,
    *,
    is_target: bool = False,
    may_stand_in: bool = False,
) -> Checkpoint:
    """Load a model and its tokenizer.

    Args:
        is_target: all processes of the job share it, unless the placement states otherwise.
        may_stand_in: load a ``StandIn`` if there are notes about the model (notes.py).

    Raises:
        ModelNotFound, ModelCorrupt, UnsupportedModel, DeviceError, OptionError, MissingExtra, FileError
    """
    placed, name = placement.over(spec), placement.name_of(spec)
    size = num_shares(name, placed, is_target=is_target)
    device, device_map = pick_device(placed.device), device_map_of(placed)
    if isinstance(device_map, str) and placed.device == "cpu" and torch.cuda.is_available():
        raise OptionError("device_map", device_map, "it spreads the model over CUDA devices: leave out --device cpu")
    is_alone = size == 1 and device_map is None
    file = held_file(spec)
    is_native = is_alone and device.type == "cpu" and placed.execution in ("auto", "native")
    noted_in = notes_name(spec, placed) if is_native else None
    if may_stand_in and is_native and placed.max_memory is None and placed.quantization not in QUANTIZATIONS:
        notes = None if noted_in is None else read_notes(noted_in)
        model = None if notes is None else reopen(spec, placed, notes)
        if notes is not None and model is not None:
            return Checkpoint(name, model, load_tokenizer(spec, notes.tokenizer), None, placed.execution, noted_in)
    config = read_config(spec)
    method = "gguf" if spec.gguf else method_of(config)
    with reading(spec, f"model on {device}"):
        if spec.adapter is not None:
            check_mergeable(name, placed, size, method)
        if not placed.allow_pickle:
            check_unpickled(spec, config)
        check_quantization(name, placed.quantization or "none", method)
        without_outliers(config)
        has_arithmetic = placed.quantization in ARITHMETICS
        quantization = "none" if has_arithmetic else str(placed.quantization)  # of the weights
        dtype = DTYPES.get(placed.dtype, torch.float32 if device.type == "cpu" else None)
        in_groups = is_alone and by_groups(quantization, device.type, dtype)
        how: dict[str, Any] = {"dtype": dtype or "auto"}
        if size > 1:
            from transformers.distributed import DistributedConfig

            check_shares(name, size, placed, device, config, method)
            how["distributed_config"] = DistributedConfig(tp_size=size)
        kept: torch.dtype | None = None
        blocks: BlockWeights | None = None
        needed = stored_bytes(spec)
        smaller: Callable[[], Mapping[str, int]] = dict
        stated: torch.dtype = config.dtype or torch.float32
        is_float32_on_cpu = is_alone and device.type == "cpu" and dtype == torch.float32
        if method in (None, "gguf") or (is_float32_on_cpu and are_in_groups(config)):
            dtype = dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16  # as most are stored
            with torch.device("meta"):
                bare = skeleton(plain_config(config), dtype)
            if is_alone and (quantization in ("none", "int8") or in_groups):
                kept = kept_type(spec, placed, device, bare, stated)
            if is_float32_on_cpu:
                blocks = stored_blocks(spec, placed, config, bare, keeps=kept is not None)
            if blocks is not None:
                blocks.predict(bare)
        if method in (None, "gguf") or blocks is not None:
            assert dtype is not None
            if kept is not None:
                narrow_weights(bare, kept)
            if in_groups and has_kernel(placed):
                predict_groups(bare)
            needed = weights_bytes(bare, dtype, "none" if in_groups else quantization, size, device.type)
            if method is None:
                smaller = partial(forms, bare, kept or dtype, quantization, size, device.type)
        else:
            kept = None
        if blocks is None and not in_groups:
            require_quantizer(name, quantization, method)
            if quantization != "none":
                assert dtype is not None
                how["quantization_config"] = quantization_config(quantization, device, dtype, bare, size)
        if has_arithmetic and (blocks is None or kept is None):
            raise OptionError(
                "quantization", placed.quantization, f"{name} is not multiplied in its blocks here: leave it out"
            )
        if placed.device == "auto" and device_map is None and current_ranks().size == 1 and not is_target:
            device = fastest_with_room(needed) or device
        limits = max_memory_of(placed.max_memory)
        check_fits(name, needed, room_of(device, device_map, limits), smaller)
        if kept is not None:
            kept = how["dtype"] = kept_type(spec, placed, device, bare)  # may download its files
        if size == 1:
            how |= {"device_map": device_map or {"": device}, "max_memory": limits}
        if blocks is not None:
            model, missing = blocks.load(plain_config(config))
            check_missing(spec.location, missing, [])
            model.generation_config = generation_config_of(spec) or model.generation_config
        else:
            how["use_safetensors"] = None if placed.allow_pickle else True
            model = _from_pretrained(name, spec, config, how)
        on_disk = sorted(part for part, place in getattr(model, "hf_device_map", {}).items() if place == "disk")
        if on_disk:
            raise DeviceError(
                f"{name} does not fit: the device map would leave {len(on_disk)} parts of it on disk, {on_disk[0]} the "
                "first: raise --max-memory, or choose fewer bits with --quantize"
            )
    if spec.adapter is not None:
        with reading(spec, "adapter"):
            model = merge(name, model, spec.adapter)
    if kept is not None:
        model = model if kept == dtype else widen_weights(model, config)
        # An adapter has left most matrices as the base stores them.
        of_base = kept_type(replace(spec, adapter=None), placed, device, bare)
        narrow_weights(model, *dict.fromkeys((of_base or kept, kept)))
    share = round_to_groups(model, keeps=has_kernel(placed)) if in_groups else None
    if device.type == "cpu" and is_alone:
        narrow = [] if blocks is None else [one for one in model.parameters() if isinstance(one, NarrowWeight)]
        move_weights(model, [one for one in narrow if one.blocks is not None])  # blocks are there
    if quantization != "none":
        _report_share(name, quantization, quantized_share(model) if share is None else share)
    tokenizer = load_tokenizer(spec)
    if file is not None:
        from outrider.models.gguf.ends import end_ids

        model.generation_config.eos_token_id = end_ids(file.metadata, tokenizer.eos_token_id)
    if spec.adapter is not None and vocab_size(tokenizer) > (num_rows := len(model.get_input_embeddings().weight)):
        raise UnsupportedModel(
            f"the adapter {spec.adapter} adds tokens: its tokenizer has {vocab_size(tokenizer)}, the base {num_rows}: "
            "merge it (merge_and_unload) and save the model"
        )
    reads_images = is_target and spec.gguf is None and takes_images(model)
    processor = load_processor(spec) if reads_images else None
    return Checkpoint(name, model, tokenizer, processor, placed.execution, noted_in)


def _from_pretrained(name: str, spec: ModelSpec, config: Any, how: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "config": config, **how}
    if spec.gguf is None:
        model, info = auto_class(name, config).from_pretrained(spec.location, trust_remote_code=False, **given)
    else:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        from outrider.models.gguf.checkpoint import gguf_numbers

        dtype = given["dtype"] if isinstance(given["dtype"], torch.dtype) else torch.bfloat16  # as most are stored
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # auto classes want a name
        model, info = cls.from_pretrained(None, state_dict=gguf_numbers(spec, dtype), **given)
    check_missing(spec.location, info["missing_keys"], info["unexpected_keys"])
    mismatched = sorted(key for key, *_ in info["mismatched_keys"])
    if mismatched:
        raise ModelCorrupt(f"{spec.location}: the shape of {mismatched[0]} does not fit its config.json")
    return model


def _report_share(name: str, quantization: str, share: float) -> None:
    """Log the quantized share of the weights. Raises OptionError: none could be quantized."""
    if share == 0:
        raise OptionError("quantization", quantization, f"{name} has no linear layers that it could be applied to")
    # A low share surprises by memory and speed, so it is a warning.
    level = logging.INFO if share >= 0.5 else logging.WARNING
    _LOG.log(level, "%s: %.0f%% of the weights are quantized", name, 100 * share)


def build_lm(checkpoint: Checkpoint, num_tokens: int, unknown_ids: tuple[int, ...] = ()) -> LM:
    """Build an LM of ``num_tokens`` tokens, and probe it.

    Args:
        unknown_ids: tokens that it does not know, those that it has no logits for among them.

    Raises:
        UnsupportedModel: its cache cannot be rolled back.
        OptionError: it does not have its execution.
        TokenizerMismatch: it has logits for fewer tokens.
    """
    model: nn.Module = checkpoint.model
    config: Any = model.config
    check_kind(checkpoint.name, config)
    if config._attn_implementation not in _ATTENTION:
        raise UnsupportedModel(
            f"{checkpoint.name} was loaded with attn_implementation={config._attn_implementation!r}: "
            f"load it with one of {', '.join(_ATTENTION)}"
        )
    width = width_of(checkpoint)
    if width < num_tokens and not unknown_ids:
        raise TokenizerMismatch(f"{checkpoint.name} has logits for {width} tokens, but {num_tokens} are needed")
    if picks_outliers(model):
        raise UnsupportedModel(
            f"{checkpoint.name} treats a column of activations separately once one row has an outlier there, so that "
            "rows depend on each other: load it with llm_int8_threshold=0"
        )
    model.eval()
    lm = LM(model, name=checkpoint.name, vocab_size=min(width, num_tokens), context_len=context_len(config))
    is_known = isinstance(model, StandIn) or (checkpoint.notes is not None and has_notes(checkpoint.notes))
    lm = choose_execution(lm, checkpoint.execution, is_known=is_known)
    if checkpoint.notes is not None and lm.native is not None and not is_known:
        write_notes(checkpoint.notes, model, checkpoint.tokenizer)
    return lm.with_vocabulary(num_tokens, unknown_ids) if unknown_ids else lm


def context_len(config: Any) -> int:
    """Maximum sequence length."""
    config = config.get_text_config(decoder=True)
    stated = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models state one rope for all layers, others one per layer type.
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            # Beyond its original context such a model rotates *all* tokens of a forward differently, so that logits
            # would depend on the rest of the forward: on drafted tokens, and on other rows.
            original = one.get("original_max_position_embeddings") or stated
            stated = min(stated or original, original)
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", None):
        # From this position on Llama 4 scales queries by positions that it derives from the length of the cache, here
        # that of the view. Half of it leaves room for the tokens of one forward.
        stated = min(stated, config.floor_scale // 2)
    return stated if stated > 0 else _UNBOUNDED


def num_tokens_of(checkpoint: Checkpoint) -> int:
    """V: tokens that the tokenizer has and the model has logits for. Ids beyond are padding."""
    width, tokenizer = width_of(checkpoint), checkpoint.tokenizer
    if tokenizer is None or has_token(tokenizer, width - 1):  # without a list of all tokens, which takes a while
        return width
    return min(width, vocab_size(tokenizer))


def width_of(checkpoint: Checkpoint) -> int:
    """Tokens that the model has logits for, padding included."""
    width: int = checkpoint.model.config.get_text_config(decoder=True).vocab_size
    return width
