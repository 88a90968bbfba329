"""End tokens of GGUF files: the ids that they state, and tokens that llama.cpp knows by name."""

from pathlib import Path
from typing import Any

import pytest

import outrider
from gguf_models import CASES, write_case
from outrider.models.gguf.vocabulary import end_ids


@pytest.mark.parametrize(
    ("tokens", "stated", "ends"),
    [
        (["<|endoftext|>", "a", "<|im_end|>"], {"eos": 0}, {0, 2}),
        (["<|endoftext|>", "a", "<|im_end|>"], {}, {0, 2}),
        (["a", "b", "c", "d"], {"eos": 0, "eot": 2, "eom": 3}, {0, 2, 3}),
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, {1, 2}),
        (["a", "b"], {"eos": 1, "eot": 7}, {1}),
        (["<|end|>", "<|endoftext|>", "a"], {"eos": 1}, {0, 1}),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, {1, 2}),  # Harmony: a channel's end
        (["<|end|>", "<|call|>", "<|flush|>"], {"eos": 2}, {1, 2}),
        (["</s>", "<turn|>", "<|tool_response>", "<eos>"], {"eos": 3}, {1, 2, 3}),
        (["a", "<fim_pad>", "<PAD>", "<|file_sep|>", "<|repo_name|>"], {"eos": 0}, {0, 1, 3, 4}),
        (["a", "<fim_pad>", "<PAD>"], {"eos": 0, "fim_pad": 2}, {0, 2}),
    ],
)
def test_ends(tokens: list[str], stated: dict[str, int], ends: set[int]) -> None:
    keys: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": value for key, value in stated.items()}
    found = end_ids({"tokenizer.ggml.tokens": tokens, **keys}, stated.get("eos"))
    assert set(found) == ends and len(found) == len(ends)
    if "eos" in stated:
        assert found[0] == stated["eos"]


def test_texts_end_at_each(tmp_path: Path) -> None:
    """With eos = 2 and eot = 5, a text ends at both; in float32 with blocks, and in bfloat16 without."""
    file = write_case(tmp_path / "tiny.gguf", CASES["llama"], keys={"tokenizer.ggml.eot_token_id": 5})
    for options in ({}, {"dtype": "bfloat16"}):
        decoder = outrider.load(file, **options)
        assert decoder.eos_ids == {2, 5}
        for end in (2, 5):
            (output,) = decoder.generate([[7, 8]], logit_bias={end: 100.0}, max_new_tokens=4)
            assert (output.finish_reason, output.token_ids) == ("eos", (end,))
            (output,) = decoder.generate([[7, 8]], logit_bias={end: 100.0}, max_new_tokens=4, ignore_eos=True)
            assert (output.finish_reason, len(output.token_ids)) == ("length", 4)
