"""Grow a Llama checkpoint to any depth and width without changing what it computes.

    python benchmarks/grow.py fable grown-110m --hidden-size 768 --num-layers 14 --intermediate-size 2304

The result has the cost of a big model and the logits of the small one (to rounding), so that a speed measured with it
comes with real text and real acceptance. What is added computes, but its results are multiplied by zero:

- Width: the residual stream gets dimensions that stay zero. RMSNorm divides by the mean square over *all* dimensions,
  which is d/D of what it was, so its weights are multiplied by sqrt(d/D) and its epsilon by d/D.
- Heads and feed-forward units: random, with zero columns in the projection that adds them to the stream.
- Depth: whole layers whose projections into the stream are zero, spread evenly among the others.

The idea is that of Net2Net (Chen, Goodfellow, Shlens 1511.05641) and, for depth, of LLaMA Pro (Wu et al. 2401.02415).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.models.registry import resolve

_RANDOM_STD = 0.02


def grow(
    model: LlamaForCausalLM,
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int,
    context_len: int | None = None,
) -> LlamaForCausalLM:
    """A bigger Llama with the same logits, made where ``model`` is and in its dtype.

    Args:
        hidden_size: D, a multiple of the head size. Attention gets one head for each head size of it.
        num_layers: at least those of ``model``.
        intermediate_size: of the feed-forward layers.
        context_len: tokens that it accepts; None for as many as ``model``. Beyond those that ``model`` was trained on,
            it has a cost, and no meaning.

    Raises:
        ValueError: a size is smaller than the model's, or does not fit its heads.
    """
    small = model.config
    group = small.num_attention_heads // small.num_key_value_heads
    num_kv_heads = hidden_size // small.head_dim // group
    if hidden_size % (small.head_dim * group) or hidden_size < small.hidden_size:
        raise ValueError(f"hidden_size must be a multiple of {small.head_dim * group}, at least {small.hidden_size}")
    if num_layers < small.num_hidden_layers or intermediate_size < small.intermediate_size:
        raise ValueError("a model can only grow")
    ratio = small.hidden_size / hidden_size
    config = LlamaConfig(
        **small.to_diff_dict()
        | {
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_kv_heads * group,
            "num_key_value_heads": num_kv_heads,
            "head_dim": small.head_dim,
            "rms_norm_eps": small.rms_norm_eps * ratio,
            "max_position_embeddings": context_len or small.max_position_embeddings,
        }
    )
    with torch.device(model.device):
        big = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    generator = torch.Generator(model.device).manual_seed(0)
    norm_scale = math.sqrt(ratio)
    with torch.no_grad():
        big.model.embed_tokens.weight.copy_(_padded(model.model.embed_tokens.weight, config.vocab_size, hidden_size))
        if not config.tie_word_embeddings:
            big.lm_head.weight.copy_(_padded(model.lm_head.weight, config.vocab_size, hidden_size))
        _copy_norm(big.model.norm, model.model.norm, norm_scale)
        # Layer i of the small model becomes layer places[i] of the big one.
        places = [i * num_layers // small.num_hidden_layers for i in range(small.num_hidden_layers)]
        sources = dict(zip(places, model.model.layers, strict=True))
        for index, layer in enumerate(big.model.layers):
            _fill_layer(layer, sources.get(index), norm_scale, generator)
    big.generation_config = model.generation_config
    return big.eval()


def _fill_layer(layer: Any, source: Any | None, norm_scale: float, generator: torch.Generator) -> None:
    into_stream = (layer.self_attn.o_proj, layer.mlp.down_proj)
    for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
        if linear in into_stream:
            linear.weight.zero_()
        else:
            linear.weight.normal_(std=_RANDOM_STD, generator=generator)
    if source is None:
        return
    pairs = [
        (getattr(layer.self_attn, name), getattr(source.self_attn, name))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ] + [(getattr(layer.mlp, name), getattr(source.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")]
    for big, small in pairs:
        num_out, num_in = small.weight.shape
        big.weight[:num_out, :num_in] = small.weight
    _copy_norm(layer.input_layernorm, source.input_layernorm, norm_scale)
    _copy_norm(layer.post_attention_layernorm, source.post_attention_layernorm, norm_scale)


def _copy_norm(big: Any, small: Any, scale: float) -> None:
    big.weight[: len(small.weight)] = small.weight * scale


def _padded(weight: Tensor, num_rows: int, num_columns: int) -> Tensor:
    out = weight.new_zeros(num_rows, num_columns)
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="known name or folder of a Llama checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--intermediate-size", type=int, required=True)
    parser.add_argument("--context-len", type=int, help="tokens that it accepts; those of the source unless given")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    location = resolve(arguments.source).location
    model = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    big = grow(
        model,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        intermediate_size=arguments.intermediate_size,
        context_len=arguments.context_len,
    ).to(getattr(torch, arguments.dtype))
    big.save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(location).save_pretrained(arguments.output)
    num_params = sum(parameter.numel() for parameter in big.parameters())
    print(f"{arguments.output}: {num_params / 1e6:.1f} M parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
