"""Golden answers of llama.cpp (llama-cpp-python 0.3.36) to GGUF files: logits, tokens, ends and probabilities.

    python benchmarks/real_models.py; pip install llama-cpp-python==0.3.36
    PYTHONPATH=tests:tests/support python tests/golden/make_llama.py [logits] [real] [vocabularies]

Keys and values are float32, without flash attention. Weights of gguf_logits.json are float32, too, but for its last
file; llama.cpp rounds rows to 8 bits for matrices in blocks, and to 16 for matrices of such numbers. Merges of
vocabularies.json are trained without a splitter, on the page itself.
"""

import ctypes
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from gguf_models import CASES, IDS, IN_MANY_FORMS, PLACES, add_value, many_forms, write_case, write_in_blocks
from golden.vocabularies import FILE, PAGE, cases, lessons
from real_files import FILES, PROMPTS

_SILENT = llama_cpp.llama_log_callback(lambda *_: None)
_NUM_TOP = 20


def _llama(file: Path, **options: Any) -> Any:
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    how = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False, "verbose": False}
    return llama_cpp.Llama(str(file), **how, **options)


def logits_of(file: Path) -> list[list[float]]:
    """Logits after ``PLACES`` of ``IDS``, rounded to 5 digits."""
    scores = all_logits(file, IDS)
    return [[float(f"{number:.5g}") for number in scores[place]] for place in PLACES]


def all_logits(file: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after each token. [T, V]"""
    number = len(ids)
    model = _llama(file, n_ctx=number, n_batch=number, n_ubatch=number, logits_all=True)
    model.eval(ids)
    return np.array(model.scores[:number])


def _write_logits() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if case.has_oracle:
                found[name] = logits_of(write_case(Path(folder) / "case.gguf", case))
        found[IN_MANY_FORMS] = logits_of(write_in_blocks(Path(folder) / "many.gguf", "llama", many_forms))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    Path(__file__).with_name("gguf_logits.json").write_text(f"{{\n{lines}\n}}\n")


def stated_of(file: Path) -> dict[str, Any]:
    """Tokens of page and prompts, end tokens, and the most probable next tokens, of a published file."""
    # More threads would wait in a loop, for minutes beside other programs.
    llama = _llama(file, n_ctx=256, logits_all=True, n_threads=1, n_threads_batch=1)
    page, prompts = ([llama.tokenize(text.encode(), special=True) for text in texts] for texts in (PAGE, PROMPTS))
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    ends = [i for i in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)]
    top = []
    for ids in prompts:
        llama.reset()
        llama.eval(ids)
        log_probs = llama.logits_to_logprobs(llama.scores[len(ids) - 1].astype(np.float64))
        top.append({str(i): round(float(log_probs[i]), 4) for i in np.argsort(-log_probs)[:_NUM_TOP]})
    return {"page": page, "prompts": prompts, "ends": ends, "top": top}


def _write_real() -> None:
    text = json.dumps({name: stated_of(file) for name, file in FILES.items()})
    text = text.replace("[[", "[\n[").replace("], [", "],\n[").replace("{", "\n{")  # lines that can be compared
    Path(__file__).with_name("real.json").write_text(text.strip() + "\n", encoding="utf-8")


def _trained(is_raw: bool) -> list[str]:
    tokenizer = Tokenizer(models.BPE())
    if is_raw:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, min_frequency=2, max_token_length=8)
    tokenizer.train_from_iterator(lessons() * 2, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def tokens_of(metadata: dict[str, Any]) -> list[list[int]]:
    """Tokens of each text of the page, with what a file of this vocabulary adds to texts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        for key, value in metadata.items():
            add_value(writer, key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        llama = _llama(file, vocab_only=True)
        return [llama.tokenize(text.encode(), add_bos=True, special=True) for text in PAGE]


def _write_vocabularies() -> None:
    merges = {"bytes": _trained(False), "raw": _trained(True)}
    tokens: dict[str, list[list[int]]] = {}
    equal: dict[str, str] = {}
    for name, metadata in cases(merges).items():
        found = tokens_of(metadata)
        equal[name] = next((other for other, ids in tokens.items() if ids == found), name)
        tokens.setdefault(equal[name], found)
    lines = {name: [" ".join(map(str, ids)) for ids in found] for name, found in tokens.items()}
    document = {"page": PAGE, "merges": merges, "equal": equal, "tokens": lines}
    FILE.write_text(json.dumps(document, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"logits": _write_logits, "real": _write_real, "vocabularies": _write_vocabularies}[name]()
