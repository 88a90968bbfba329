"""Checkpoints of tiny heads with random weights, in the layouts in which they are published."""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import toys
from hybrids import hybrid_lm
from outrider.drafters.base import Drafter
from outrider.drafters.heads import head_drafter
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.registry import ModelSpec
from outrider.runtime.lm import LM

LAYERS = (1, 2, 3)  # of the target, whose inputs the head reads


def write_eagle3(
    folder: Path,
    target: PreTrainedModel,
    *,
    layout: str = "speculators",
    token_ids: list[int] | None = None,
    seed: int = 0,
    scale: float = 0.3,
    num_layers: int = 1,
    has_embedding: bool = True,
    context_len: int | None = None,
    window: int | None = None,
    **flags: bool,
) -> None:
    """Write an EAGLE-3 head: "speculators", "safeailab" or "specforge"; of ``token_ids`` of the target, or of all; the
    context is the target's if None; ``window`` is of its sliding layers."""
    config = target.config
    size, num = config.hidden_size, config.vocab_size
    ids = list(range(num)) if token_ids is None else token_ids
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, len(LAYERS) * size), "norm.weight": (size,)}
    if has_embedding:
        shapes["embed_tokens.weight"] = (num, size)
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(LAYERS) * size,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(LAYERS))}
    shapes |= layer_shapes(config, num_layers, num_read=2)
    shapes["layers.0.hidden_norm.weight"] = (size,)
    shapes["lm_head.weight"] = (len(ids), size)
    tensors = random_tensors(shapes, seed, scale)
    if token_ids is not None:
        tensors |= few_tokens(ids, num)
    if layout != "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    own = stated_layers("llama", config, num_layers, rope_theta=10000.0)
    own["max_position_embeddings"] = context_len or config.max_position_embeddings
    if window is not None:
        own |= {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}
    stated: dict[str, Any]
    if layout == "speculators":
        stated = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": own,
            "draft_vocab_size": len(ids),
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "norm_before_residual": False,
            **flags,
        }
    elif layout == "specforge":
        stated = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in LAYERS]},  # by their outputs
            **own,
        }
    else:  # which states no layers: those of its inventors
        stated = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(ids), **own}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    if layout == "safeailab":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def layer_shapes(
    config: Any, num_layers: int, *, num_read: int = 1, has_head_norms: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of decoder layers like a target's; the first one reads ``num_read`` states side by side."""
    size, inner = config.hidden_size, config.intermediate_size
    head_dim = size // config.num_attention_heads
    narrow = config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_layers):
        read = num_read * size if i == 0 else size
        of_layer = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (size,))
        of_layer |= {"self_attn.q_proj": (size, read), "self_attn.o_proj": (size, size), "mlp.down_proj": (size, inner)}
        of_layer |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (narrow, read))
        of_layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, size))
        if has_head_norms:
            of_layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head_dim,))
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def stated_layers(model_type: str, config: Any, num_layers: int, **more: Any) -> dict[str, Any]:
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    same += ("max_position_embeddings", "rms_norm_eps")
    own = {"model_type": model_type, "num_hidden_layers": num_layers, **{name: getattr(config, name) for name in same}}
    return own | {"head_dim": config.hidden_size // config.num_attention_heads} | more


def few_tokens(ids: list[int], num: int) -> dict[str, Tensor]:
    """Tensors that name the tokens of a head, of ``num`` of its target."""
    is_known = torch.zeros(num, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": is_known}


def write_mtp(folder: Path, target: PreTrainedModel, *, layout: str, seed: int = 0, scale: float = 0.3) -> None:
    """Save a target with an MTP layer, like its last with full attention: "qwen", or "deepseek" (and GLM)."""
    target.save_pretrained(folder)
    config = target.config
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    like = f"model.layers.{max(i for i, kind in enumerate(types) if kind == 'full_attention')}."
    num, size = config.num_hidden_layers, config.hidden_size
    home, fc, of_embedding, of_hidden, norm = (
        ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        if layout == "qwen"
        else (f"model.layers.{num}.{part}" for part in ("", "eh_proj", "enorm", "hnorm", "shared_head.norm"))
    )
    saved = load_file(folder / "model.safetensors")
    shapes = {
        home + name.removeprefix(like): tuple(value.shape) for name, value in saved.items() if name.startswith(like)
    }
    shapes |= {f"{fc}.weight": (size, 2 * size)}
    shapes |= {f"{name}.weight": (size,) for name in (of_embedding, of_hidden, norm)}
    tensors = {name: value.to(target.dtype) for name, value in random_tensors(shapes, seed, scale).items()}
    tensors = _with_single_experts(tensors)
    if layout == "deepseek":  # copies, as published
        tensors[f"model.layers.{num}.embed_tokens.weight"] = saved["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{num}.shared_head.head.weight"] = saved["lm_head.weight"].clone()
    save_file({**saved, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def _with_single_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each expert and projection, as published; Transformers stacks them."""
    single: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base, _, part = name.rpartition(".")
        for i, expert in enumerate(value if base.endswith(".experts") else ()):
            parts = expert.chunk(2) if part == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            single |= {f"{base}.{i}.{one}.weight": some.clone() for one, some in zip(names, parts, strict=True)}
        if not base.endswith(".experts"):
            single[name] = value
    return single


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> dict[str, Tensor]:
    """Normal numbers in float64, around 1 in vectors (norms). They depend on the tensor's name alone."""
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = scale * numbers + (1.0 if len(shape) == 1 else 0.0)
    return found


def eagle3_drafter(target: LM, name: str = "head", **options: Any) -> Drafter:
    """An EAGLE-3 head for a target, as it is loaded (see ``write_eagle3``)."""
    with tempfile.TemporaryDirectory() as folder:
        write_eagle3(Path(folder), target.model, **options)
        return head_drafter(_with_execution(load_head(ModelSpec(name=name, path=Path(folder)), target)))


def mtp_pair(model: PreTrainedModel, layout: str, **options: Any) -> tuple[LM, Drafter]:
    with tempfile.TemporaryDirectory() as folder:
        write_mtp(Path(folder), model, layout=layout, **options)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        target = hybrid_lm(loaded)
        return target, head_drafter(_with_execution(load_mtp_of(target)))


def _with_execution(head: LM) -> LM:
    head.execution = toys.execution()
    return head
