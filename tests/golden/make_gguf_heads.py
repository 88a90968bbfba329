"""Golden drafts of tests/support/gguf_heads.py by llama.cpp (pip install llama-cpp-python==0.3.36). The calls are those
of its common/speculative.cpp; some are no part of its C interface, and have the names of C++. All is float32, without
flash attention."""

import json
import sys
import tempfile
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as lib

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf_heads import ASSISTANT, HEADS, IDS, MTP, NUM_STEPS, PREFIX, write_assistant_pair, write_mtp_case, write_pair

_FILE = Path(__file__).with_name("gguf_heads.json")
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)
_LIB: Any = lib._lib
_ENCODE, _DECODE = 0, 1


class _Embedding(Structure):
    _fields_ = (("data", POINTER(c_float)), ("n_rows", c_size_t), ("n_embd", c_size_t))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(_LIB, name)
    found.restype, found.argtypes = result, arguments
    return found


_new_batch = _function("llama_batch_ext_init", c_void_p, c_void_p)
_free_batch = _function("llama_batch_ext_free", None, c_void_p)
_add_token = _function("llama_batch_ext_add_token", c_int32, c_void_p, c_int32, c_int32)
_add_numbers = _function("llama_batch_ext_add_embd", c_int32, c_void_p, c_int32, _Embedding)
_set_numbers = _function("llama_batch_ext_set_embd_token", c_bool, c_void_p, c_int32, _Embedding)
_set_output = _function("llama_batch_ext_set_output_logits", c_bool, c_void_p, c_int32, c_bool)
_set_place = _function("llama_batch_ext_set_pos", c_bool, c_void_p, c_int32, POINTER(c_int32))
_process = _function("llama_process", c_int32, c_void_p, c_int32, c_void_p)
_keep_states = _function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, c_void_p, c_bool, c_bool)
_states = _function("_Z26llama_get_embeddings_nextnP13llama_context", POINTER(c_float), c_void_p)
_state_at = _function("_Z30llama_get_embeddings_nextn_ithP13llama_contexti", POINTER(c_float), c_void_p, c_int32)
_keep_inputs = _function("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, c_void_p, c_uint32, c_bool)
_inputs = _function("_Z30llama_get_embeddings_layer_inpP13llama_contextj", POINTER(c_float), c_void_p, c_uint32)
_set_causal = _function("llama_set_causal_attn", None, c_void_p, c_bool)
_text = _function("llama_model_meta_val_str", c_int32, c_void_p, c_char_p, c_char_p, c_size_t)


def _numbers(pointer: Any, *shape: int) -> Any:
    return np.ctypeslib.as_array(pointer, shape).copy()


class _Context:
    def __init__(self, file: Path, other: Any = None, *, is_mtp: bool = False) -> None:
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.flash_attn_type = 128, 128, 128, 0
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.swa_full = True
        options.n_threads = options.n_threads_batch = 1
        options.ctx_type = int(is_mtp)
        if other is not None and not is_mtp:
            options.ctx_other = other.context
        loading = lib.llama_model_default_params()
        loading.load_mtp = True
        self.model = other.model if is_mtp else lib.llama_model_load_from_file(str(file).encode(), loading)
        self.context = lib.llama_init_from_model(self.model, options)
        assert self.context
        self.size = lib.llama_model_n_embd(self.model)
        self.num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def run(self, rows: list[tuple[int | None, Any, int]], *, is_encoder: bool = False) -> None:
        """Feed rows: a token or None, numbers or None, and a place."""
        batch = _new_batch(self.context)
        for token, numbers, place in rows:
            if numbers is not None:
                numbers = np.ascontiguousarray(numbers, np.float32)
                row = _Embedding(numbers.ctypes.data_as(POINTER(c_float)), 1, len(numbers))
            if token is None:
                at = _add_numbers(batch, 0, row)
            else:
                at = _add_token(batch, 0, token)
                assert numbers is None or _set_numbers(batch, at, row)
            assert at >= 0
            _set_place(batch, at, byref(c_int32(place)))
            _set_output(batch, at, True)
        assert _process(self.context, _ENCODE if is_encoder else _DECODE, batch) == 0
        _free_batch(batch)

    def logits(self, i: int) -> list[float]:
        row = lib.llama_get_logits_ith(self.context, i)
        return _numbers(row, self.num_tokens).tolist()


def _features(target: _Context, layers: list[int]) -> Any:
    """Inputs of layers for all but the last of the tokens that come before the drafts. [T, F]"""
    for i in layers:
        _keep_inputs(target.context, i, True)
    target.run([(token, None, place) for place, token in enumerate(IDS[: PREFIX - 1])])
    return np.concatenate([_numbers(_inputs(target.context, i), PREFIX - 1, target.size) for i in layers], axis=1)


def eagle3_logits(target: _Context, head: _Context, layers: list[int]) -> list[list[float]]:
    features = _features(target, layers)
    _keep_states(head.context, True, True)
    head.run([(None, row, place) for place, row in enumerate(features)], is_encoder=True)
    states = _numbers(_states(head.context), PREFIX - 1, head.size)
    head.run([(IDS[place + 1], state, place) for place, state in enumerate(states)])
    found, last = [head.logits(PREFIX - 2)], _numbers(_state_at(head.context, PREFIX - 2), head.size)
    for step in range(1, NUM_STEPS):
        head.run([(IDS[PREFIX - 1 + step], last, PREFIX - 2 + step)])
        found.append(head.logits(0))
        last = _numbers(_state_at(head.context, 0), head.size)
    return found


def mtp_logits(file: Path) -> list[list[float]]:
    """Logits of drafts along ``IDS``. llama.cpp's driver puts another entry before, of no state."""
    target = _Context(file)
    head = _Context(file, target, is_mtp=True)
    for one in (target, head):
        _keep_states(one.context, True, False)
    target.run([(token, None, place) for place, token in enumerate(IDS[: PREFIX - 1])])
    states = _numbers(_states(target.context), PREFIX - 1, target.size)  # after the last norm
    head.run([(IDS[place + 1], state, place + 1) for place, state in enumerate(states)])
    found, last = [head.logits(PREFIX - 2)], _numbers(_state_at(head.context, PREFIX - 2), head.size)
    for step in range(1, NUM_STEPS):
        head.run([(IDS[PREFIX - 1 + step], last, PREFIX - 1 + step)])
        found.append(head.logits(0))
        last = _numbers(_state_at(head.context, 0), head.size)
    return found


def block_logits(target: _Context, head: _Context, layers: list[int], top_k: int, *, is_causal: bool) -> list[Any]:
    """Logits of all slots; of DFlash 2 the candidates of each slot and their scores, by the candidate before."""
    features = _features(target, layers)
    _keep_states(head.context, True, top_k == 0)
    _set_causal(head.context, is_causal)
    head.run([(None, row, place) for place, row in enumerate(features)])
    text = b"0" * 16
    _text(head.model, b"dflash.block_size", text, 16)
    size, mask_id = int(text.split(b"\0")[0]), lib.llama_vocab_mask(lib.llama_model_get_vocab(head.model))
    tokens = [IDS[PREFIX - 1], *[mask_id] * (size - 1)]
    head.run([(token, None, PREFIX - 1 + i) for i, token in enumerate(tokens)])
    if top_k == 0:
        return [head.logits(i) for i in range(size)]
    return _numbers(_states(head.context), size, head.size)[:, : top_k * (top_k + 1)].tolist()


def assistant_logits(target: _Context, head: _Context) -> list[list[float]]:
    """Logits of drafts along ``IDS``. All are at one place."""
    for one in (target, head):
        _keep_states(one.context, True, False)
    target.run([(token, None, place) for place, token in enumerate(IDS[: PREFIX - 1])])
    state = _numbers(_states(target.context), PREFIX - 1, target.size)[-1]  # after the last norm
    found = []
    for step in range(NUM_STEPS):
        head.run([(IDS[PREFIX - 1 + step], state, PREFIX - 1)])
        found.append(head.logits(0))
        state = _numbers(_state_at(head.context, 0), target.size)
    return found


def drafts_of(name: str, folder: Path) -> list[Any]:
    if name in MTP:
        return _rounded(mtp_logits(write_mtp_case(name, folder)))
    if name == ASSISTANT:
        target_file, head_file = write_assistant_pair(folder)
        target = _Context(target_file)
        return _rounded(assistant_logits(target, _Context(head_file, target)))
    target_file, head_file, stated = write_pair(name, folder)
    target = _Context(target_file)
    head = _Context(head_file, target)
    layers = stated["target_layers"]
    if "block_size" in stated:
        is_causal, top_k = bool(stated.get("attention.causal")), stated.get("selector_top_k") or 0
        found = block_logits(target, head, layers, top_k, is_causal=is_causal)
    else:
        found = eagle3_logits(target, head, layers)
    return _rounded(found)


def _rounded(found: list[Any]) -> list[Any]:
    return [[float(f"{max(number, -1e9):.5g}") for number in row] for row in found]


def main() -> None:
    llama_cpp.llama_log_set(_SILENT, c_void_p(0))
    found = {}
    for name in (*HEADS, *MTP, ASSISTANT):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = drafts_of(name, Path(folder))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    _FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
