"""Golden tokens, ends and log-probabilities of the published files: llama.cpp's (llama-cpp-python 0.3.36).

    python benchmarks/real_models.py; pip install llama-cpp-python==0.3.36
    PYTHONPATH=tests:tests/support python tests/golden/make_real.py

Keys and values are float32, without flash attention; activations are rounded to 8 bits, as llama.cpp always does.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from golden.vocabularies import PAGE
from real_files import FILES, PROMPTS

_SILENT = llama_cpp.llama_log_callback(lambda *_: None)
_NUM_TOP = 20


def stated_by_llama(file: Path) -> dict[str, Any]:
    """Tokens of the page and of the prompts, end tokens, and the most probable next tokens after each prompt."""
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    how: dict[str, Any] = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    how |= {"n_threads": 1, "n_threads_batch": 1}  # threads wait in a loop, for minutes beside other programs
    llama = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, **how)
    page, prompts = ([llama.tokenize(text.encode(), special=True) for text in texts] for texts in (PAGE, PROMPTS))
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    ends = [i for i in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)]
    top = []
    for ids in prompts:
        llama.reset()
        llama.eval(ids)
        log_probs = llama.logits_to_logprobs(llama.scores[len(ids) - 1].astype(np.float64))
        best = np.argsort(-log_probs)[:_NUM_TOP]
        top.append({str(i): round(float(log_probs[i]), 4) for i in best})
    return {"page": page, "prompts": prompts, "ends": ends, "top": top}


def main() -> None:
    text = json.dumps({name: stated_by_llama(file) for name, file in FILES.items()})
    text = text.replace("[[", "[\n[").replace("], [", "],\n[").replace("{", "\n{")  # lines that can be compared
    Path(__file__).with_name("real.json").write_text(text.strip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
