"""Recognises heads, reads their checkpoints, and loads them for a target."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelCorrupt, ModelNotFound, UnsupportedModel, reason_of
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.heads.assistant import load_assistant
from outrider.models.heads.base import Head, head_lm
from outrider.models.heads.block import load_block
from outrider.models.heads.chains import load_eagle3, load_mtp, mtp_prefix
from outrider.models.kinds import INDEX, PICKLED, WHOLE, building, check_counts, check_no_pickle, head_named
from outrider.models.quantize import is_mlx
from outrider.models.reading import open_file, reading
from outrider.models.registry import ARITHMETICS, ModelSpec, is_gguf
from outrider.native.planned_model import PlannedModel
from outrider.runtime.lm import LM

_MTP_PREFIX = "mtp."
MTP = "mtp"  # draft with the MTP layers of the target's own checkpoint

# Beginnings of the tensors of heads that are not run here, in GGUF files too.
_NOT_RUN = {
    **dict.fromkeys(("markov_", "confidence_head.", "conf_proj."), "a DSpark head"),
    "lilicorr.": "a LiLiCorr head",
    "mask_hidden": "a P-EAGLE head",
}

_LOADERS: dict[str, Callable[..., Head]] = {
    "eagle3": load_eagle3,
    "block": load_block,
    "assistant": load_assistant,
    "mtp": lambda tensors, stated, name, target: load_mtp(tensors, _MTP_PREFIX, name, target),
}


def is_head(spec: ModelSpec) -> bool:
    """Whether a checkpoint is a head rather than a model, by its configuration, or by the tensors of a GGUF file.
    Raises ModelNotFound, ModelCorrupt."""
    if (file := open_file(spec)) is not None:
        from outrider.models.gguf.heads import is_gguf_head

        is_mtp = any(".nextn." in name for name in file.tensors) and "blk.0.attn_norm.weight" not in file.tensors
        return is_mtp or is_gguf_head(file)
    if spec.path is not None and not (spec.path / "config.json").is_file():
        return False
    return head_named(read_config(spec.location)) is not None


def load_head(spec: ModelSpec, target: LM, *, allow_pickle: bool = False) -> LM:
    """Load a head for a target, in the target's type and on its device. Raises UnsupportedModel: a head of another
    kind, this target has none, or the weights are pickled; ModelCorrupt: it does not fit the target, or is incomplete;
    ModelNotFound."""
    check_target(target)
    stated: dict[str, Any] = {}
    with building(f"no head can be built of {spec.name}"):
        if spec.gguf is not None:
            from outrider.models.gguf.checkpoint import gguf_file
            from outrider.models.gguf.heads import gguf_head, gguf_mtp, is_gguf_head

            num_digits = digits_beside(target)
            with reading(spec, "head"):
                file = gguf_file(spec)
                check_runs(spec.name, file.tensors, None)
                if is_gguf_head(file):
                    stated, tensors = gguf_head(spec, num_digits)
                else:
                    tensors = gguf_mtp(file, spec.name, target.weights, num_digits)
        else:
            stated = read_config(spec.location)
            check_counts(spec.name, stated)
            if is_mlx(stated):
                raise UnsupportedModel(f"{spec.name} is quantized for MLX: take a GGUF file of the head")
            files = find_tensors(spec.location, allow_pickle=allow_pickle)
            check_runs(spec.name, files, head_named(stated))
            tensors = without_fp8(read_tensors(spec.location, files), stated)
        if (kind := kind_of_head(tensors.keys())) is None:
            thing = head_named(stated) or "a head"
            raise UnsupportedModel(f"{spec.name} is {thing}, in a layout that is not known here")
        return head_lm(_LOADERS[kind](tensors, stated, spec.name, target), spec.name, target)


def check_runs(name: str, tensors: Iterable[str], thing: str | None) -> None:
    """Refuse heads of kinds that are not run here, by their tensors or their name (``head_named``). Raises
    UnsupportedModel."""
    by_name = thing if any(kind in (thing or "") for kind in ("DSpark", "LiLiCorr", "P-EAGLE")) else None
    if found := next((one for part, one in _NOT_RUN.items() if any(key.startswith(part) for key in tensors)), by_name):
        remedy = "take an EAGLE-3, DFlash or DFlash 2 head of its target, or a draft model"
        raise UnsupportedModel(f"{name} is {found}, which is not run here: {remedy}")


def without_fp8(tensors: Mapping[str, Tensor], stated: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a checkpoint, those of eight bits widened to float32: times a scale for each block of a matrix, as
    Transformers' ``FineGrainedFP8Config`` has them, or for each row or matrix (compressed-tensors)."""
    found = dict(tensors)
    sizes = (stated.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    for name, scales in tensors.items():
        layer, _, part = name.rpartition(".")
        weight = tensors.get(f"{layer}.weight")
        if part not in ("weight_scale_inv", "weight_scale") or weight is None or weight.dtype != torch.float8_e4m3fn:
            continue
        factors = scales.float()
        if part == "weight_scale_inv" and factors.ndim == 2:
            for dim, size in enumerate(sizes):
                factors = factors.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        found[f"{layer}.weight"] = weight.float() * factors
        del found[name]
    return found


def digits_beside(target: LM) -> int | None:
    """Digits of the integers to which rows are rounded before products with blocks of a head: those of its target, for
    the native engine has one number of them. None if the target has no weights as they are stored."""
    narrow = [one for one in target.weights.parameters() if isinstance(one, NarrowWeight)]
    own = [one.blocks.num_digits for one in narrow if one.blocks is not None]
    keeps = narrow or isinstance(target.weights, PlannedModel)
    return max(own, default=ARITHMETICS["a8"]) if keeps else None


def load_mtp_of(target: LM, *, allow_pickle: bool = False) -> LM:
    """Load the MTP layer of a target's checkpoint. Raises UnsupportedModel: it has none; ModelCorrupt,
    ModelNotFound."""
    location = str(getattr(target.weights.config, "_name_or_path", "") or "")
    if not location:
        raise UnsupportedModel(f"{target.name} was not loaded from files, but is in memory: it has no MTP layers")
    name, prefix = f"the MTP layer of {target.name}", _MTP_PREFIX
    with building(f"no head can be built of {name}"):
        if is_gguf(Path(location)):
            from outrider.models.gguf.file import GgufFile
            from outrider.models.gguf.heads import gguf_mtp

            file = GgufFile.open(Path(location))
            if not any(".nextn." in tensor for tensor in file.tensors):
                raise UnsupportedModel(f"the file of {target.name} has no MTP layers: choose another draft")
            check_target(target)
            tensors = gguf_mtp(file, name, target.weights, digits_beside(target))
        else:
            files = find_tensors(location, allow_pickle=allow_pickle)
            prefix = mtp_prefix(files, target)
            check_target(target)
            tensors = without_fp8(read_tensors(location, files, prefix), read_config(location))
        return head_lm(load_mtp(tensors, prefix, name, target), f"{target.name}:{MTP}", target)


def kind_of_head(found: Set[str]) -> str | None:
    """Kind of a head by the names of its tensors: those in configurations are less reliable."""
    if "fc.weight" in found and found & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}:
        return "eagle3"
    if found >= {"fc.weight", "hidden_norm.weight"}:
        return "block"
    if {name.removeprefix(_MTP_PREFIX) for name in found} >= {"fc.weight", "pre_fc_norm_hidden.weight"}:
        return "mtp"
    if found >= {"pre_projection.weight", "post_projection.weight"}:
        return "assistant"
    return None


