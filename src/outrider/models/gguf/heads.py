"""Heads in GGUF files, as checkpoints of the layouts that heads/ reads: keys as a config.json, tensors under its names.

Source: llama.cpp's src/models/eagle3.cpp, dflash.cpp and gemma4-assistant.cpp, and conversion/llama.py, qwen.py and
gemma.py, which tell how files come about; the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.kernels.narrow_weight import ExpertLayout
from outrider.kernels.row_copies import copy_rows
from outrider.models.cpu_weights import is_large
from outrider.models.families.gemma import ASSISTANT
from outrider.models.gguf.checkpoint import Source, gguf_file, stored_weights
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.keys import Stated, decoder_fields
from outrider.models.gguf.model import ARCHITECTURES, config_fields
from outrider.models.gguf.tensors import NAMES, pairs_to_halves, place_of, weight_of
from outrider.models.heads.chains import LAYER_IDS, tell_of_others
from outrider.models.registry import ModelSpec

_OF_ASSISTANT = "nextn.pre_projection.weight"


def _names(*tensors: str) -> dict[str, str]:
    """Names in Llama's models, and in those of assistants."""
    return {tensor: NAMES[tensor].split()[0] for tensor in tensors}


_ASSISTANT = _names(*NAMES) | {"post_attention_norm": "post_attention_layernorm"}
_LLAMA = _names("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_LLAMA |= {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "fc": "fc"}
_LLAMA |= {"ffn_norm": "post_attention_layernorm"}
_EAGLE3 = _LLAMA | {"attn_norm_2": "hidden_norm", "enc.output_norm": "input_norm"}
_BLOCK = {
    **_LLAMA,
    **_names("attn_q_norm", "attn_k_norm"),
    "enc.output_norm": "hidden_norm",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
}
# Tensors of an MTP layer that are no part of a usual layer.
_NEXTN = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}


def is_gguf_head(file: GgufFile) -> bool:
    """Whether a file holds a head, but for MTP layers."""
    return "fc.weight" in file.tensors or _OF_ASSISTANT in file.tensors


