"""Heads in GGUF files, written from their checkpoints in other layouts (heads.py, block_heads.py) as llama.cpp's
converters write them: conversion/llama.py (EAGLE-3), qwen.py (DFlash, DFlash 2) and gemma.py
(``Gemma4AssistantModel``), gguf-py/gguf/constants.py, in the build of llama-cpp-python 0.3.36."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from block_heads import frozen_tensors, write_block
from gguf_models import CASES, add_value, config_of, model_tensors, random_case, write_case
from heads import write_eagle3

IDS = [int(i) for i in np.random.RandomState(5).randint(0, 48, 40)]
PREFIX, NUM_STEPS = 23, 4  # tokens before the drafts, the last one of which has no hidden state yet; and drafts
_TARGET = replace(CASES["llama"], fields=CASES["llama"].fields | {"num_hidden_layers": 4})
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
_FEW = [*range(0, 40, 3), 41, 47]
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "EAGLE-3": (write_eagle3, {}),
    "EAGLE-3, few tokens": (write_eagle3, {"token_ids": _FEW, "has_embedding": False, "norm_before_residual": True}),
    "EAGLE-3, normed features": (write_eagle3, {"norm_before_fc": True}),
    "DFlash": (write_block, {}),
    "DFlash, windows": (write_block, {"layers": _WINDOW, "is_causal": False, "num_layers": 2}),
    "DFlash, causal": (write_block, {"is_causal": True, "input_embedding_scale": 3.0}),
    "DFlash, few tokens": (write_block, {"layout": "speculators", "token_ids": _FEW, "is_causal": False}),
    "DFlash 2": (write_block, {"is_second": True, "output_multiplier": 0.5, "final_logit_softcapping": 5.0}),
}
ASSISTANT = "assistant"
# Its last two layers have both kinds of attention: those whose keys llama.cpp's assistants read.
_OF_ASSISTANT = CASES["gemma4, keys are values"]
MTP = {"MTP": "qwen35, with a head", "MTP, experts": "qwen35moe"}  # in the files of these cases


_LAYER = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
_LAYER |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm"}
_LAYER |= {"hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"}
_LAYER |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
for _of, _short in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
    _LAYER |= {f"{_of}.base_kernel": f"{_short}_base", f"{_of}.kernel_projection": f"{_short}_proj"}
_OTHERS = {"fc": "fc", "norm": "output_norm", "embed_tokens": "token_embd", "lm_head": "output"}
_OTHERS |= dict.fromkeys(("input_norm", "hidden_norm"), "enc.output_norm")
_SELECTOR = "candidate_selector"
_OTHERS |= {f"{_SELECTOR}.{part}_codebook": f"selector_{part}.weight" for part in ("predecessor", "successor")}
_OTHERS |= {f"{_SELECTOR}.hidden_projection": "selector_hidden"}


def write_pair(name: str, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Write a target and a head of ``HEADS``, also as a folder beside it; and the head's own keys."""
    model, (write, options) = random_case(_TARGET), HEADS[name]
    target = write_case(folder / "target.gguf", _TARGET, model)
    write(folder / "head", model, **options)
    return target, *write_gguf_head(folder / "head.gguf", folder / "head")


def write_assistant_pair(folder: Path, *, window: int = 64, **keys: Any) -> tuple[Path, Path]:
    """Write a Gemma 4 and an assistant for it, also as a folder beside it. Dots of ``keys`` are ``__``."""
    case, model = _OF_ASSISTANT, random_case(_OF_ASSISTANT)
    fields = case.fields | {
        "hidden_size": 40,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "sliding_window": window,
        "vocab_size_per_layer_input": 0,
    }
    layers = config_of(replace(case, fields=fields))
    config = Gemma4AssistantConfig(text_config=layers, backbone_hidden_size=model.config.hidden_size)
    assistant = Gemma4AssistantForCausalLM(config)
    shapes = {name: tuple(one.shape) for name, one in assistant.state_dict().items() if name != "lm_head.weight"}
    assistant.load_state_dict(frozen_tensors(shapes, 5, 0.3), strict=False)
    assistant.save_pretrained(folder / "head")
    stated = {"nextn_predict_layers": 3, "embedding_length_out": model.config.hidden_size}
    stated |= {"attention.shared_kv_layers": 3, "attention.sliding_window": window}
    stated |= {"attention.sliding_window_pattern": [True, True, False], "attention.head_count_kv": [2, 2, 1]}
    own = replace(case, architecture="gemma4-assistant", keys=case.keys | stated)
    target = write_case(folder / "target.gguf", case, model)
    return target, write_case(folder / "head.gguf", own, assistant, **keys)


