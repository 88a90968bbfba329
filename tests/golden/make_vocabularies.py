"""Writes vocabularies.json: trains the merges, and lets llama.cpp tokenize.

    pip install llama-cpp-python==0.3.36; PYTHONPATH=tests:tests/support python tests/golden/make_vocabularies.py

Vocabularies are trained without a splitter, on the page itself.
"""

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from golden.vocabularies import FILE, PAGE, cases, lessons

_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


def _trained(is_raw: bool) -> list[str]:
    tokenizer = Tokenizer(models.BPE())
    if is_raw:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, min_frequency=2, max_token_length=8)
    tokenizer.train_from_iterator(lessons() * 2, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_vocabulary(file: Path, metadata: dict[str, Any]) -> None:
    """Write metadata as a GGUF file without tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def tokens_of_llama(metadata: dict[str, Any]) -> list[list[int]]:
    """llama.cpp's tokens of each text of the page, with what the file adds to texts."""
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        write_vocabulary(file, metadata)
        llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        return [llama.tokenize(text.encode(), add_bos=True, special=True) for text in PAGE]


def main() -> None:
    merges = {"bytes": _trained(False), "raw": _trained(True)}
    tokens: dict[str, list[list[int]]] = {}
    equal: dict[str, str] = {}
    for name, metadata in cases(merges).items():
        found = tokens_of_llama(metadata)
        equal[name] = next((other for other, ids in tokens.items() if ids == found), name)
        tokens.setdefault(equal[name], found)
    lines = {name: [" ".join(map(str, ids)) for ids in found] for name, found in tokens.items()}
    document = {"page": PAGE, "merges": merges, "equal": equal, "tokens": lines}
    FILE.write_text(json.dumps(document, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
