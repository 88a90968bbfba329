"""Splitters of byte-level vocabularies: how a text is cut into words, within which letters are merged to tokens.

A GGUF file names its splitter (``tokenizer.ggml.pre``); the expressions, and what else depends on the name, are
llama.cpp's. This is the one table of them: files are read by it, and a ``tokenizer.json`` is written as GGUF by it.
Where llama.cpp splits otherwise than the authors of a model (its classes know no upper case beyond ASCII, for
instance), its words are meant, for those are what the name stands for. It knows neither tokens nor files.

Names that are missing on purpose: ``whitespace``, ``jina-v2-*`` and ``granite-embed-multi-311m``, of models of
embeddings, whose tokens also depend on other things.

Source: llama.cpp, src/llama-vocab.cpp (expressions; names, and what they set) and src/unicode.cpp (matchers of its own
in place of some expressions), as in llama-cpp-python 0.3.36. The expressions here are Oniguruma's, for ``tokenizers``.
"""

from __future__ import annotations

from dataclasses import dataclass

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
_UFAKZEKA = rf"{_WORD}|\p{{N}}{_REST}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
    rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?|\s*[\r\n]|{_SPACES}"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s{1}"
)


def _cased(letters: str, end: str) -> str:
    """Words that change from upper to lower case at most once."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return f"{_LEAD}{upper}*{lower}+{end}|{_LEAD}{upper}+{lower}*{end}|"


_TEKKEN = _cased(r"\p{L}", "") + r"\p{N}" + _PATHS
_GPT4O = _cased(r"\p{L}", _CONTRACTION + "?") + r"\p{N}{1,3}" + _PATHS
_GRANITE = _cased(r"\p{L}\p{M}", _CONTRACTION + "?") + r"\p{N}{1,3}" + _PATHS
_TINY_AYA = rf"{_MARKED}{_CONTRACTION}?|\p{{N}}{{1,3}}{_PATHS}"
_YOUTU = rf"{_MARKED}{_CONTRACTION}?|\p{{N}}{_PATHS}"

_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = rf"{_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}"
_SPARK = rf"{_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# llama.cpp has replaced white space beyond ASCII when it looks for ranges, so none of it is in them.
_CJK_OF_DEEPSEEK = r"[[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]&&\S]+"
_LETTERS_OF_DEEPSEEK = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    r"ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_SIGNS_OF_DEEPSEEK = r"\s?[!-/:-~！-／：-～‘-‟、-。]+"
_SIGNS_OF_FALCON = r"[\p{P}$+<=>^~|`]+"
_ASIA = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}"
    r"\x{1100}-\x{11FF}]+"
)
_SCRIPTS_OF_YOUTU = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，、-〿︰-﹏]+|[\x{3105}-\x{312F}]+|" + _CJK
_HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
_KIMI = rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}{_REST}"
# In groups of three from the right; a text before the digits stays with the first group.
_THOUSANDS = r"(?<=\p{N})(?=(?:\p{N}{3})*(?!\p{N}))"
_CLAUSES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"\n+"


@dataclass(frozen=True, slots=True)
class Splitter:
    """Rule of words, and what depends on its name besides.

    Attributes:
        steps: expressions, each applied to the pieces that those before it left: a match is a piece of its own, and so
            is the text between two.
        is_raw: words are text, with "▁" for spaces; else each byte of them is written as a letter.
        ignores_merges: a word that is a token is that token, whatever the merges.
        adds_bos: a text begins with BOS if the file does not say.
        always_adds_bos: it does, whatever the file says: a converter of Gemma 4 was wrong there.
        bos_id: BOS of a file that states none.
    """

    steps: tuple[str, ...]
    is_raw: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    always_adds_bos: bool = False
    bos_id: int | None = 11


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
    "falcon": Splitter((_SIGNS_OF_FALCON, _GPT2, "[0-9]{3}")),
    "deepseek-llm": Splitter(
        (r"[\r\n]", _LETTERS_OF_DEEPSEEK, _SIGNS_OF_DEEPSEEK, r"\s+\z", _CJK_OF_DEEPSEEK, r"\p{N}+")
    ),
    "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_DEEPSEEK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splitter((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "spark2_5": Splitter((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")),
    "youtu": Splitter((_SCRIPTS_OF_YOUTU, _YOUTU), ignores_merges=True),
    "poro-chat bloom gpt3-finnish": Splitter((_CLAUSES,)),
    "viking": Splitter((_CLAUSES, r"\p{N}")),
    "tekken": Splitter((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitter((_GPT4O,)),
    "granite-embed-multi-97m": Splitter((_GRANITE,), ignores_merges=True),
    "tiny_aya cohere2moe": Splitter((_THOUSANDS, _TINY_AYA)),
    "chameleon": Splitter(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            "[\\t\\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "superbpe": Splitter((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "bailingmoe bailingmoe2 llada-moe": Splitter((_BAILING,)),
    "seed-coder": Splitter((_SEED_CODER,)),
    "ufakzeka": Splitter((_UFAKZEKA,)),
    "afmoe": Splitter((_THOUSANDS, _ASIA, _DEEPSEEK3)),
    "laguna": Splitter((_LINES, _QWEN2)),
    "exaone-moe": Splitter((_EXAONE_MOE,)),
    "minicpm5": Splitter((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True),
    "jais-2": Splitter((_JAIS2,)),
    "kimi-k2": Splitter((_KIMI,)),
    "gemma4": Splitter((_LINES,), is_raw=True, adds_bos=True, always_adds_bos=True, bos_id=None),
    "sarvam-moe": Splitter((_LINES,), is_raw=True),
}
SPLITTERS = {name: splitter for names, splitter in _NAMES.items() for name in names.split()}