def write_mtp_case(name: str, folder: Path) -> Path:
    """Write a target of ``MTP`` with an MTP layer of random numbers, as large as its last layer."""
    case = CASES[MTP[name]]
    model = random_case(case)
    num = model.config.num_hidden_layers
    like = {key: value for key, value in model_tensors(model, case.architecture).items() if f"blk.{num - 1}." in key}
    shapes = {key.replace(f"blk.{num - 1}.", f"blk.{num}."): tuple(value.shape) for key, value in like.items()}
    size = model.config.hidden_size
    shapes |= {f"blk.{num}.nextn.{part}.weight": (size,) for part in ("enorm", "hnorm", "shared_head_norm")}
    shapes[f"blk.{num}.nextn.eh_proj.weight"] = (size, 2 * size)
    tensors = frozen_tensors(shapes, 3, 0.3)
    numbers = {key: one.numpy().astype(np.float32) for key, one in tensors.items()}
    keys = case.keys | {"block_count": num + 1, "nextn_predict_layers": 1}
    keys = {key: [*value, False] if key == "attention.recurrent_layers" else value for key, value in keys.items()}
    return write_case(folder / "target.gguf", replace(case, keys=keys, tensors=numbers), model)


def write_gguf_head(
    file: Path,
    folder: Path,
    *,
    keys: dict[str, Any] | None = None,
    form: str | None = None,
    added: dict[str, Any] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Write the head of a folder: the file, and the keys of its architecture. ``keys`` replace or follow (None: left
    out), ``form`` names the matrices' blocks (None: float32), ``added`` are further tensors."""
    stated, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    own = stated.get("transformer_layer_config") or stated
    is_eagle3 = "layers.0.hidden_norm.weight" in tensors
    architecture = "eagle3" if is_eagle3 else "dflash"
    writer = gguf.GGUFWriter(file, architecture)
    all_keys = _keys(stated, own, is_eagle3=is_eagle3) | (keys or {})
    all_keys = {key: value for key, value in all_keys.items() if value is not None}
    for key, value in all_keys.items():
        add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["AB", "<s>", "</s>", *(chr(ord("A") + i) for i in range(own["vocab_size"] - 3))])
    writer.add_token_types([1, 3, 3, *[1] * (own["vocab_size"] - 3)])
    writer.add_token_merges(["A B"])
    if not is_eagle3:
        inner = stated.get("dflash_config") or stated
        writer.add_mask_token_id(inner["mask_token_id"])
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor("d2t", (tensor + torch.arange(len(tensor))).numpy().astype(np.int64))
            continue
        numbers = tensor.float()
        if is_eagle3 and name.endswith(("q_proj.weight", "k_proj.weight")):
            num_heads = own["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            numbers = numbers.view(num_heads, 2, -1, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
        if form is None or numbers.ndim != 2 or numbers.shape[1] % 32:
            writer.add_tensor(_name(name), np.ascontiguousarray(numbers.numpy()))
        else:
            kind = gguf.GGMLQuantizationType[form]
            writer.add_tensor(_name(name), gguf.quants.quantize(numbers.numpy(), kind), raw_dtype=kind)
    for name, numbers in (added or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, all_keys


def _keys(stated: dict[str, Any], own: dict[str, Any], *, is_eagle3: bool) -> dict[str, Any]:
    found = {
        "context_length": own["max_position_embeddings"],
        "embedding_length": own["hidden_size"],
        "block_count": own["num_hidden_layers"],
        "feed_forward_length": own["intermediate_size"],
        "attention.head_count": own["num_attention_heads"],
        "attention.head_count_kv": own["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(own["rms_norm_eps"]),
        "rope.freq_base": float(own.get("rope_theta") or own["rope_parameters"]["rope_theta"]),
    }
    lengths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    found |= dict.fromkeys(lengths, own["head_dim"])
    if not is_eagle3:
        return found | _block_keys(stated, own)
    found |= {key: stated.get(key, False) for key in ("norm_before_residual", "norm_before_fc")}
    found |= {"vocab_size": own["vocab_size"], "target_hidden_size": own["hidden_size"]}
    return found | {"target_layers": stated["eagle_aux_hidden_state_layer_ids"]}


def _block_keys(stated: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    inner = {**stated, **(stated.get("dflash_config") or {})}
    ids = [i + 1 for i in inner["target_layer_ids"]] if "target_layer_ids" in inner else None
    found = {
        "block_size": inner["block_size"],
        "target_layers": ids or inner["aux_hidden_state_layer_ids"],
        "logit_scale": inner.get("output_multiplier"),
        "embedding_scale": inner.get("input_embedding_scale"),
        "attention.causal": inner.get("is_causal"),
    }
    same = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "final_logit_softcapping")
    found |= {key: inner.get(key) for key in same}
    if own.get("use_sliding_window"):
        found["attention.sliding_window"] = own["sliding_window"]
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in own["layer_types"]]
    return found


def _name(name: str) -> str:
    module, _, kind = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    if module.startswith("layers."):
        _, layer, part = module.split(".", 2)
        module = f"blk.{layer}.{_LAYER[part]}"
    else:
        module = _OTHERS[module]
    return f"{module}.{kind}" if kind else module
