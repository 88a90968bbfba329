"""Tokens that end a text, as a GGUF file states them.

Besides the ids in its metadata, these are tokens that are known by name: converters write one end, and chat models have
several. Source: ``special_eog_ids`` in llama.cpp's src/llama-vocab.cpp, build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.models.gguf.vocabulary import END_NAMES

_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def end_ids(metadata: Mapping[str, Any], eos_id: int | None) -> list[int]:
    """Ids of a file's end tokens.

    Args:
        eos_id: of the tokenizer, which has a default where the file states none; it comes first.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = [eos_id, *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    for key, names in _FILL_IN.items():
        stated = metadata.get(f"tokenizer.ggml.{key}_token_id")
        found += [ids[name] for name in names if name in ids][:1] if stated is None else [stated]
    found += [ids[name] for name in sorted(END_NAMES & ids.keys())]
    ends = [i for i in dict.fromkeys(found) if i is not None and i < len(tokens)]
    named = {tokens[i] for i in ends}
    without = set()
    if named & {"<|call|>", "<|calls|>"} and named & {"<|return|>", "<|flush|>"}:
        without.add("<|end|>")  # of a channel
    if "<|tool_response>" in named:
        without.add("</s>")  # a tag of HTML
    return [i for i in ends if tokens[i] not in without]
