"""Tokenizers of folders, as their own files state them.

Of a ``tokenizer.json`` many classes of Transformers take the vocabulary, and build anew what cuts a text into words and
joins tokens to a text: as the class does it, whatever the file says. So the parts of the file are used.

What ``tokenizer_config.json`` states stands beside the file: switches that change a part of it (``_SWITCHES``), added
tokens, and whether texts begin with BOS. Chat template and roles of tokens are of no concern here. Tokenizers without a
``tokenizer.json`` are what their class makes of them: there is nothing to compare.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
_FILE = "tokenizer.json"
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_MODEL = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    "ignore_merges",
)
# Keys of tokenizer_config.json, the part that they change, and its own key.
_SWITCHES = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}


def as_stated(tokenizer: Any, location: str) -> Any:
    """The tokenizer of a folder or hub id, which now has the parts that its file states."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    file = cached_file(location, _FILE, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if backend is None or file is None:
        return tokenizer
    config = get_tokenizer_config(location, local_files_only=True)
    parts = _parts(Path(file).read_text(encoding="utf-8"), config)
    if not config.get("fix_mistral_regex"):  # a mended splitter of Mistral's is stated, too
        _take(backend, parts, location)
    template = parts.post_processor
    if template is not None and not config.keys() & {"add_bos_token", "add_eos_token"}:
        if template.process(backend.encode("a", add_special_tokens=False)).ids != backend.encode("a").ids:
            _LOG.warning("%s: texts begin and end as in %s", location, _FILE)
            backend.post_processor = template
    return tokenizer


def _take(backend: Tokenizer, parts: Tokenizer, location: str) -> None:
    """Give a tokenizer the parts that cut a text and join tokens, if it has others."""
    from tokenizers.models import BPE

    others = [part for part in _PARTS if _state(getattr(backend, part)) != _state(getattr(parts, part))]
    for part in others:
        setattr(backend, part, getattr(parts, part))
    if isinstance(backend.model, BPE):
        for key in _MODEL:
            stated = getattr(parts.model, key)
            if (getattr(backend.model, key) or None) != (stated or None):  # no suffix is written in two ways
                setattr(backend.model, key, stated)
                others.append(key)
    if others:
        _LOG.info("%s: %s of the tokenizer as in %s", location, ", ".join(others), _FILE)
        backend.add_tokens([*backend.get_added_tokens_decoder().values()])  # to be found in text normalized anew


def _state(part: Any) -> bytes | None:
    return None if part is None else part.__getstate__()


def _parts(text: str, config: Mapping[str, Any]) -> Tokenizer:
    """The parts that a tokenizer.json states, without its vocabulary, which is most of it and comes last."""
    from tokenizers import Tokenizer

    last = max(text.find(f'"{part}"') for part in (*_PARTS, "post_processor"))
    try:
        document = json.loads(text[: text.find('"vocab"', last)] + '"vocab": {}}}')
    except ValueError:  # in another order
        document = json.loads(text)
    model = document["model"] if document["model"].get("type") == "BPE" else {"type": "BPE"}
    document |= {"added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    for key, (part, name) in _SWITCHES.items():
        stated = document.get(part) or {}
        if config.get(key) is not None and name in stated:
            document[part] = {**stated, name: config[key]}
    return Tokenizer.from_str(json.dumps(document))
