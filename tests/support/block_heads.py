"""Checkpoints of tiny block heads with random weights, in the layouts in which they are published."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import toys
from heads import LAYERS, few_tokens, layer_shapes, stated_layers
from outrider.drafters.base import Drafter
from outrider.drafters.heads import head_drafter
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.runtime.lm import LM


def write_block(
    folder: Path,
    target: PreTrainedModel,
    *,
    layout: str = "zlab",
    token_ids: list[int] | None = None,
    seed: int = 0,
    scale: float = 0.3,
    num_layers: int = 2,
    block_size: int = 5,
    has_own_tokens: bool = False,
    is_second: bool = False,
    markov: str | None = None,
    has_confidence: bool = False,
    num_candidates: int = 0,
    layers: dict[str, Any] | None = None,
    **flags: Any,
) -> None:
    """Write a block head: DFlash, DFlash 2, DSpark or LiLiCorr.

    Args:
        layout: "zlab", "speculators" or "deepspec".
        token_ids: the target's ids of its tokens; None for all of them.
        has_own_tokens: write an embedding and an LM head, too: those of the target.
        is_second: with the convolutions and the candidate selector of DFlash 2.
        num_candidates: of LiLiCorr's part, in the layout of z-lab; 0 for none.
        markov: kind of its Markov head, if it has one: "vanilla", "gated" or "rnn".
        layers: settings of its layers.
        flags: other settings.
    """
    config = target.config
    size, num = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(LAYERS) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    shapes |= layer_shapes(config, num_layers, has_head_norms=True)
    if token_ids is not None:
        shapes["lm_head.weight"] = (len(token_ids), size)
    second = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    second |= {key: flags.pop(key) for key in second if key in flags}
    if is_second:
        for part in [f"layers.{i}.{one}" for i in range(num_layers) for one in ("attention_conv", "mlp_conv")]:
            shapes |= {f"{part}.base_kernel": (2, 2, size), f"{part}.kernel_projection.weight": (4 * size // 8, size)}
        shapes |= {f"candidate_selector.{one}_codebook": (num, 6) for one in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (6, size)
    rank = 6 if markov else 0
    if markov:
        shapes["markov_head.markov_w1.weight"] = (num, rank)
        shapes["markov_head.markov_w2.weight"] = (num if token_ids is None else len(token_ids), rank)
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, size + rank), "markov_head.gate_proj.bias": (rank,)}
    if markov == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, size + 2 * rank),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if has_confidence:
        shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
    lattice = {}
    if num_candidates:
        shapes |= {f"lilicorr.{part}": sizes for part, sizes in _of_lattice(size, block_size, num_candidates).items()}
        lattice = {
            "lilicorr_candidate_topk": num_candidates,
            "lilicorr_vector_eps": 1e-4,
            "lilicorr_logit_scale": 3.0,
        }
    spark = {"markov_rank": rank, "enable_confidence_head": has_confidence}
    if markov:
        spark |= {"markov_head_type": markov, "confidence_head_with_markov": True}
    tensors = frozen_tensors(shapes, seed, scale)
    if token_ids is not None:
        tensors |= few_tokens(token_ids, num)
    if has_own_tokens:
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.clone()
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.clone()
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    own = stated_layers("qwen3", config, num_layers, rope_parameters=rope, tie_word_embeddings=False, **(layers or {}))
    mask_id = num - 1
    stated: dict[str, Any]
    if layout == "speculators":
        stated = {
            "architectures": [f"{'DSpark' if markov else 'DFlash2' if is_second else 'DFlash'}DraftModel"],
            "speculators_model_type": "dspark" if markov else "dflash2" if is_second else "dflash",
            "transformer_layer_config": own,
            "draft_vocab_size": num if token_ids is None else len(token_ids),
            "block_size": block_size,
            "mask_token_id": mask_id,
            "aux_hidden_state_layer_ids": list(LAYERS),
            **(spark if markov else second if is_second else {}),
            **flags,
        }
    elif layout == "deepspec":
        stated = {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": block_size,
            "mask_token_id": mask_id,
            "target_layer_ids": [i - 1 for i in LAYERS],
            "num_anchors": 1,
            **spark,
            "layer_types": ["full_attention"] * num_layers,
            **own,
            **flags,
        }
    else:
        stated = {
            "architectures": [f"{'LiLiCorr' if lattice else 'DFlash2' if is_second else 'DFlash'}DraftModel"],
            "block_size": block_size,
            "num_target_layers": config.num_hidden_layers,
            "dflash_config": {
                "mask_token_id": mask_id,
                "target_layer_ids": [i - 1 for i in LAYERS],
                **(second if is_second else {}),
                **lattice,
            },
            **own,
            **flags,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _of_lattice(size: int, block_size: int, num_candidates: int) -> dict[str, tuple[int, ...]]:
    """Shapes of LiLiCorr's weights, narrower than the head, in two layers of two heads."""
    width, rank = 12, 6
    shapes: dict[str, tuple[int, ...]] = {
        "slot_embedding": (1, 1, block_size - 1, 1, width),
        "rank_embedding": (1, 1, 1, num_candidates, width),
        "relative_slot_bias": (2, 2 * block_size - 1),
        "same_slot_bias": (2,),
        "feature_mlp.0.weight": (5,),
        "feature_mlp.0.bias": (5,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    linear = {
        "token_proj": (width, size),
        "pass_hidden_proj": (width, size),
        "context_proj": (width, size),
        "feature_mlp.1": (width, 5),
        "feature_mlp.3": (width, width),
        "factor_input_proj": (width, 3 * width),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (rank, width)),
    }
    for i in range(2):
        layer = f"layers.{i}."
        shapes |= {f"{layer}attn_norm.weight": (width,), f"{layer}mlp_norm.weight": (width,)}
        shapes |= {f"{layer}attn.in_proj_weight": (3 * width, width), f"{layer}attn.in_proj_bias": (3 * width,)}
        linear |= {f"{layer}attn.out_proj": (width, width), f"{layer}mlp.0": (20, width), f"{layer}mlp.2": (width, 20)}
    for part, shape in linear.items():
        shapes |= {f"{part}.weight": shape, f"{part}.bias": shape[:1]}
    return shapes


def tiny_block_drafter(target: LM, **options: Any) -> Drafter:
    """A drafter with such a head."""
    model: Any = target.model
    with tempfile.TemporaryDirectory() as folder:
        write_block(Path(folder), model, **options)
        head = load_head(resolve(folder, None), target)
    head.name = "head"  # rather than the folder's
    return head_drafter(head.with_execution(toys.execution()))


def frozen_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> dict[str, Tensor]:
    """Tensors as of ``random_tensors``, from a generator that NumPy promises never to change."""
    generator = np.random.RandomState(seed)
    return {
        name: torch.from_numpy(scale * generator.standard_normal(shape)) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in sorted(shapes.items())
    }


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a checkpoint of one file."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
