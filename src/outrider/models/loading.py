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

from outrider.errors import DeviceError, ModelCorrupt, OptionError, TokenizerMismatch, UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.kernels.row_copies import BackgroundCopies
from outrider.models import cpu_weights, quantize
from outrider.models.executions import choose_execution, native_lm
from outrider.models.kinds import auto_class, building, check_kind, check_missing, check_unpickled, ids_of
from outrider.models.memory import check_fits, skeleton, stored_bytes, weights_bytes
from outrider.models.placement import DTYPES, check_shares, device_map_of, max_memory_of, num_shares, pick_device
from outrider.models.quantize import picks_outliers
from outrider.models.reading import load_processor, load_tokenizer, open_file, read_config, reading
from outrider.models.registry import ARITHMETICS, ModelSpec, Placement
from outrider.models.sampling_defaults import stated_end_ids
from outrider.models.weights import quantized_share
from outrider.native.engine import NativeForward
from outrider.native.plan import NotPlanned
from outrider.runtime.lm import LM
from outrider.runtime.media import takes_images
from outrider.runtime.transformers_forward import TransformersForward
from outrider.runtime.weight_tensors import move_weights, set_weights, tp_size_of
from outrider.system.ranks import current_ranks, together
from outrider.text.tokenizer import has_token, vocab_size

if TYPE_CHECKING:
    from outrider.models.gguf.file import GgufFile

