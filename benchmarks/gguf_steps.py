"""Steps of GGUF files of random weights in published shapes, beside llama.cpp.

    python benchmarks/gguf_steps.py FOLDER [--shapes qwen35 gemma4 gpt-oss] [--threads 1] [--tokens 1 5] [--rounds 20]
        [--past 128]

Shapes are those of Qwen3.5-0.8B, of Gemma 4 E2B and of six layers of gpt-oss-20b. Matrices are Q4_K, embeddings and LM
heads Q6_K, experts of gpt-oss MXFP4, blocks of any bytes. FOLDER keeps the files. llama.cpp is llama-cpp-python, built
for the machine. Forwards take turns; each has its tokens after PAST others, which stay in the cache. A ratio is the
median of the rounds' ratios. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from llama_cpp import Llama
from rich.console import Console
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider.measure.tables import new_table
from outrider.system.provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ggml_blocks import block_bytes
from gguf_models import Case, write_case

_CONTEXT, _WARM_UP, _PAUSE_S = 1024, 3, 0.02
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _qwen35() -> Case:
    fields = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "head_dim": 256}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 248320, "tie_word_embeddings": True}
    fields |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "rms_norm_eps": 1e-6}
    keys = {"full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}
    return Case("qwen3_5_text", "qwen35", fields, keys)


def _gemma4() -> Case:
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": _ROPE,
    }
    fields = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "head_dim": 256}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 1, "global_head_dim": 512, "vocab_size": 262144}
    fields |= {"layer_types": types, "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
    fields |= {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "rope_parameters": ropes}
    fields |= {"tie_word_embeddings": True, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6}
    factors = np.array([1.0] * 64 + [1e30] * 192, np.float32)
    return Case(
        "gemma4_text",
        "gemma4",
        fields,
        {"feed_forward_length": [6144] * 15 + [12288] * 20},
        {"rope_freqs.weight": factors},
    )


def _gpt_oss() -> Case:
    rope = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 4096}
    fields = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6, "head_dim": 64}
    fields |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "sliding_window": 128}
    fields |= {"num_local_experts": 32, "num_experts_per_tok": 4, "rope_parameters": rope, "rms_norm_eps": 1e-5}
    return Case("gpt_oss", "gpt-oss", fields, has_mxfp4=True)


_SHAPES: dict[str, Callable[[], Case]] = {"qwen35": _qwen35, "gemma4": _gemma4, "gpt-oss": _gpt_oss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=_SHAPES, default=[*_SHAPES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--past", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = [row for shape in arguments.shapes for row in _measure(shape, arguments)]
    columns = "shape", "tokens", "Outrider, ms", "llama.cpp, ms", "times as fast"
    table = new_table(f"{arguments.threads} thread(s)", *columns)
    for row in rows:
        cells = f"{row['own_ms']:.1f}", f"{row['llama_ms']:.1f}", f"{row['times_as_fast']:.2f}"
        table.add_row(row["shape"], str(row["tokens"]), *cells)
    Console(width=100).print(table)
    print(json.dumps({"provenance": provenance("cpu"), "past": arguments.past, "rows": rows}))


def _measure(shape: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    file = arguments.folder / f"{shape}.gguf"
    if not file.exists():
        _write(file, _SHAPES[shape]())
    lm = outrider.load(file).target
    assert lm.execution.name == "native"
    threads = arguments.threads
    llama = Llama(str(file), n_ctx=_CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
    past, most = arguments.past, max(arguments.tokens)
    taken: dict[int, list[tuple[float, float]]] = {number: [] for number in arguments.tokens}
    ids = torch.randint(100, 40_000, (1, past + most), generator=torch.Generator().manual_seed(0))
    places = torch.arange(past + most)[None]
    for round_number in range(_WARM_UP + arguments.rounds):
        for number in arguments.tokens:
            now = slice(past, past + number)
            cache = lm.new_cache(1, _CONTEXT)
            with torch.inference_mode():
                lm.forward(ids[:, :past], places[:, :past], cache, 256, num_logits=1)
                own_s = _seconds(lambda now=now, cache=cache: lm.forward(ids[:, now], places[:, now], cache, 256))
            llama.reset()
            llama._ctx.kv_cache_clear()
            llama.eval(ids[0, :past].tolist())
            tokens = ids[0, now].tolist()
            llama_s = _seconds(lambda tokens=tokens: llama.eval(tokens))
            if round_number >= _WARM_UP:
                taken[number].append((own_s, llama_s))
    llama.close()
    return [
        {
            "shape": shape,
            "tokens": number,
            "own_ms": 1e3 * statistics.median(own for own, _ in pairs),
            "llama_ms": 1e3 * statistics.median(other for _, other in pairs),
            "times_as_fast": statistics.median(other / own for own, other in pairs),
        }
        for number, pairs in taken.items()
    ]


def _seconds(forward: Callable[[], Any]) -> float:
    time.sleep(_PAUSE_S)
    begin_s = time.perf_counter()
    forward()
    return time.perf_counter() - begin_s


def _write(file: Path, case: Case) -> None:
    """Write a file whose matrices are blocks of any bytes, with biases of zero."""
    # ``write_case`` adds numbers; all of a matrix's are one number in memory until they are replaced here.
    add = gguf.GGUFWriter.add_tensor

    def add_blocks(writer: gguf.GGUFWriter, name: str, numbers: Any, raw_dtype: Any = None) -> None:
        if numbers.ndim == 1 or name.endswith("bias") or "gate_inp" in name or "conv1d" in name:
            routed = np.random.default_rng(0).standard_normal(numbers.shape, np.float32) / 50  # experts are not equal
            add(writer, name, routed if "gate_inp" in name else numbers)
            return
        form = "MXFP4" if "exps" in name else "Q6_K" if name in ("token_embd.weight", "output.weight") else "Q4_K"
        form = form if numbers.shape[-1] % 256 == 0 or form == "MXFP4" else "Q8_0"
        stored = block_bytes((numbers[..., 0].size, numbers.shape[-1]), form, sum(name.encode()))
        add(writer, name, stored.reshape(*numbers.shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[form])

    config = AutoConfig.for_model(case.model_type, **case.fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, old in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        path, _, last = name.rpartition(".")
        # With equal biases all tokens would go to the same experts.
        one = torch.tensor(0.0 if last.endswith("bias") else 0.1).expand(old.shape)
        made = nn.Parameter(one, requires_grad=False) if isinstance(old, nn.Parameter) else one
        setattr(model.get_submodule(path), last, made)
    tokens = ["AB", "<s>", "</s>", "A", "B", *(f"t{i}" for i in range(config.vocab_size - 5))]
    gguf.GGUFWriter.add_tensor = add_blocks  # type: ignore[method-assign]
    try:
        case = Case(case.model_type, case.architecture, case.fields, case.keys, case.tensors)
        write_case(file, case, model, keys={"tokenizer.ggml.tokens": tokens})
    finally:
        gguf.GGUFWriter.add_tensor = add  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
