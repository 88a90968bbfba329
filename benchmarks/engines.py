"""The draft and the table for the certificates of other programs' servers.

    python benchmarks/engines.py draft SmolLM2-135M-Instruct.Q4_1.gguf coarse3.gguf [--bits 3]
    outrider certify-samples SmolLM2-135M-Instruct.Q4_1.gguf llama.jsonl --server http://127.0.0.1:8080 \
        --draft coarse3.gguf --num-texts 100 -n 32 --threads 1 --json llama.json
    python benchmarks/engines.py table llama.json ...

The draft is the target with weights rounded to 2^bits values in each block of 32, stored in Q8_0, so that any program
that reads GGUF has a draft with the target's tokens, far enough away that a mistake shows. The table has a row for each
document, named by its file; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draft = commands.add_parser("draft")
    draft.add_argument("file", type=Path)
    draft.add_argument("out", type=Path)
    draft.add_argument("--bits", type=int, default=3)
    commands.add_parser("table").add_argument("documents", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "draft":
        write_coarse(arguments.file, arguments.out, arguments.bits)
    else:
        _print_table({path.stem: json.loads(path.read_text()) for path in arguments.documents})


def write_coarse(file: Path, out: Path, bits: int) -> None:
    """Copy a GGUF file with coarser weights; the embedding, norms and biases stay as they are."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, weights)
            continue
        if tensor.name.startswith("blk."):
            weights = _rounded(weights, bits)
        stored = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(tensor.name, stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rounded(weights: np.ndarray, bits: int) -> np.ndarray:
    """The nearest of 2^bits values, evenly spaced between the least and the greatest of each 32 weights."""
    blocks = weights.reshape(-1, 32)
    least = blocks.min(axis=1, keepdims=True)
    step = (blocks.max(axis=1, keepdims=True) - least) / (2**bits - 1)
    step[step == 0] = 1
    return (np.round((blocks - least) / step) * step + least).reshape(weights.shape)


def _print_table(documents: dict[str, dict[str, Any]]) -> None:
    table = Table(box=None)
    for name in ("engine", "texts", "tokens", "detectable", "towards the draft", "least p", "control, p", "verdict"):
        table.add_column(name, justify="left" if name in ("engine", "verdict") else "right")
    for name, document in documents.items():
        found, (control, *_) = document["statistical"], document["controls"] or [None]
        table.add_row(
            name,
            str(found["num_texts"]),
            str(found["num_tokens"]),
            f"{found['detectable']:.1%}",
            f"{found['estimate']:+.1%} ± {found['estimate_std']:.1%}",
            f"{min(test['p'] for test in found['tests']):.1g}",
            "" if control is None else f"{control['p']:.0e}",
            document["verdict"],
        )
    Console(width=110).print(table)
    print(json.dumps({name: _short(document) for name, document in documents.items()}))


def _short(document: dict[str, Any]) -> dict[str, Any]:
    """The verdict, numbers and versions of a document."""
    long = ("pit_histogram", "pit_excess", "dependence", "places")
    found = {key: value for key, value in document["statistical"].items() if key not in long}
    kept = {key: document[key] for key in ("verdict", "controls", "num_left_out", "is_text", "provenance")}
    kept["provenance"] = {key: value for key, value in kept["provenance"].items() if key != "argv"}
    return {**kept, "statistical": found}


if __name__ == "__main__":
    main()