_LOG = logging.getLogger(__name__)
_ANYWHERE = Placement()
_UNBOUNDED = 2**31  # context of a model that states none (or -1, as XLNet does)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model and its tokenizer, its processor if it takes images, and how it is to run.

    Attributes:
        model: a model of Transformers, or a PlannedModel; only a PlannedModel has ``forward``.
        execution: one of EXECUTIONS (registry.py); eager for a model in memory, which may be changed.
        file: the GGUF file.
        end_ids: tokens that end a text, as the files state them; None to look into ``model``.
    """

    name: str
    model: Any
    tokenizer: Any | None
    processor: Any | None = None
    execution: str = "eager"
    end_ids: Any = None
    forward: NativeForward | None = None
    file: GgufFile | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        stated = (getattr(one, "eos_token_id", None) for one in (self.model.config, self.tokenizer))
        own = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ids = next((ids for ids in (self.end_ids, own, *stated) if ids is not None), None)
        return frozenset(ids_of(self.name, ids))


def load_checkpoint(spec: ModelSpec, placement: Placement = _ANYWHERE, *, is_target: bool = False) -> Checkpoint:
    """Load a model and its tokenizer. All processes of the job share a target, unless the placement states otherwise.
    Raises ModelNotFound, ModelCorrupt, UnsupportedModel, DeviceError, OptionError, MissingExtra, FileError."""
    job = _Job.of(spec, placement, is_target=is_target)
    file = open_file(spec)
    planned, end_ids = _load_planned(job, file), None
    forward = None if planned is None else planned[0]
    if forward is not None:
        model = forward.weights
    else:
        config = read_config(spec, file)
        with reading(spec, "model", config):
            num_bytes, load = _loader(job, config, file)
            check_fits(job.name, num_bytes, job.device, job.device_map, job.limits)
            model = load()
        if file is not None:
            model.config.name_or_path = str(file.path)  # where its MTP layers are
    tokenizer = load_tokenizer(spec, file)
    if file is not None:
        from outrider.models.gguf.vocabulary import end_ids as end_ids_of

        end_ids = end_ids_of(file.metadata, tokenizer.eos_token_id, job.name)
    elif forward is not None:
        end_ids = stated_end_ids(spec)
    reads_images = is_target and file is None and forward is None and takes_images(model)
    processor = load_processor(spec) if reads_images else None
    if planned is not None:
        planned[1].wait()
    return Checkpoint(job.name, model, tokenizer, processor, job.placed.execution, end_ids, forward, file)


def _load_planned(job: _Job, file: GgufFile | None) -> tuple[NativeForward, BackgroundCopies] | None:
    """Load a model of a known family straight from its files, and begin to fill its large matrices; None if
    Transformers must."""
    placed = job.placed
    is_stored = placed.quantization == "none" or file is not None and placed.quantization in ARITHMETICS
    is_asked = placed.execution in ("auto", "native") and placed.store != "plain"
    if not (job.is_native and is_asked and is_stored):
        return None
    from outrider.models.planned import planned_file, planned_folder

    try:
        with reading(job.spec, "model"):
            if file is None:
                model, copies = planned_folder(job.spec)
            else:
                num_digits, needs_blocks = quantize.num_digits_of(placed.quantization), placed.quantization != "none"
                model, copies = planned_file(job.spec, file, num_digits, needs_blocks=needs_blocks)
            forward, config = NativeForward(model, model.plan), vars(model.config)
            stated = config.get("vocab_size"), config.get("hidden_size")
            if stated != (forward.vocab_size, forward.width) or not isinstance(context_len(model.config), int):
                raise NotPlanned("its configuration states other sizes than its weights have")
            return forward, BackgroundCopies(copies)  # not before: a refused model would be in memory twice
    except NotPlanned as reason:
        _LOG.info("%s is loaded by Transformers: %s", job.name, reason)
        return None


@dataclass(frozen=True, slots=True)
class _Job:
    """A checkpoint, and where it is loaded: ``device_map`` and ``limits`` are those of ``from_pretrained``, a ``dtype``
    of None is the checkpoint's own, ``quantization`` is done while loading."""

    spec: ModelSpec
    placed: Placement
    name: str
    num_shares: int
    device: torch.device
    device_map: str | dict[str, Any] | None
    limits: dict[int | str, str] | None
    dtype: torch.dtype | None
    quantization: str

    @classmethod
    def of(cls, spec: ModelSpec, placement: Placement, *, is_target: bool) -> _Job:
        placed, name = placement.over(spec), placement.name_of(spec)
        size = num_shares(name, placed, is_target=is_target)
        device, device_map = pick_device(placed.device), device_map_of(placed)
        if isinstance(device_map, str) and placed.device == "cpu" and torch.cuda.is_available():
            remedy = "it spreads the model over CUDA devices: leave out --device cpu"
            raise OptionError("device_map", device_map, remedy)
        limits = max_memory_of(placed.max_memory)
        dtype = DTYPES.get(placed.dtype, torch.float32 if device.type == "cpu" else None)
        quantization = "none" if placed.quantization in ARITHMETICS else str(placed.quantization)
        return cls(spec, placed, name, size, device, device_map, limits, dtype, quantization)

    @property
    def is_alone(self) -> bool:
        return self.num_shares == 1 and self.device_map is None

    @property
    def is_float32_on_cpu(self) -> bool:
        return self.is_alone and self.device.type == "cpu" and self.dtype == torch.float32

    @property
    def is_native(self) -> bool:
        is_eager = self.placed.execution == "eager" or self.quantization != "none" or not self.is_float32_on_cpu
        return not is_eager and cpu_weights.has_kernel(replace(self.placed, store=None))

    def skeleton(self, config: Any) -> Any:
        dtype = self.dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16  # as most are stored
        with torch.device("meta"):
            return skeleton(quantize.plain_config(config), dtype)


