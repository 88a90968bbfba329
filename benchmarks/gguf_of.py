"""Write the weights of a Llama checkpoint as a GGUF file in float32, for llama.cpp.

    python benchmarks/gguf_of.py fable fable.gguf

Needs ``pip install gguf``. The vocabulary is there because llama.cpp wants one; prompts should be fed as token ids,
since the checkpoint's own splitting of text into words is not carried over.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.models.registry import resolve

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, output: Path) -> None:
    """Write ``output`` from the checkpoint in ``folder``.

    Raises:
        ValueError: it is not a plain Llama: another architecture, scaled rotary embedding, or biases.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    if not isinstance(config, LlamaConfig) or config.rope_parameters["rope_type"] != "default":
        raise ValueError(f"{folder} is not a plain Llama")
    writer = gguf.GGUFWriter(output, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, folder, config)
    state: Mapping[str, torch.Tensor] = model.state_dict()
    for name, tensor in state.items():
        # llama.cpp takes the embedding for the output where there is no output matrix.
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(_gguf_name(name), _array(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    if part not in _LAYER_NAMES or kind != "weight":
        raise ValueError(f"a plain Llama has no {name}")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _array(name: str, tensor: torch.Tensor, config: LlamaConfig) -> NDArray[np.float32]:
    for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            # Hugging Face rotates dimension i of a head with i + head_dim / 2, llama.cpp rotates neighbours.
            rows, columns = tensor.shape
            tensor = tensor.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    return tensor.contiguous().numpy()


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: LlamaConfig) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    ids = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(index, f"<unused {index}>") for index in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a known name, or a folder")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_gguf(Path(resolve(arguments.model).location), arguments.output)


if __name__ == "__main__":
    main()