def check_target(target: LM) -> None:
    """Check that heads can read the states of a target. Raises UnsupportedModel."""
    model = target.model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModel(f"{target.name} is spread over several devices: heads need it on one")
    if target.num_shares > 1:
        raise UnsupportedModel(f"{target.name} is shared by {target.num_shares} processes: heads need it in one")
    if not all(hasattr(decoder, part) for part in ("layers", "norm", "rotary_emb")):
        raise UnsupportedModel(f"{target.name} ({model.config.model_type}) has no layers that a head could read")


# Files


def read_config(location: str) -> dict[str, Any]:
    """The config.json of a folder or hub repository, as it is written. Raises ModelNotFound, ModelCorrupt."""
    if (path := _file(location, "config.json")) is None:
        raise ModelNotFound(f"{location} has no config.json, or it cannot be fetched: check its name and the network")
    with _reading(path):
        stated: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stated, dict):
        raise ModelCorrupt(f"{path} holds no object")
    return stated


def find_tensors(location: str, *, allow_pickle: bool = False) -> dict[str, str]:
    """The tensors of a folder or hub repository, and the file of each. Of safetensors only headers are read. Raises
    ModelNotFound: there are no weights; UnsupportedModel: they are pickled; ModelCorrupt."""
    from safetensors import safe_open

    if (whole := _file(location, WHOLE)) is not None:
        with _reading(whole), safe_open(whole, "pt") as opened:
            return dict.fromkeys(opened.keys(), WHOLE)
    if (index := _file(location, INDEX)) is not None:
        with _reading(index):
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not allow_pickle:
        check_no_pickle(location)
    elif (old := _file(location, PICKLED)) is not None:
        return dict.fromkeys(_unpickled(old), PICKLED)
    raise ModelNotFound(f"{location} has no weights: neither {WHOLE}, {INDEX} nor {PICKLED}")


def read_tensors(location: str, files: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors whose names begin with ``prefix``, from their files alone (see ``find_tensors``). Raises
    ModelCorrupt."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    wanted = {name: file for name, file in files.items() if name.startswith(prefix)}
    for file in sorted(set(wanted.values())):
        path, names = _file(location, file), [name for name in wanted if wanted[name] == file]
        if path is None:
            raise ModelCorrupt(f"{location} lacks {file}, which its index names")
        if file == PICKLED:
            tensors = _unpickled(path)
            found |= {name: tensors[name] for name in names}
            continue
        with _reading(path), safe_open(path, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in names}
    return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        return dict(torch.load(path, map_location="cpu", weights_only=True))


def _file(location: str, name: str) -> Path | None:
    """A file of a folder or hub repository; None if there is none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # of networks and hubs, many types
        raise ModelNotFound(f"{name} of {location!r} cannot be fetched ({reason_of(error)})") from None
    return None if path is None else Path(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise errors of many types
        raise ModelCorrupt(f"{path} cannot be read ({type(error).__name__}: {reason_of(error)})") from None
