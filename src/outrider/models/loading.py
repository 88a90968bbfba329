"""From a name, or from objects in memory, to an LM that is known to work.

Whatever is known not to work is refused here by its name; all else is probed (probe.py) before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.errors import (
    DeviceError,
    ModelCorrupt,
    ModelNotFound,
    OptionError,
    OutriderError,
    TokenizerMismatch,
    UnsupportedModel,
)
from outrider.models.cpu_weights import kept_type, narrowed, widened
from outrider.models.kinds import check_adapter, check_head, check_kind, check_missing, check_multimodal
from outrider.models.memory import skeleton, weights_bytes
from outrider.models.memory_fit import check_fits, fastest_with_room, forms, room_of, stored_bytes
from outrider.models.parallel import check_shares, num_shares
from outrider.models.placement import DTYPES, Placement, device_map_of, max_memory_of, pick_device
from outrider.models.probe import probe
from outrider.models.quantize import (
    check_quantization,
    method_of,
    picks_outliers,
    quantization_config,
    quantized_share,
    require_packages,
    without_outliers,
)
from outrider.models.registry import ModelSpec
from outrider.runtime import huge_pages
from outrider.runtime.lm import LM
from outrider.runtime.tensor_parts import stored_tensors, whole
from outrider.system.ranks import current_ranks
from outrider.text.tokenizer import vocab_size

_LOG = logging.getLogger(__name__)
_ANYWHERE = Placement()
_ATTENTION = ("eager", "sdpa")  # the implementations that take a mask of four dimensions
_UNBOUNDED = 2**31  # context of a model that states none (or, as XLNet, -1)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model and its tokenizer, as Hugging Face has them."""

    name: str
    model: Any
    tokenizer: Any | None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        for owner in (getattr(self.model, "generation_config", None), self.model.config, self.tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()


def load_checkpoint(spec: ModelSpec, placement: Placement = _ANYWHERE, *, is_target: bool = False) -> Checkpoint:
    """Read a model and its tokenizer.

    Args:
        is_target: unless the placement states something else, all processes of the job share it.

    Raises:
        ModelNotFound, ModelCorrupt, UnsupportedModel, DeviceError, OptionError, MissingExtra, FileError
    """
    import transformers

    placed, name = placement.over(spec), placement.name_of(spec)
    size = num_shares(name, placed, is_target=is_target)
    device, device_map = pick_device(placed.device), device_map_of(placed)
    if isinstance(device_map, str) and placed.device == "cpu" and torch.cuda.is_available():
        raise OptionError("device_map", device_map, "it spreads over CUDA devices: leave out --device cpu")
    config = read_config(spec)
    method = "gguf" if spec.gguf else method_of(config)
    with _loading(spec, f"model on {device}"):
        check_quantization(name, placed.quantization or "none", method)
        without_outliers(config)
        dtype = DTYPES.get(placed.dtype, torch.float32 if device.type == "cpu" else None)
        how: dict[str, Any] = {"dtype": dtype or "auto"}
        if size > 1:
            from transformers.distributed import DistributedConfig

            check_shares(name, size, placed, device, config, method)
            how["distributed_config"] = DistributedConfig(tp_size=size)
        kept: torch.dtype | None = None
        needed = stored_bytes(spec)
        smaller: Callable[[], Mapping[str, int]] = dict
        stated: torch.dtype = config.dtype or torch.float32
        if method in (None, "gguf"):  # Transformers widens GGUF files
            dtype = dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16  # as most are stored
            with torch.device("meta"):
                bare = skeleton(config, dtype)
            if placed.quantization in ("none", "int8") and size == 1 and device_map is None:
                kept = kept_type(spec, placed, device, bare, stated)
            if kept is not None:
                narrowed(bare, kept)
            needed = weights_bytes(bare, dtype, str(placed.quantization), size)
            if method is None:
                smaller = partial(forms, bare, kept or dtype, str(placed.quantization), size)
            if placed.quantization != "none":
                how["quantization_config"] = quantization_config(str(placed.quantization), device, dtype, bare, size)
        if placed.device == "auto" and device_map is None and current_ranks().size == 1 and not is_target:
            device = fastest_with_room(needed) or device
        limits = max_memory_of(placed.max_memory)
        check_fits(name, needed, room_of(device, device_map, limits), smaller)
        if kept is not None:
            kept = how["dtype"] = kept_type(spec, placed, device, bare)  # by its files, which may be fetched now
        if size == 1:
            how |= {"device_map": device_map or {"": device}, "max_memory": limits}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            spec.location,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_form(spec),
            **how,
        )
        check_missing(spec.location, info["missing_keys"], info["unexpected_keys"])
        mismatched = sorted(key for key, *_ in info["mismatched_keys"])
        if mismatched:
            raise ModelCorrupt(f"{spec.location}: the shape of {mismatched[0]} does not fit its config.json")
        on_disk = sorted(part for part, place in getattr(model, "hf_device_map", {}).items() if place == "disk")
        if on_disk:
            raise DeviceError(
                f"{name} does not fit: the device map would leave {len(on_disk)} parts of it on disk, {on_disk[0]} the "
                "first: allow more by --max-memory, or choose fewer bits by --quantize"
            )
    if kept is not None:
        model = model if kept == dtype else widened(model, config)
        narrowed(model, kept)
    if device.type == "cpu" and device_map is None and size == 1 and huge_pages.are_there():
        huge_pages.move_weights(model)
    if placed.quantization != "none":
        _tell_share(name, str(placed.quantization), quantized_share(model))
    return Checkpoint(name, model, load_tokenizer(spec))


