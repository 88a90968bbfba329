"""Tokenizers of GGUF files, built from their metadata alone, and the tokens that end a text.

What a file states about tokens means here what it means in llama.cpp: the kind of vocabulary, its splitter
(splitters.py), types of tokens, defaults. Each key that begins with ``tokenizer.`` is read, or is known to change no
token, or refuses the file. This module reads no files; of models and of ends of turns it knows names alone.

A vocabulary of kind ``llama`` has scores and no merges: of all neighbours that make a token together, those of the
highest score are joined first, and of equal scores the first in the text. In ``tokenizers`` these are merges in the
order of scores, without ties. Of equal scores the longest token is first here, which gives the same tokens in runs of
one character (spaces, above all), where published vocabularies have ties.

Source: llama.cpp, src/llama-vocab.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.gguf.splitters import SPLITTERS, Splitter
from outrider.models.kinds import ids_of
from outrider.text.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.processors import PostProcessor

_LOG = logging.getLogger(__name__)
_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens; the others need no treatment

_READ = (  # the last one is Ollama's
    "model pre tokens token_type scores merges add_bos_token add_eos_token add_space_prefix bos_token_id eos_token_id "
    "unknown_token_id padding_token_id eos_token_ids "
)
# Keys that change no token of these kinds: ids of ends and of parts of code, and what llama.cpp reads for vocabularies
# of other kinds alone, or not at all.
_HARMLESS = (
    "eot_token_id eom_token_id seperator_token_id cls_token_id mask_token_id add_sep_token fim_pre_token_id "
    "fim_suf_token_id fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id "
    "suffix_token_id middle_token_id token_type_count remove_extra_whitespaces add_padding_token add_unknown_token "
    "add_mask_token"
)
_KNOWN = {_GGML + key for key in (_READ + _HARMLESS).split()}
_KNOWN |= {_TEMPLATE, "tokenizer.chat_templates", "tokenizer.huggingface.json"}
# Roles of tokens in Transformers, and their keys; ids where a file states none, by the kind of vocabulary.
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_DEFAULTS: dict[str, dict[str, int]] = {"gpt2": {"eos": 11}, "llama": {"eos": 2, "unknown": 0}, "gemma4": {}}
_WHOLE = Splitter((), is_raw=True, adds_bos=True, bos_id=1)  # of the kind llama, which splits nothing

END_NAMES = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<｜end▁of▁sentence｜>".split()
)
"""Tokens that end a text, and are control tokens, whatever type a file states."""
# Tokens of code that end a text, too, by their keys.
_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_END_KEYS = ("eot_token_id", "eom_token_id", "eos_token_ids", *(f"{key}_token_id" for key in _FILL_IN))
_CODE_NAMES = frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split()
).union(*_FILL_IN.values())  # control tokens likewise
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # in Phi 3, whose other special tokens take the space after them


def gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> FastTokenizer:
    """Build the tokenizer of a GGUF file from all its keys. Raises UnsupportedModel: the kind of vocabulary, its
    splitter, or a key is not known; or ModelCorrupt: the vocabulary contradicts itself."""
    vocabulary = _vocabulary(metadata, name)
    roles = {role: text for role, key in _ROLES.items() if (text := vocabulary.text_of(key)) is not None}
    templates = {key.removeprefix(_TEMPLATE): text for key, text in metadata.items() if key.startswith(_TEMPLATE)}
    named = {key[1:]: text for key, text in templates.items() if key.startswith(".")}
    default = {"default": templates[""]} if "" in templates else {}
    return FastTokenizer(vocabulary.backend(), roles, default | named if named else templates.get(""))


def _vocabulary(metadata: Mapping[str, Any], name: str) -> _Vocabulary:
    stated = {key.removeprefix(_GGML): value for key, value in metadata.items() if key.startswith(_GGML)}
    splitter, texts = _splitter(stated, name), stated.get("tokens", ())
    for key, value in metadata.items():
        if key.startswith("tokenizer.") and key not in _KNOWN and not key.startswith(f"{_TEMPLATE}."):
            raise UnsupportedModel(f"{name} states {key} = {value!r:.60}, which is not known: its tokens may differ")
        if key.startswith(f"{_GGML}add_") and not isinstance(value, bool):
            raise ModelCorrupt(f"{name} states {key} = {value!r:.60}, neither true nor false: the file is damaged")
    if missing := {"tokens", "scores" if stated["model"] == "llama" else "merges"} - stated.keys():
        raise ModelCorrupt(f"{name} states no {_GGML}{min(missing)}, so that its text cannot be tokenized")
    if not all(texts):
        texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) < len(texts):
        raise ModelCorrupt(f"{name} has {len(texts)} tokens, of which only {len(ids)} differ")
    is_phi3 = re.search("phi-?3", str(metadata.get("general.name")).lower()) is not None
    return _Vocabulary(name, stated, splitter, texts, ids, is_phi3)


def _splitter(stated: Mapping[str, Any], name: str) -> Splitter:
    kind, pre = stated.get("model"), stated.get("pre", "")
    if kind not in _DEFAULTS:
        raise UnsupportedModel(f"{name} has a vocabulary of kind {kind!r}: {', '.join(_DEFAULTS)} are supported")
    if kind == "llama":
        return _WHOLE
    if kind == "gemma4":
        return SPLITTERS["gemma4"]
    if not pre:
        _LOG.warning("%s names no splitter of its text (%spre): 'default' is used, as in llama.cpp", name, _GGML)
    if (pre or "default") not in SPLITTERS:
        raise UnsupportedModel(f"{name} splits text by the rule {pre!r} ({_GGML}pre), which is not known")
    return SPLITTERS[pre or "default"]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    name: str  # of the model, for messages
    stated: Mapping[str, Any]  # by keys without their common beginning
    splitter: Splitter
    texts: list[str]  # by ids
    ids: dict[str, int]  # by texts
    is_phi3: bool

    def text_of(self, role: str) -> str | None:
        """The token of a role; None if there is none."""
        index, num = self.stated.get(f"{role}_token_id"), len(self.texts)
        if index is not None and not 0 <= index < num:
            _LOG.warning("%s: %s_token_id = %d is no token: it is left out", self.name, role, index)
            index = None
        if index is None:
            index = {"bos": self.splitter.bos_id, **_DEFAULTS[self.stated["model"]]}.get(role)
            types = self.stated.get("token_type", [_CONTROL] * num)
            # llama.cpp takes the default as it is, and ends texts with a comma if that has the id.
            if index is None or index >= num or types[index] not in (_UNKNOWN, _CONTROL):
                return None
        return self.texts[index]

    def _additions(self) -> PostProcessor | None:
        """Writes BOS before a text and EOS after it; None if neither."""
        from tokenizers.processors import TemplateProcessing

        adds_bos = self.stated.get("add_bos_token", self.splitter.adds_bos) or self.splitter.always_adds_bos
        adds_eos = self.stated.get("add_eos_token", False)
        added = {role: self.text_of(role) for role, adds in (("bos", adds_bos), ("eos", adds_eos)) if adds}
        for role, text in added.items():
            if text is None:
                raise ModelCorrupt(f"{self.name} adds {role.upper()} to texts, but states no {_GGML}{role}_token_id")
        tokens = [(text, self.ids[text]) for text in dict.fromkeys(added.values()) if text is not None]
        written = [text for text in (added.get("bos"), "$A", added.get("eos")) if text is not None]
        return TemplateProcessing(single=written, special_tokens=tokens) if tokens else None

    def backend(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        added = self._added_tokens()
        is_by_score = self.stated["model"] == "llama"
        if is_by_score:
            merges = self._merges_by_score(added)
        else:  # of equal ones the first counts; a token may begin with a space
            stated = dict.fromkeys(self.stated["merges"])
            merges = [(one[:i], one[i + 1 :]) for one in stated if (i := one.find(" ", 1)) > 0]
        is_raw, ignores_merges = self.splitter.is_raw, self.splitter.ignores_merges
        backend = Tokenizer(BPE(self.ids, merges, byte_fallback=is_raw, ignore_merges=ignores_merges))
        steps: list[Any] = [pre_tokenizers.Split(Regex(step), "isolated") for step in self.splitter.steps]
        if is_raw:
            has_prefix = is_by_score and self.stated.get("add_space_prefix", True)
            # Before each text between special tokens, even if a space is there.
            prefix = [normalizers.Prepend("▁")] if has_prefix else []
            backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
            strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
            joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*joined, *strip])
        else:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            # A byte without a token is dropped, but its neighbours are not joined.
            if missing := {*pre_tokenizers.ByteLevel.alphabet()} - self.ids.keys():
                steps.append(pre_tokenizers.Split(Regex(f"[{''.join(map(re.escape, sorted(missing)))}]"), "removed"))
            backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.add_tokens([token for token in added if not token.special])
        backend.add_special_tokens([token for token in added if token.special])
        backend.post_processor = self._additions()
        return backend

    def _added_tokens(self) -> list[AddedToken]:
        """Tokens that are found whole in a text, before it is split; special ones are those that are no text."""
        from tokenizers import AddedToken

        by_name = (END_NAMES | _CODE_NAMES) & self.ids.keys()
        if "<|tool_response>" in by_name:  # Gemma 4, whose "</s>" is a tag of HTML
            by_name -= {"</s>"}
        types = self.stated.get("token_type", [])
        found = {self.texts[i]: kind for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
        found |= dict.fromkeys(sorted(by_name), _CONTROL)
        keep_space = _KEEP_SPACE if self.is_phi3 else found
        return [
            AddedToken(text, normalized=False, special=kind != _USER_DEFINED, rstrip=text not in keep_space)
            for text, kind in found.items()
        ]

    def _merges_by_score(self, added: Iterable[AddedToken]) -> list[tuple[str, str]]:
        """Pairs of tokens that make a token together, in the order in which they are joined."""
        # A token that is found whole is in no text that is merged, but for spaces, which are written after the search.
        whole = {token.content for token in added if "▁" not in token.content}
        ids, scores = self.ids, self.stated["scores"]
        made = [text for text in self.texts if len(text) > 1 and text not in whole]
        made.sort(key=lambda text: (-scores[ids[text]], -len(text)))
        return [
            (left, right)
            for text in made
            for i in range(len(text) - 1, 0, -1)
            if (left := text[:i]) in ids and (right := text[i:]) in ids
        ]


def end_ids(metadata: Mapping[str, Any], eos_id: int | None, name: str) -> list[int]:
    """Ids of a file's end tokens: first that of the tokenizer, which has a default where the file states none. Besides
    the ids in its metadata, these are tokens that are known by name: converters write one end, and chat models have
    several (``special_eog_ids`` in llama.cpp). Raises ModelCorrupt: a value is something else."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    known = END_NAMES.union(*_FILL_IN.values())
    ids = {token: i for i, token in enumerate(tokens) if token in known}
    stated = {key: ids_of(name, metadata.get(_GGML + key), _GGML + key) for key in _END_KEYS}
    found = ids_of(name, eos_id) + stated["eot_token_id"] + stated["eom_token_id"] + stated["eos_token_ids"]
    for key, names in _FILL_IN.items():
        found += stated[f"{key}_token_id"] or [ids[one] for one in names if one in ids][:1]
    found += [ids[one] for one in sorted(END_NAMES & ids.keys())]
    ends = [i for i in dict.fromkeys(found) if 0 <= i < len(tokens)]
    named = {tokens[i] for i in ends}
    # No ends are that of a channel, and a tag of HTML:
    is_channel = named & {"<|call|>", "<|calls|>"} and named & {"<|return|>", "<|flush|>"}
    without = ("<|end|>" if is_channel else None, "</s>" if "<|tool_response>" in named else None)
    return [i for i in ends if tokens[i] not in without]
