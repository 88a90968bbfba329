"""Tokenizers of folders, as their own files state them.

Of a ``tokenizer.json`` many classes of Transformers take the vocabulary, and build anew what cuts a text into words and
joins tokens to a text: as the class does it, whatever the file says. So each tokenizer is probed: a page of hard text
goes through it and through the file. Where they differ, the parts of the file are used.

What ``tokenizer_config.json`` states stands beside the file: switches that change a part of it (``_SWITCHES``), added
tokens, and whether texts begin with BOS. Chat template and roles of tokens are of no concern here. Tokenizers without a
``tokenizer.json`` are what their class makes of them: there is nothing to compare.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
_FILE = "tokenizer.json"
_PAGE = (
    "Steps:\n\n1. Mix 250 g\n2. Wait 12345 s\r\n\r\n  - then 1234567 more   \n\t\tdone...  at  ALL\n",
    " Hello  world, it's IT'S we'll they'RE don'T 'em 'sat\n  2023 a  1 b   22  c    333\n4444",
    "def f(x, *args):\n    if x_1 >= 0x1F:  # why?\n\t\treturn {'a/b': [x ** 2, \"no\"]}\n\n\n    return ~x ^ `$y`\n",
    "helloWorld HELLOworld XMLHttpRequest ÀÉcole straßeÜber ΑΒΓαβγ ЁЖёж e\u0301 n\u0303o u\u0308\u0304x ﬁ Å ①",
    "हिन्दी में नमस्ते ไทย עִבְרִית العربية ١٢٣ 日本語のテキスト、ｶﾅ。中文字符！“引号”…… 한국어 北京2008年",
    "😀 👩\u200d👩\u200d👧 🇫🇷 ½ ²³ １２ €5 1,000.50 ∑ a\u00a0b\u3000c\u2028d\u200be\ufefff (((x))) [[y]] __z__ ----",
    "   ",
    "\n",
)
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
    from tokenizers import Tokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    file = cached_file(location, _FILE, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if backend is None or file is None:
        return tokenizer
    config = get_tokenizer_config(location, local_files_only=True)
    parts = _parts(Path(file).read_text(encoding="utf-8"), config)
    # A mended splitter of Mistral's is stated, too.
    if not config.get("fix_mistral_regex") and not _is_alike(backend, parts):
        stated = Tokenizer.from_file(file)
        stated.no_truncation()
        stated.no_padding()
        for part in _PARTS:
            setattr(stated, part, getattr(parts, part))
        text = next((text for text in _page(backend, stated) if _differs(tokenizer, stated, text)), None)
        if text is not None:
            kind = type(tokenizer).__name__
            _LOG.warning("%s: text is split as in %s, not as by Transformers' %s: %.18r", location, _FILE, kind, text)
            for part in ("model", *_PARTS):
                setattr(backend, part, getattr(stated, part))
            backend.add_tokens([*backend.get_added_tokens_decoder().values()])  # to be found in text normalized anew
    template = parts.post_processor
    if template is not None and not config.keys() & {"add_bos_token", "add_eos_token"}:
        if template.process(backend.encode("a", add_special_tokens=False)).ids != backend.encode("a").ids:
            _LOG.warning("%s: texts begin and end as in %s", location, _FILE)
            backend.post_processor = template
    return tokenizer


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


def _is_alike(backend: Tokenizer, parts: Tokenizer) -> bool:
    """Whether a tokenizer cuts and joins the page as these parts do. Their vocabulary is not needed, which takes its
    time to read."""

    def options(model: Any) -> list[Any]:
        return [getattr(model, key, None) or None for key in _MODEL]  # no suffix is written in two ways

    def cut(one: Tokenizer, text: str) -> tuple[list[str], str]:
        normal = text if one.normalizer is None else one.normalizer.normalize_str(text)
        found = [(normal, (0, 0))] if one.pre_tokenizer is None else one.pre_tokenizer.pre_tokenize_str(normal)
        words = [word for word, _ in found]
        return words, "" if one.decoder is None else one.decoder.decode(words)

    def spaces(one: Tokenizer) -> list[str]:
        """Which texts between added tokens get a space."""
        return re.findall(r'"prepend_scheme":"(\w+)"', f"{one.pre_tokenizer and one.pre_tokenizer.__getstate__()!r}")

    return (
        options(backend.model) == options(parts.model)
        and spaces(backend) == spaces(parts)
        and all(cut(backend, text) == cut(parts, text) for text in _PAGE)
    )


def _page(backend: Tokenizer, stated: Tokenizer) -> list[str]:
    """The page, and text around a token that both find whole alike."""
    ours, theirs = ({repr(token) for token in one.get_added_tokens_decoder().values()} for one in (backend, stated))
    added = stated.get_added_tokens_decoder().values()
    shared = next((token.content for token in added if repr(token) in ours & theirs), None)
    return [*_PAGE, *([] if shared is None else [f"a{shared}b {shared} c{shared}\n  d {shared}"])]


def _differs(tokenizer: Any, stated: Tokenizer, text: str) -> bool:
    """Whether a text becomes other tokens, or these another text."""
    want = stated.encode(text, add_special_tokens=False).ids
    try:
        found: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except Exception:  # a class may want tokens that the file lacks
        return True
    decoded = tokenizer.backend_tokenizer.decode(found, skip_special_tokens=False)
    return found != want or decoded != stated.decode(want, skip_special_tokens=False)