def _tell_share(name: str, quantization: str, share: float) -> None:
    """Raises OptionError: none of the weights could be quantized."""
    if share == 0:
        raise OptionError("quantization", quantization, f"{name} has no linear layers that it could be applied to")
    # Where less is quantized than is thought, somebody is surprised by memory and speed.
    level = logging.INFO if share >= 0.5 else logging.WARNING
    _LOG.log(level, "%s: %.0f%% of the weights are quantized", name, 100 * share)


def read_config(spec: ModelSpec) -> Any:
    """The configuration of a model that works here. Nothing else is read.

    Raises:
        ModelNotFound, ModelCorrupt, UnsupportedModel, MissingExtra
    """
    import transformers

    with _loading(spec, "adapter"):
        check_adapter(spec.name, _adapter_of(spec))
    if spec.path is not None and spec.gguf is None and not (spec.path / "config.json").is_file():
        raise ModelCorrupt(f"{spec.path} is not a model folder: there is no config.json in it")
    with _loading(spec, "configuration"):
        if spec.gguf is None:
            check_head(spec.name, transformers.PreTrainedConfig.get_config_dict(spec.location)[0])
        config = transformers.AutoConfig.from_pretrained(spec.location, **_form(spec))
        check_kind(spec.name, config)
        check_multimodal(spec.name, config)
    return config


def _adapter_of(spec: ModelSpec) -> Path | None:
    """The adapter_config.json beside a model, or in place of one."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if spec.path is not None:
        file = spec.path / "adapter_config.json"
        return file if file.is_file() else None
    found = find_adapter_config_file(spec.location)
    return None if found is None else Path(found)


def _form(spec: ModelSpec) -> dict[str, Any]:
    """How a checkpoint is written, for ``from_pretrained``; and that no code in it is run, which Transformers would
    otherwise ask for on standard input. Raises MissingExtra."""
    if spec.gguf is None:
        return {"trust_remote_code": False}
    require_packages("gguf", f"{spec.gguf}")
    return {"trust_remote_code": False, "gguf_file": spec.gguf}


def stored_dtype(spec: ModelSpec) -> torch.dtype:
    """The type of a checkpoint's weights as they are on disk, by its configuration; float32 where it does not tell."""
    dtype: torch.dtype | None = read_config(spec).dtype
    return dtype or torch.float32


