"""GGUF files for llama.cpp, from checkpoints of Llama, Mistral, Qwen2 and Qwen3.

Weights are converted one by one. The tokenizer is supported if it is a byte-level BPE whose pre-tokenizer llama.cpp
knows by name (models/gguf/splitters.py); the file format is in the package ``gguf``. Use llama.cpp's converter for
anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import MissingExtra, UnsupportedModel
from outrider.models.gguf.splitters import name_of
from outrider.models.loading import context_len
from outrider.models.reading import load_tokenizer, read_config
from outrider.models.registry import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Architecture -> its name in GGUF. The first two rotate neighbouring dimensions of a head in llama.cpp, the others
# dimension i with i + head_dim / 2, as Hugging Face does.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "Q8_0"}


def obstacle(spec: ModelSpec) -> str | None:
    """Reason why a checkpoint cannot be converted here; None if it can.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    if spec.path is None:
        return "it is on the hub"
    config = read_config(spec)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in _ARCHITECTURES:
        return f"{architecture} is not one of {', '.join(_ARCHITECTURES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if (kind := config.rope_parameters["rope_type"]) not in ("default", "llama3"):
        return f"its rotary embedding is scaled ({kind})"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or _has_window(config):
        return "it has sliding windows"
    if not list(spec.path.glob("*.safetensors")):
        return "its weights are not in safetensors"
    file = spec.path / "tokenizer.json"
    if not file.is_file() or _split_name(json.loads(file.read_text(encoding="utf-8"))) is None:
        return "its pre-tokenizer has no known name in llama.cpp"
    return None


def write_gguf(spec: ModelSpec, output: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint as a GGUF file, atomically.

    Args:
        dtype: of the matrices: float32, float16, bfloat16, or int8 for Q8_0 (a scale for each 32 numbers); None for
            that of the checkpoint. Vectors are float32.

    Raises:
        UnsupportedModel: see ``obstacle``.
        MissingExtra: gguf is not installed.
    """
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "export")
    reason = obstacle(spec)
    if reason is not None:
        raise UnsupportedModel(f"{spec.name} cannot be written as GGUF here ({reason}): use llama.cpp's converter")
    import gguf

    assert spec.path is not None
    config = read_config(spec)
    dtype = dtype or config.dtype or torch.float32
    if dtype not in _TYPES:
        raise UnsupportedModel(f"{spec.name}: a GGUF file has no {dtype}: choose float32, float16, bfloat16 or int8")
    part = output.with_name(f"{output.name}.part")
    architecture = _ARCHITECTURES[config.architectures[0]]
    writer = gguf.GGUFWriter(part, architecture)
    _add_sizes(writer, config)
    share = "ALL" if dtype == torch.float32 else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{share}_{_TYPES[dtype]}"])
    _add_vocabulary(writer, spec, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, tensor in _tensors(spec.path, config):
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UnsupportedModel(f"{spec.name} cannot be written as GGUF here ({name} is not known)")
        _add_info(writer, known, tensor, dtype)
    factors = _rope_factors(config)
    if factors is not None:
        _add_info(writer, "rope_freqs.weight", factors, dtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(spec.path, config):
            writer.write_tensor_data(_bytes(_rotate(name, tensor, config), dtype))
        if factors is not None:
            writer.write_tensor_data(_bytes(factors, dtype))
        writer.close()
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def _type(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Type in the file: vectors are small, and stay float32."""
    return dtype if tensor.ndim > 1 else torch.float32


def _add_info(writer: GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    import gguf

    kind = _type(tensor, dtype)
    raw = gguf.GGMLQuantizationType[_TYPES[kind]]
    block, block_bytes = gguf.GGML_QUANT_SIZES[raw]
    if tensor.shape[-1] % block:
        raise UnsupportedModel(f"{name} has the width {tensor.shape[-1]}: Q8_0 requires a multiple of {block}")
    num_bytes = tensor.numel() // block * block_bytes
    writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=raw)


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Any:
    import gguf

    kind = _type(tensor, dtype)
    if kind == torch.int8:
        return gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    # NumPy lacks some of torch's types.
    return tensor.to(kind).contiguous().flatten().view(torch.uint8).numpy()


def _has_window(config: Any) -> bool:
    """Whether all layers have a sliding window: Mistral has no list of layer types."""
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True)
    return window is not None and is_used and window < context_len(config)


def _head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights in a fixed order, without the output matrix if it is tied."""
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in sorted(shard.keys()):
                is_tied = name == "lm_head.weight" and config.tie_word_embeddings
                if not is_tied and not name.endswith("rotary_emb.inv_freq"):
                    yield name, shard.get_tensor(name)


def _rotate(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Permute the rows of query and key projections to llama.cpp's RoPE order."""
    if _ARCHITECTURES[config.architectures[0]] != "llama":
        return tensor
    for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            halves = tensor.view(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _rope_factors(config: Any) -> Tensor | None:
    """Divisors of the RoPE frequencies; None without scaling. [head_dim / 2]"""
    if config.rope_parameters["rope_type"] == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled: Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
    factors: Tensor = config.rope_parameters["rope_theta"] ** -exponents / scaled
    return factors.to(torch.float32)


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _split_name(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer (its JSON); None if unknown."""
    model = tokenizer["model"]
    normalizer = (tokenizer["normalizer"] or {"type": "NFC"})["type"]  # NFC leaves usual text unchanged
    if model["type"] != "BPE" or model.get("byte_fallback") or normalizer != "NFC":
        return None
    return name_of(tokenizer["pre_tokenizer"] or {}, ignores_merges=bool(model.get("ignore_merges")))


def _add_vocabulary(writer: GGUFWriter, spec: ModelSpec, config: Any) -> None:
    import gguf

    assert spec.path is not None
    tokenizer = load_tokenizer(spec)
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(config.vocab_size):
        tokens.append(texts.get(index, f"[PAD{index}]"))
        kind = gguf.TokenType.NORMAL if index in texts else gguf.TokenType.UNUSED
        if index in added:
            kind = gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED
        types.append(kind)
    document = json.loads((spec.path / "tokenizer.json").read_text(encoding="utf-8"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(_split_name(document)))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(spec.path, load_merges=True, n_vocab=config.vocab_size)
    # As the tokenizer behaves, whatever tokenizer_config.json says.
    ids = tokenizer("a").input_ids
    special.add_special_token = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    special.add_to_gguf(writer, quiet=True)
