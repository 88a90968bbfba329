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
    is_second: bool = False,
    layers: dict[str, Any] | None = None,
    **flags: Any,
) -> None:
    """Write a block head: DFlash or, with convolutions and the candidate selector (``is_second``), DFlash 2; layout
    "zlab" or "speculators"; of ``token_ids`` of the target, or of all; ``layers`` are settings of layers."""
    config = target.config
    size, num = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, len(LAYERS) * size), "hidden_norm.weight": (size,)}
    shapes |= {"norm.weight": (size,)}
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
    tensors = frozen_tensors(shapes, seed, scale)
    if token_ids is not None:
        tensors |= few_tokens(token_ids, num)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    own = stated_layers("qwen3", config, num_layers, rope_parameters=rope, tie_word_embeddings=False, **(layers or {}))
    second = second if is_second else {}
    stated: dict[str, Any] = {"architectures": [f"DFlash{2 if is_second else ''}DraftModel"], "block_size": block_size}
    if layout == "speculators":
        stated |= {
            "speculators_model_type": "dflash2" if is_second else "dflash",
            "transformer_layer_config": own,
            "draft_vocab_size": num if token_ids is None else len(token_ids),
            "mask_token_id": num - 1,
            "aux_hidden_state_layer_ids": list(LAYERS),
            **second,
        }
    else:
        inner = {"mask_token_id": num - 1, "target_layer_ids": [i - 1 for i in LAYERS], **second}
        stated |= {"num_target_layers": config.num_hidden_layers, "dflash_config": inner, **own}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated | flags))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tiny_block_drafter(target: LM, **options: Any) -> Drafter:
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
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