def load_tokenizer(spec: ModelSpec) -> Any:
    """The tokenizer alone. Raises ModelNotFound, ModelCorrupt."""
    import transformers

    with _loading(spec, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(spec.location, **_form(spec))


@contextlib.contextmanager
def _loading(spec: ModelSpec, what: str) -> Iterator[None]:
    """Turn what goes wrong while loading into errors of ours; keep the progress bars of small models quiet."""
    from safetensors import SafetensorError

    weights = [] if spec.path is None else spec.path.glob(spec.gguf or "*.safetensors")
    is_quiet = spec.path is not None and sum(file.stat().st_size for file in weights) < 2**30
    try:
        with without_bars() if is_quiet else contextlib.nullcontext():
            yield
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        raise ModelCorrupt(f"the weights of {spec.location} cannot be read ({error}): fetch them again") from None
    except Exception as error:  # whatever a damaged file makes the libraries stumble over
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"the {what} of {spec.name} needs code of its own, which is never run here: if you trust it, load "
                "model and tokenizer yourself (from_pretrained with trust_remote_code=True) and pass them to "
                "outrider.load"
            ) from None
        if spec.hub is not None and isinstance(error, OSError):
            raise ModelNotFound(
                f"the hub model {spec.hub!r} cannot be fetched, and is not in the local cache: check its name and the "
                f"network, or give a local folder ({reason})"
            ) from None
        kind = type(error).__name__
        raise ModelCorrupt(f"the {what} of {spec.location} cannot be loaded ({kind}: {reason})") from None


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Transformers shows no progress bars."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def build_lm(checkpoint: Checkpoint, num_tokens: int) -> LM:
    """The model as an LM of ``num_tokens`` tokens, after a probe.

    Raises:
        UnsupportedModel: its architecture cannot be rolled back.
        TokenizerMismatch: it has logits for fewer tokens.
    """
    model: nn.Module = checkpoint.model
    config: Any = model.config
    kind = config.model_type
    check_kind(checkpoint.name, config)
    if config._attn_implementation not in _ATTENTION:
        raise UnsupportedModel(
            f"{checkpoint.name} was loaded with attn_implementation={config._attn_implementation!r}: "
            f"load it with one of {', '.join(_ATTENTION)}"
        )
    width = config.get_text_config(decoder=True).vocab_size
    if width < num_tokens:
        raise TokenizerMismatch(f"{checkpoint.name} knows {width} tokens, but {num_tokens} are needed")
    if picks_outliers(model):
        raise UnsupportedModel(
            f"{checkpoint.name} treats a column of activations apart as soon as one row has an outlier there, so that "
            "rows depend on each other: load it with llm_int8_threshold=0"
        )
    model.eval()
    lm = LM(model, name=checkpoint.name, vocab_size=num_tokens, context_len=context_len(config))
    probe(lm, kind)
    return lm


def weights_checksum(model: nn.Module) -> str:
    """SHA-256 over names, shapes, types and bytes of all weights, as they are in memory.

    All processes of a job must call it. Weights that they share are put together one by one. Quantized shares cannot
    be, and then it is the SHA-256 of the checksums of all processes.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for stored in stored_tensors(whole(weight.detach())):
            # A view of bytes: NumPy does not know all of torch's types.
            digest.update(stored.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    checksums = current_ranks().of_all(digest.hexdigest())
    if len(set(checksums)) == 1:
        return checksums[0]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def context_len(config: Any) -> int:
    """Most tokens in a sequence."""
    config = config.get_text_config(decoder=True)
    stated = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models state one rope for all layers, others one for each type of layer.
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            # Beyond its original context such a model rotates *all* tokens of a forward otherwise, so that logits would
            # depend on what else is in the forward: on drafted tokens, and on neighbours in the batch.
            original = one.get("original_max_position_embeddings") or stated
            stated = min(stated or original, original)
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", None):
        # From this position on Llama 4 scales queries, by positions that it takes from the length of the cache, which
        # is that of the view here. Half of it leaves room for the tokens of one forward.
        stated = min(stated, config.floor_scale // 2)
    return stated if stated > 0 else _UNBOUNDED


def num_tokens_of(checkpoint: Checkpoint) -> int:
    """V: the tokens that the tokenizer knows and the model has logits for. What lies beyond is padding."""
    width: int = checkpoint.model.config.get_text_config(decoder=True).vocab_size
    return width if checkpoint.tokenizer is None else min(width, vocab_size(checkpoint.tokenizer))