def _loader(job: _Job, config: Any, file: GgufFile | None) -> tuple[int, Callable[[], Any]]:
    """Bytes of a model's weights, and the way to load them; or the reason why there is none."""
    spec, placed, name = job.spec, job.placed, job.name
    method = "gguf" if file is not None else quantize.method_of(config)
    if not placed.allow_pickle:
        check_unpickled(spec, config)
    quantize.check_quantization(name, placed.quantization or "none", method)
    quantize.without_outliers(config)
    if job.num_shares > 1:
        check_shares(name, job.num_shares, placed, job.device, config, method)
    if job.quantization == "int4" and not job.is_float32_on_cpu:
        raise OptionError("quantization", "int4", "for float32 on the CPU: choose nf4 or int8 elsewhere")
    bare, kept, weights = None, None, None
    if method in (None, "gguf"):
        bare = job.skeleton(config)
        if job.is_alone and job.quantization in ("none", "int8", "int4"):
            kept = cpu_weights.kept_type(spec, placed, job.device, bare, config.dtype or torch.float32)
        if kept is not None and file is not None and job.quantization == "none":
            from outrider.models.gguf.checkpoint import skeleton_weights

            large, num_digits = cpu_weights.large_weights(bare), quantize.num_digits_of(placed.quantization)
            weights = skeleton_weights(file, bare, large, name, num_digits)
    if placed.quantization in ARITHMETICS and (weights is None or not weights.has_blocks):
        raise OptionError("quantization", placed.quantization, f"{name} is not multiplied in its blocks: leave it out")
    if weights is not None and weights.kept:
        return weights.num_bytes, partial(_load_stored, config, weights)
    quantize.require_quantizer(name, job.quantization, method)
    if bare is None:
        return stored_bytes(spec), partial(_load_by_transformers, job, config, file)
    if kept is not None:
        cpu_weights.narrow_weights(bare, kept)
    is_widened = job.quantization == "int4" and not cpu_weights.has_kernel(placed)
    num_bytes = weights_bytes(bare, "none" if is_widened else job.quantization, job.num_shares)
    if job.num_shares > 1:
        return num_bytes, partial(current_ranks().call, _load_share, (job, config, torch.get_num_threads()))
    return num_bytes, partial(_load_by_transformers, job, config, file, bare, keeps=kept is not None)


def _load_share(job: _Job, config: Any, num_threads: int) -> Any:
    def load() -> Any:
        with reading(job.spec, "model", config):
            return _load_by_transformers(job, config, None, job.skeleton(config))

    torch.set_num_threads(num_threads)  # an option of the first process
    model = together(load)
    model.twin_key = None  # drawn when all have loaded theirs
    return model


def _load_stored(config: Any, weights: cpu_weights.StoredWeights) -> Any:
    tensors, stored = weights.made()
    copies = BackgroundCopies(stored)
    model = cpu_weights.without_weights(quantize.plain_config(config))
    set_weights(model, tensors)
    model.tie_weights()
    copies.wait()
    are_there = [one for one in model.parameters() if isinstance(one, NarrowWeight)]
    cpu_weights.narrow_weights(model, torch.float32)
    move_weights(model, are_there)
    return model


def _load_by_transformers(
    job: _Job, config: Any, file: GgufFile | None, bare: Any | None = None, *, keeps: bool = False
) -> Any:
    """Let Transformers load a model; then round int4, and keep large matrices in the checkpoint's type (or float32) if
    the loader ``keeps`` them. ``bare`` is the skeleton, None for checkpoints that are quantized."""
    spec = job.spec
    kept = cpu_weights.kept_type(spec, job.placed, job.device, bare) if keeps else None  # may download its files
    how: dict[str, Any] = {"dtype": kept or job.dtype or "auto"}
    if job.num_shares > 1:
        from transformers.distributed import DistributedConfig

        how["distributed_config"] = DistributedConfig(tp_size=job.num_shares)
    else:
        how |= {"device_map": job.device_map or {"": job.device}, "max_memory": job.limits}
    if bare is not None and job.quantization not in ("none", "int4"):
        how["quantization_config"] = quantize.quantization_config(job.quantization, bare.dtype)
    how["use_safetensors"] = None if job.placed.allow_pickle else True
    model = _from_pretrained(job.name, spec, config, file, bare, how)
    if on_disk := sorted(part for part, place in getattr(model, "hf_device_map", {}).items() if place == "disk"):
        raise DeviceError(
            f"{job.name} does not fit: the device map would leave {len(on_disk)} parts of it on disk, {on_disk[0]} "
            "the first: raise --max-memory, or choose fewer bits with --quantize"
        )
    if kept is not None:
        model = model if kept == job.dtype else cpu_weights.widen_weights(model, config)
        cpu_weights.narrow_weights(model, kept)
    elif job.is_native and bare is not None:
        cpu_weights.narrow_weights(model, torch.float32, only_by_columns=True)
    if job.quantization != "none":
        if job.quantization == "int4":
            share = quantize.round_to_groups(model, keeps=cpu_weights.has_kernel(job.placed))
        else:
            share = quantized_share(model)
        if share == 0:
            remedy = f"{job.name} has no linear layers that it could be applied to"
            raise OptionError("quantization", job.quantization, remedy)
        # A low share surprises by memory and speed, so it is a warning.
        level = logging.INFO if share >= 0.5 else logging.WARNING
        _LOG.log(level, "%s: %.0f%% of the weights are quantized", job.name, 100 * share)
    if job.device.type == "cpu" and job.is_alone:
        move_weights(model)
    return model