def gguf_head(spec: ModelSpec, num_digits: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors of a head in a GGUF file; ``num_digits`` of ``BlockType``, None to widen all
    matrices. Raises UnsupportedModel: the file states, or has, more than is known here; ModelCorrupt, ModelNotFound,
    MissingExtra."""
    file = gguf_file(spec)
    is_assistant = _OF_ASSISTANT in file.tensors
    stated = Stated(file, spec.name, is_assistant=is_assistant)
    is_eagle3 = stated.has("blk.0.attn_norm_2.weight")
    names, order = (_EAGLE3, pairs_to_halves) if is_eagle3 else (_BLOCK, ASSISTANT.order)
    if is_assistant:
        width, names = stated.take("embedding_length_out"), _ASSISTANT
        stated.check_shape(_OF_ASSISTANT, stated.take("embedding_length"), 2 * width)
        layers = config_fields(stated, ASSISTANT)
        config = {"model_type": "gemma4_assistant", "text_config": layers, "backbone_hidden_size": width}
    else:
        config = _fields(stated, is_eagle3=is_eagle3)
        stated.check_all_read()
    sizes, sources = SimpleNamespace(**config), {}
    for tensor, stored in file.tensors.items():
        if tensor not in stated.read_tensors and tensor != "d2t":
            own = order(place_of(tensor)[1].rpartition(".")[0], sizes)
            sources[_name(tensor, names, spec.name)] = Source((stored,), own, None, None)
    tensors = _read(sources, spec.name, num_digits)
    if stated.has("d2t"):  # ids of the target's tokens; other layouts store them less those of the head
        ids = torch.from_numpy(file.tensors["d2t"].raw().view("<i8").copy())
        tensors["d2t"] = ids - torch.arange(len(ids))
    return config, tensors


def gguf_mtp(file: GgufFile, name: str, target: Any, num_digits: int | None) -> dict[str, Tensor]:
    """The first MTP layer in the file of a model, or in a file of its own, under Qwen's names; nothing without one. The
    ``target`` is a model, or a planned one; for ``num_digits`` see ``gguf_head``. Raises UnsupportedModel,
    ModelCorrupt."""
    stated = Stated(file, name)
    if stated.architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"{name}: MTP layers of the architecture {stated.architecture!r:.40} are not read")
    first, (_, form) = stated.num_layers, ARCHITECTURES[stated.architecture]
    weights, parts = target.state_dict().keys(), dict[str, list[str]]()
    tell_of_others(name, stated.take("nextn_predict_layers", 0))
    for tensor in file.tensors:
        if place_of(tensor)[0] == str(first):
            parts.setdefault(_name_of_mtp(tensor, weights, first, name), []).append(tensor)
    if parts and "norm.weight" not in parts:
        parts["norm.weight"] = ["output_norm.weight"]
    sources = {}
    for parameter, tensors in parts.items():
        leaf = place_of(tensors[0])[1]
        order, columns = (rule(leaf.rpartition(".")[0], target.config) for rule in (form.order, form.columns))
        is_norm = parameter.endswith(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"))
        change = form.changes.get("attn_norm.weight" if is_norm else leaf)
        stored = tuple(file.tensors[tensor] for tensor in sorted(tensors))  # a gate before "up"
        sources[parameter] = Source(stored, order, columns, change)
    return _read(sources, name, num_digits)


def _name_of_mtp(tensor: str, weights: Set[str], num_layers: int, head: str) -> str:
    """Name in a head whose layer is like one of the target, which has these weights: the last that has such a one."""
    leaf = place_of(tensor)[1]
    module, _, kind = leaf.rpartition(".")
    if module in _NEXTN:
        return f"{_NEXTN[module]}.{kind}"
    for i in reversed(range(num_layers)):
        if (found := weight_of(f"blk.{i}.{leaf}", weights)) is not None:
            return found.replace(f"model.layers.{i}.", "layers.0.")
    raise _misplaced(tensor, head)


def _read(sources: Mapping[str, Source], head: str, num_digits: int | None) -> dict[str, Tensor]:
    """Tensors, large matrices in their blocks unless ``num_digits`` is None."""
    large = {key: one.shape for key, one in sources.items() if num_digits is not None and is_large(one.shape)}
    layouts = {key: ExpertLayout(shape[0]) if len(shape) == 3 else None for key, shape in large.items()}
    tensors, copies = stored_weights(sources, layouts, head, num_digits or 0).made()
    copy_rows(copies, torch.get_num_threads())
    return tensors


def _fields(stated: Stated, *, is_eagle3: bool) -> dict[str, Any]:
    if stated.num_layers > len(stated.file.tensors):  # each layer has some
        raise ModelCorrupt(f"{stated.name}: the file states {stated.num_layers} layers, and has too few tensors")
    fields: dict[str, Any] = {
        "vocab_size": stated.take("vocab_size", len(stated.file.metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": stated.take("embedding_length"),
        "num_hidden_layers": stated.num_layers,
        "max_position_embeddings": stated.take("context_length"),
        "rms_norm_eps": stated.take("attention.layer_norm_rms_epsilon"),
        "attention_bias": stated.has("blk.0.attn_q.bias"),
        **decoder_fields(stated),
    }
    rows = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
    for tensor, stored in stated.file.tensors.items():  # before anything is made that is as long as the keys state
        if (num_heads := rows.get(place_of(tensor)[1].rpartition(".")[0])) is not None:
            stated.check_shape(tensor, num_heads * fields["head_dim"], *stored.shape[1:])
    features = list(stated.take("target_layers"))  # counted by the inputs of layers
    width = len(features) * stated.take("target_hidden_size", fields["hidden_size"])
    stated.check_shape("fc.weight", fields["hidden_size"], width)
    return fields | (_eagle3_fields if is_eagle3 else _block_fields)(stated, fields, features)


def _eagle3_fields(stated: Stated, fields: Mapping[str, Any], features: list[int]) -> dict[str, Any]:
    if stated.take("norm_before_fc", False):
        stated.check_shape("enc.output_norm.weight", stated.file.tensors["fc.weight"].shape[1])
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        LAYER_IDS: features,
        "norm_before_residual": stated.take("norm_before_residual", False),
        "mlp_bias": stated.has("blk.0.ffn_up.bias"),
    }


def _block_fields(stated: Stated, fields: Mapping[str, Any], features: list[int]) -> dict[str, Any]:
    if any((sections := stated.take("rope.dimension_sections", [0]))[1:]):  # of places in an image
        raise stated.refusal("rope.dimension_sections", sections)
    if (mask_id := stated.file.metadata.get("tokenizer.ggml.mask_token_id")) is None:
        raise ModelCorrupt(f"{stated.name}: the file states no tokenizer.ggml.mask_token_id")
    num_layers, window = fields["num_hidden_layers"], stated.take("attention.sliding_window", 0)
    has_window = stated.take("attention.sliding_window_pattern", [window > 0] * num_layers)
    activation = stated.take("hidden_activation", "silu")
    of_second = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # settings of DFlash 2
    second = {key: stated.take(key, 0) for key in of_second}
    if all(second.values()):
        size, num_groups = fields["hidden_size"], fields["hidden_size"] // second["conv_group_size"]
        stated.check_shape("selector_hidden.weight", second["selector_rank"], size)
        for part in ("attn", "ffn"):
            stated.check_shape(f"blk.0.{part}_conv_proj.weight", 2 * second["conv_kernel_size"] * num_groups, size)
    return second | {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": features,
        "block_size": stated.take("block_size", 16),
        "mask_token_id": mask_id,
        "is_causal": stated.take("attention.causal", False),
        "use_sliding_window": window > 0,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if one and window else "full_attention" for one in has_window],
        "hidden_act": "gelu_pytorch_tanh" if activation.startswith("gelu") else activation,
        "input_embedding_scale": stated.take("embedding_scale", 0.0) or 1.0,
        "output_multiplier": stated.take("logit_scale", 0.0) or 1.0,
        "final_logit_softcapping": stated.take("final_logit_softcapping", 0.0),
    }


def _name(tensor: str, names: Mapping[str, str], head: str) -> str:
    """Name of a tensor in the other layouts. Raises UnsupportedModel."""
    layer, leaf = place_of(tensor)
    module, _, kind = leaf.rpartition(".")
    prefix = "" if layer is None else f"{'model.' if names is _ASSISTANT else ''}layers.{layer}."
    if leaf in names:
        return prefix + names[leaf]
    if module in names and kind in ("weight", "bias"):
        return f"{prefix}{names[module]}.{kind}"
    raise _misplaced(tensor, head)


def _misplaced(tensor: str, head: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{head}: the file has a tensor {tensor}, for which heads of this kind have no place here: another would run"
    )
