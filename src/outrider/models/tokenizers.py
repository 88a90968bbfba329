"""Tokenizers of folders and of models on the hub, by ``tokenizer.json`` and the files beside it.

``tokenizer.json`` tells how a text becomes tokens, and how it begins and ends. ``tokenizer_config.json`` has the roles
of tokens, further tokens, a few switches and the chat template. Transformers is asked for what these do not tell: roles
that most classes have, and vocabularies in other files. Many of its classes take the vocabulary alone from
``tokenizer.json``, and build anew what cuts a text into words and joins tokens to a text; here the file counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.registry import hub_file
from outrider.text.fast_tokenizer import ROLES, FastTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_FILE, _TEMPLATES = "tokenizer.json", "additional_chat_templates"
_FORMER = ("special_tokens_map.json", "added_tokens.json")  # of former releases
_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_BARE = ("PreTrainedTokenizer", "TokenizersBackend")  # classes that have what the files state, and no switches
_PLAIN = ("LlamaTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer")
# Classes of many models, and roles that they have beside ``_STATED``: other classes are asked.
_FURTHER: dict[str, dict[str, str]] = {"GemmaTokenizer": {"mask_token": "<mask>"}, **dict.fromkeys(_PLAIN, {})}
_STATED = {"bos_token", "eos_token", "unk_token", "pad_token"}  # roles of all classes of causal models
_OTHERS = ("auto_map", "fix_mistral_regex", "fast_tokenizer_files")  # keys that Transformers alone understands
# Keys of tokenizer_config.json, the part that they change in most classes, and its own key.
_SWITCHES = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}
_LOG = logging.getLogger(__name__)


def folder_tokenizer(path: Path | None, hub: str | None) -> Any:
    """Tokenizer of a folder, or of a model on the hub: as its files state it, or one of Transformers where there is no
    ``tokenizer.json``. May raise anything for damaged files."""
    location = str(path or hub)
    folder = path or _fetched(location)
    if folder is None or not (folder / _FILE).is_file():
        return _by_class(location)
    stated = _stated(folder)
    is_former = "added_tokens_decoder" not in stated and any((folder / name).is_file() for name in _FORMER)
    # Other classes have tokens for roles that the files do not state.
    kind = str(stated.get("tokenizer_class")).removesuffix("Fast")
    is_bare = kind in _BARE or kind in _FURTHER and stated.keys() >= _STATED
    if is_bare and not is_former and not any(map(stated.get, _OTHERS)):
        return _built(folder / _FILE, {**_FURTHER.get(kind, {}), **stated}, kind)
    by_class = _by_class(location)
    if not by_class.is_fast or any(map(stated.get, _OTHERS[1:])):
        return by_class
    _LOG.info("%s: its tokenizer has the roles of the class %s", location, type(by_class).__name__)
    added = {str(i): token.__getstate__() for i, token in by_class.added_tokens_decoder.items()}
    roles = {**dict.fromkeys(ROLES), **by_class.special_tokens_map}
    more = {"added_tokens_decoder": added, **stated, **roles, "extra_special_tokens": by_class.extra_special_tokens}
    return _built(folder / _FILE, more, type(by_class).__name__)


def _by_class(location: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(location, trust_remote_code=False)


def restate(theirs: Any, ours: Any) -> None:
    """Give a tokenizer of Transformers, that of a processor, the parts of one that was read here."""
    if not isinstance(ours, FastTokenizer) or not getattr(theirs, "is_fast", False):
        return
    backend: Tokenizer = theirs.backend_tokenizer
    for part in _PARTS:
        setattr(backend, part, getattr(ours.backend_tokenizer, part))
    backend.add_tokens([*backend.get_added_tokens_decoder().values()])  # to be found in text normalized anew


def _fetched(hub: str) -> Path | None:
    """Folder of a model's files in the cache of the hub, fetched if they are not there; None if the model has no
    ``tokenizer.json``. Raises OSError, ModelNotFound."""
    from huggingface_hub import HfApi

    if (file := hub_file(hub, _FILE)) is None:
        return None
    folder, commit = file.parent, file.parent.name
    hub_file(hub, "tokenizer_config.json", commit)
    names = ["chat_template.jinja", *(() if "added_tokens_decoder" in _stated(folder) else _FORMER)]
    with contextlib.suppress(Exception):  # none are there; or there is no network, and those in the cache count
        names += [entry.path for entry in HfApi().list_repo_tree(hub, _TEMPLATES, revision=commit)]
    for name in names:
        hub_file(hub, name, commit)
    return folder


def _stated(folder: Path) -> dict[str, Any]:
    """Entries of ``tokenizer_config.json``, and the templates that are files."""
    file = folder / "tokenizer_config.json"
    stated: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    template = folder / "chat_template.jinja"
    templates = {"default": template.read_text(encoding="utf-8")} if template.is_file() else {}
    for file in sorted((folder / _TEMPLATES).glob("*.jinja")):
        templates[file.name.removesuffix(".jinja")] = file.read_text(encoding="utf-8")
    if templates:
        stated["chat_template"] = templates["default"] if templates.keys() == {"default"} else templates
    return stated


def _built(file: Path, stated: Mapping[str, Any], kind: str) -> FastTokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    # Transformers loads files of LlamaTokenizer that have such a switch with a class that has none.
    for key, (part, name) in () if kind in (*_BARE, "LlamaTokenizer") else _SWITCHES.items():
        own = getattr(backend, part)
        if stated.get(key) is not None and own is not None and name in json.loads(own.__getstate__()):
            setattr(own, name, stated[key])
    if padding := backend.padding:
        stated = {"pad_token": padding["pad_token"], **stated}
        backend.no_padding()
    backend.encode_special_tokens = bool(stated.get("split_special_tokens"))
    extra: Any = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or ()
    roles = {**dict.fromkeys(ROLES), **{name: value for name, value in stated.items() if name.endswith("_token")}}
    roles |= stated.get("model_specific_special_tokens") or {}
    if isinstance(extra, Mapping):
        extra, roles = (), {**roles, **extra}
    roles = {name: value for name, value in roles.items() if isinstance(value, str | dict)}  # the others are switches
    # Add the tokens of tokenizer_config.json in the order of their ids, then special tokens that neither file has.
    named, added = {*map(_text, roles.values())}, stated.get("added_tokens_decoder", {})
    tokens = [_token(added[i], _text(added[i]) in named) for i in sorted(added, key=int)]
    found = {token.content for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    lacking = {text: value for value in (*roles.values(), *extra) if (text := _text(value)) not in found}
    backend.add_tokens([*tokens, *(_token(value, text in named) for text, value in lacking.items())])
    template = stated.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    texts = {name: _text(value) for name, value in roles.items()}
    return FastTokenizer(backend, texts, template, [*map(_text, extra)])


def _token(value: Any, has_role: bool) -> AddedToken:
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: flag for key, flag in value.items() if key not in ("__type", "id")}
    return AddedToken(**{**flags, "special": has_role or flags.get("special", False)})


def _text(value: Any) -> str:
    return str(value if isinstance(value, str) else value["content"])
