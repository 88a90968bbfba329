"""Splitters of byte-level vocabularies: how a text is cut into words, within which letters are merged to tokens.

A GGUF file names its splitter (``tokenizer.ggml.pre``); the expressions, and what else depends on the name, are
llama.cpp's. Where llama.cpp splits otherwise than the authors of a model (its classes know no upper case beyond ASCII,
for instance), its words are meant, for those are what the name stands for. It knows neither tokens nor files.

Names of architectures that are not read are missing, and ``whitespace`` and ``jina-v2-*``, of models of embeddings,
whose tokens also depend on other things.

Source: llama.cpp, src/llama-vocab.cpp (expressions; names, and what they set) and src/unicode.cpp (matchers of its own
in place of some expressions), as in llama-cpp-python 0.3.36. The expressions here are Oniguruma's, for ``tokenizers``.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_ENDS = r"\s*[\r\n]+|" + _SPACES
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_MARKED = _LEAD + r"[\p{L}\p{M}]+"
_REST = rf"|{_SIGNS}[\r\n]*|{_ENDS}"
_PATHS = rf"|{_SIGNS}[\r\n/]*|{_ENDS}"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_REST}"
_QWEN35 = rf"{_CONTRACTION}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+{_REST}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}"


def _cased(letters: str, end: str) -> str:
    """Words that change from upper to lower case at most once."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return f"{_LEAD}{upper}*{lower}+{end}|{_LEAD}{upper}+{lower}*{end}|"


_TEKKEN = _cased(r"\p{L}", "") + r"\p{N}" + _PATHS
_GPT4O = _cased(r"\p{L}", _CONTRACTION + "?") + r"\p{N}{1,3}" + _PATHS

_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = rf"{_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}"
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# llama.cpp has replaced white space beyond ASCII when it looks for ranges, so none of it is in them.
_CJK_OF_DEEPSEEK = r"[[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]&&\S]+"
_LETTERS_OF_DEEPSEEK = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    r"ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_SIGNS_OF_DEEPSEEK = r"\s?[!-/:-~！-／：-～‘-‟、-。]+"
_CLAUSES = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Splitter(NamedTuple):
    """Rule of words, and what depends on its name besides."""

    # Expressions, each applied to the pieces that those before it left: a match is a piece of its own, and so is the
    # text between two:
    steps: tuple[str, ...]
    is_raw: bool = False  # words are text, with "▁" for spaces; else each byte of them is written as a letter
    ignores_merges: bool = False  # a word that is a token is that token, whatever the merges
    adds_bos: bool = False  # a text begins with BOS if the file does not say
    always_adds_bos: bool = False  # it does, whatever the file says: a converter of Gemma 4 was wrong there
    bos_id: int | None = 11  # BOS of a file that states none


# The first name of a rule is the one that an export writes.
_NAMES = {
    "gpt-2 exaone4 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum modern-bert jina-es jina-de "
    "jina-v1-en roberta-bpe": Splitter((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splitter((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splitter(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "smaug-bpe dbrx": Splitter((_LLAMA3,)),
    "chatglm-bpe": Splitter((_LLAMA3,), bos_id=None),
    "glm4 glm5": Splitter((_LLAMA3,), ignores_merges=True, bos_id=None),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Splitter((_QWEN2,)),
    "qwen35": Splitter((_QWEN35,)),
    "default": Splitter((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    "falcon": Splitter((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "deepseek-llm": Splitter(
        (r"[\r\n]", _LETTERS_OF_DEEPSEEK, _SIGNS_OF_DEEPSEEK, r"\s+\z", _CJK_OF_DEEPSEEK, r"\p{N}+")
    ),
    "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_DEEPSEEK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splitter((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "poro-chat bloom gpt3-finnish": Splitter((_CLAUSES,)),
    "viking": Splitter((_CLAUSES, r"\p{N}")),
    "tekken": Splitter((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitter((_GPT4O,)),
    "superbpe": Splitter((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "seed-coder": Splitter((_SEED_CODER,)),
    "minicpm5": Splitter((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True),
    "gemma4": Splitter((r"\n+",), is_raw=True, adds_bos=True, always_adds_bos=True, bos_id=None),
}
SPLITTERS = {name: splitter for names, splitter in _NAMES.items() for name in names.split()}
