"""Golden logits of tests/support/gguf_models.py: llama.cpp's, of the same files (llama-cpp-python 0.3.36).

    pip install llama-cpp-python==0.3.36 && python tests/golden/make_gguf_logits.py

Keys and values are float32, without flash attention; weights, too, but for the last file, where llama.cpp rounds rows
to 8 bits (16 for matrices of such numbers).
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf_models import CASES, IDS, IN_MANY_FORMS, PLACES, many_forms, write_case, write_in_blocks

_FILE = Path(__file__).with_name("gguf_logits.json")


def logits_of(file: Path) -> list[list[float]]:
    """Logits after ``PLACES`` of ``IDS``, rounded to 5 digits."""
    scores = all_logits(file, IDS)
    return [[float(f"{number:.5g}") for number in scores[place]] for place in PLACES]


def all_logits(file: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after each token. [T, V]"""
    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(ids),
        n_batch=len(ids),
        n_ubatch=len(ids),
        logits_all=True,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if case.has_oracle:
                found[name] = logits_of(write_case(Path(folder) / "case.gguf", case))
        found[IN_MANY_FORMS] = logits_of(write_in_blocks(Path(folder) / "many.gguf", "llama", many_forms))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    _FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
