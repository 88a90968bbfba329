"""Tiny random Llamas whose matrices are stored in each form that the native engine knows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ggml_blocks import block_bytes, numbers_of
from native_cases import CASES, random_model
from outrider.kernels.blocks import BLOCK_TYPES, GROUP_TYPES, BlockType, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.cpu_weights import expert_layouts

_GGUF = {form.name: form for form in BLOCK_TYPES.values()}
_GROUPS = {form.name: form for form in GROUP_TYPES.values() if form.name not in _GGUF}
BLOCKS = _GGUF | _GROUPS
PLAIN = ("float32", "float32, kept", "bfloat16", "int8")
# Widths are whole blocks of all forms.
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}

# Of several forms, and float32 where a row is no whole number of groups (in the outputs of a Llama's
# attention and MLP, whose widths are 144 and 80). Rows of gpt-oss's experts are kept in parts.
_MIXED = {"q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "bfloat16", "gate_proj": "Q8_0", "up_proj": "Q5_1"}
_NARROW = {"head_dim": 36, "intermediate_size": 80, "attention_bias": True, "tie_word_embeddings": False}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_experts": 3}
_LATENT = {"fc1_latent_proj": "Q4_K", "fc2_latent_proj": "Q8_0", "experts.up_proj": "Q5_0", "down_proj": "bfloat16"}
_FACTORS = {"in_proj": "Q4_K", "out_proj": "int8", "o_proj": "bfloat16", "gate_proj": "Q8_0", "down_proj": "int8"}
_DELTA_NET = {"in_proj_qkv": "Q4_1", "in_proj_z": "Q8_0", "_proj": "Q4_0", "embed_tokens": "Q8_0"}
# By family: forms, and fields of the configuration.
OF_SEVERAL: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "llama": (_MIXED | {"embed_tokens": "Q4_0", "lm_head": "int8"}, _NARROW),
    "qwen3_moe": ({"gate_up_proj": "Q4_K", "down_proj": "bfloat16", "o_proj": "Q4_0"}, _EXPERTS),
    "gpt_oss": (
        {"gate_up_proj": "Q4_K", "down_proj": "bfloat16"},
        {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "nemotron_h": (
        _LATENT,
        CASES["nemotron_h"]["wide latent experts in groups"] | {"moe_latent_size": 64, "moe_intermediate_size": 32},
    ),
    "falcon_h1": (_FACTORS, CASES["falcon_h1"]["plain"] | {"mamba_d_ssm": 64}),
    "qwen3_5_text": (
        _DELTA_NET,
        CASES["qwen3_5_text"]["a state for each"] | {"linear_num_key_heads": 2, "linear_value_head_dim": 24},
    ),
}


def stored_matrix(weight: Tensor, form: str, num_digits: int, seed: int) -> Tensor:
    """A matrix in a form; in blocks, any numbers of the same spread. [O, I]"""
    if form == "bfloat16":
        return NarrowWeight(weight.bfloat16(), torch.float32)
    if form == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return NarrowWeight((weight / scale).round().to(torch.int8), torch.float32, scale)
    if form not in BLOCKS:
        return NarrowWeight(weight, torch.float32) if form == "float32, kept" else weight
    blocks = replace(BLOCKS[form], num_digits=num_digits)
    if form in _GROUPS:
        return NarrowWeight.of_blocks(_group_bytes(weight, blocks, seed), blocks)
    spread = numbers_of(block_bytes(tuple(weight.shape), form, seed), form).std()
    rows = block_bytes(tuple(weight.shape), form, seed, float(weight.std()) / spread)
    return NarrowWeight.of_blocks(torch.from_numpy(rows), blocks)


def _group_bytes(weight: Tensor, form: BlockType, seed: int) -> Tensor:
    (number, width), generator = weight.shape, torch.Generator().manual_seed(seed)
    wholes = torch.randint(16, (number, width), dtype=torch.uint8, generator=generator)
    scales = (float(weight.std()) / 6 * torch.randn(number, width // form.num_numbers, generator=generator)).half()
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8, generator=generator)
    return in_groups(wholes, scales, zeros if "zero" in form.name else None)


def model_in(
    form: str | dict[str, str],
    num_digits: int = 0,
    family: str = "llama",
    stated: dict[str, Any] | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """A model with all matrices in a form, or those whose names end so; ``stated`` and ``fields`` configure."""
    model = random_model(family, (stated or {}) | fields, **_SIZES)
    forms = form if isinstance(form, dict) else {"": form}
    layouts = expert_layouts(model)
    made: dict[int, nn.Parameter] = {}
    for seed, (name, weight) in enumerate([*model.named_parameters(remove_duplicate=False)]):
        found = next((one for end, one in forms.items() if name.removesuffix(".weight").endswith(end)), None)
        if weight.ndim != 2 and name not in layouts or found is None:
            continue
        if id(weight) not in made:  # a tied head once
            layout = layouts.get(name)
            rows = weight.detach() if layout is None else layout.rows(weight.detach())
            stored = stored_matrix(rows, found, num_digits, seed)
            if isinstance(stored, NarrowWeight):
                stored = NarrowWeight(stored.stored, torch.float32, stored.scale, stored.blocks, experts=layout)
            made[id(weight)] = nn.Parameter(stored, requires_grad=False)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, made[id(weight)])
    return model