def _from_pretrained(
    name: str, spec: ModelSpec, config: Any, file: GgufFile | None, bare: Any, how: Mapping[str, Any]
) -> Any:
    given: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "config": config, **how}
    if file is None:
        model, info = auto_class(name, config).from_pretrained(spec.location, trust_remote_code=False, **given)
    else:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.utils.logging import tqdm  # whose bars can be switched off

        from outrider.models.gguf.checkpoint import skeleton_weights

        weights, dtype = skeleton_weights(file, bare, {}, name), bare.dtype
        numbers = {one: weights.read(one).to(dtype) for one in tqdm(weights.others, desc="Reading tensors")}
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # auto classes want a name
        model, info = cls.from_pretrained(None, state_dict=numbers, **given | {"config": quantize.plain_config(config)})
    check_missing(spec.location, info["missing_keys"])
    if mismatched := sorted(key for key, *_ in info["mismatched_keys"]):
        raise ModelCorrupt(f"{spec.location}: the shape of {mismatched[0]} does not fit its config.json")
    return model


def build_lm(checkpoint: Checkpoint, num_tokens: int, unknown_ids: tuple[int, ...] = ()) -> LM:
    """Build an LM of ``num_tokens`` tokens, and probe it. ``unknown_ids`` are tokens that it does not know, those
    without logits among them. Raises UnsupportedModel: its cache cannot be rolled back; OptionError: it does not have
    its execution; TokenizerMismatch: it has logits for fewer tokens."""
    model: Any = checkpoint.model
    config: Any = model.config
    if checkpoint.forward is None:
        check_kind(checkpoint.name, config)
        if (own := config._attn_implementation) not in ("eager", "sdpa"):  # which take 4-D masks
            remedy = "load it with one of eager, sdpa"
            raise UnsupportedModel(f"{checkpoint.name} was loaded with attn_implementation={own!r}: {remedy}")
        if picks_outliers(model):
            raise UnsupportedModel(
                f"{checkpoint.name} treats a column of activations separately once one row has an outlier there, so "
                "that rows depend on each other: load it with llm_int8_threshold=0"
            )
    width = width_of(checkpoint)
    if width < num_tokens and not unknown_ids:
        raise TokenizerMismatch(f"{checkpoint.name} has logits for {width} tokens, but {num_tokens} are needed")
    with building(f"{checkpoint.name} cannot be run", config):
        sizes = {"vocab_size": min(width, num_tokens), "context_len": context_len(config)}
        options: Any = {"name": checkpoint.name, **sizes}
        if checkpoint.forward is not None:
            lm = native_lm(LM(checkpoint.forward, **options))
        elif tp_size_of(model) > 1:
            lm = choose_execution(current_ranks().call(_shared_lm, (model,), options), checkpoint.execution)
        else:
            lm = choose_execution(LM(TransformersForward(model.eval()), **options), checkpoint.execution)
    return lm.with_vocabulary(num_tokens, unknown_ids) if unknown_ids else lm


def _shared_lm(model: nn.Module, **options: Any) -> LM:
    forward = TransformersForward(model.eval())
    forward.layer_shapes, forward.mixers  # noqa: B018  # which run the model, here in all processes
    return LM(forward, **options)


def context_len(config: Any) -> int:
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
    return int(checkpoint.model.config.get_text_config(decoder=True).vocab_size)
