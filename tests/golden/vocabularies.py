"""Small vocabularies of GGUF files, and a page of hard text: llama.cpp's tokens of it are in vocabularies.json. Merges,
which make_llama.py trains, cross all bounds of words, so that another splitter gives other tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from outrider.models.gguf.splitters import SPLITTERS

FILE = Path(__file__).parent / "vocabularies.json"
PAGE = (
    "Steps:\n\n1. Mix 250 g of flour\n2. Wait 12345 s\r\n\r\n  - then 1234567 more   \n\t\tdone...  at  ALL\n",
    " Hello  world,  it's IT'S we'll they'RE  he'd I'VE 'em don'T 'ſ a's'b 'sat 'tis 'sat",
    "2023 a  1 b   22  c    333\n4444\n\n55555\n 666666 7 \n  8",
    "def f(x, *args):\n    if x_1 >= 0x1F:  # why?\n\t\treturn {'a/b': [x ** 2, \"no\"]}\n\n\n    return ~x ^ `$y`\n",
    "helloWorld HELLOworld HelloWORLD XMLHttpRequest camelCase iPhone McDonald's ÀÉcole straßeÜber ΑΒΓαβγ ЁЖёж ǅungla",
    "é e\u0301 n\u0303o ca\u0327a u\u0308\u0304x \u0301x हिन्दी में नमस्ते বাংলা ไทยแลนด์ ภาษา עִבְרִית العربية ١٢٣٤٥ ٦",
    "日本語のテキスト、カタカナ　ﾊﾝｶｸ。中文字符和標點！“引号”…… 한국어 문장입니다 ㄅㄆㄇ 北京2008年 豈更",
    "😀 👩\u200d👩\u200d👧 🇫🇷 ½ ²³ Ⅷ ①② １２３ ＡＢｃ €5 $5 ¥1,000.50 −3 ± ∑∫ ← 🤖🤖  ☃\ufe0f",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg\ufeffh \u00a0 \u2009\u200a i\x0bj\x0ck\x1cl\x7fm",
    "...!!! ?? -- --- ---- ==== **** __init__ (((a))) [[b]] <<c>> //d/e/f.g #tag @user 'quoted' “x” a.b:8080/?q=1&r=2",
    "<|end|> within<|end|>text <|end|>  after\n<|end|>\n <tool>x <tool> \n<tool></s><unk> <|im_end|><0x41>",
    "<|endoftext|>  x</s>  y<unk> z<tool>  w",
    "     five      six\n\n\n\n\n\n       seven        eight         nine\t\t\t\t\ttabs               fifteen",
    "IMGIMGABZ <sentinel:12> IMGIMGZ a1b22c333d4444e 1a 12a 123a 1234a kings are kings, aren't kings",
    "x y z. ab cd ef! 3 4 5 ok\u200dok \ue000 \U0001fae8 𝒳𝟙 𐐀𐐨 𞤀 ﬀ ª ʰ Å K Ω",
    "\n",
    " ",
    "\n\n \n  \n   a",
    "   ",
    "'s",
    "1000000000 10000 100",
)
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE, _NORMAL, _UNKNOWN = 3, 4, 5, 6, 1, 2
_WHOLE = {"<|end|>": _CONTROL, "<|endoftext|>": _CONTROL, "<tool>": _USER_DEFINED, "[PAD3]": _UNUSED}
_WHOLE |= {"<|im_end|>": _NORMAL}
_UNMERGED = ("kings", "Ġkings")  # tokens that no merges lead to


def lessons() -> list[str]:
    """Texts to train merges on: those of the page, without tokens that are whole or not merged."""
    return [text.replace("kings", " ") for text in PAGE if "<|end|>" not in text]


def stated() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def _bytes_metadata(merges: list[str]) -> dict[str, Any]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    types = [_NORMAL] * (len(tokens) + len(_UNMERGED)) + [*_WHOLE.values()]
    tokens += [*_UNMERGED, *_WHOLE]
    end = tokens.index("<|end|>")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
    }


def _raw_metadata(merges: list[str]) -> dict[str, Any]:
    """Scores fall from merge to merge; runs of spaces have one score, as in published vocabularies."""
    pairs = [(merge[:i], merge[i + 1 :]) for merge in merges for i in [merge.index(" ", 1)]]
    letters = sorted({letter for pair in pairs for letter in "".join(pair)} | set("▁12"))
    made = [*dict.fromkeys("".join(pair) for pair in pairs)]
    spaces = ["▁" * n for n in range(2, 10)]
    made = [text for text in made if text not in spaces]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = {"<unk>": _UNKNOWN, "<s>": _CONTROL, "</s>": _CONTROL}
    tokens = [*special, *bytes_, *letters, *made, *spaces, *_WHOLE]
    types = [*special.values(), *[_BYTE] * 256, *[_NORMAL] * len([*letters, *made, *spaces]), *_WHOLE.values()]
    scores = [0.0] * 259 + [-1e6] * len(letters) + [-float(i) for i in range(len(made))] + [-1e9] * len(spaces)
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores + [-1000.0] * len(_WHOLE),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def cases(merges: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Metadata of each case: one for each splitter, and kinds without one."""
    of_bytes, raw = _bytes_metadata(merges["bytes"]), _raw_metadata(merges["raw"])
    by_score = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **raw}
    with_merges = {**raw, "tokenizer.ggml.merges": merges["raw"]}
    return {
        **{
            f"splitter {name}": {**(with_merges | {"tokenizer.ggml.model": "gpt2"} if splitter.is_raw else of_bytes)}
            | {"tokenizer.ggml.pre": name}
            for name, splitter in SPLITTERS.items()
        },
        "no splitter": of_bytes,
        "gemma4": {**with_merges, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False},
        "scores": by_score,
        "scores, without a space": by_score | {"tokenizer.ggml.add_space_prefix": False},
        "scores, with an end": by_score | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
        "scores, Phi 3": by_score | {"general.name": "Phi-3 mini"},
    }
