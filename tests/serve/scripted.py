"""Models for tests of calls and thoughts: one that says what it is told, and one that says anything."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from toys import as_lm, table_lm, tiny_llama

CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ begin }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "\n{% endfor %}<assistant>\n"
)
TEMPLATES = {
    "hermes": CHATML.replace("{{ begin }}", "<tool_call>"),
    "mistral": CHATML.replace("{{ begin }}", "[TOOL_CALLS]"),
}
MARKERS = {"hermes": {"<tool_call>": False, "</tool_call>": False}, "mistral": {"[TOOL_CALLS]": True}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str = "weather", schema: Mapping[str, Any] = WEATHER, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Tells something.", "parameters": schema, **more}
    return {"type": "function", "function": function}


def scripted(script: Sequence[str], template: str, markers: Mapping[str, bool], *, has_draft: bool = False) -> Decoder:
    """It says the script after any prompt, a token for each piece, 8 at a time by a draft. Markers are tokens."""
    vocab = {"<start>": 0} | {f"{piece}§{i}§": i for i, piece in enumerate(script, 1)} | {"<end>": len(script) + 1}
    for i, piece in enumerate(script, 1):
        if piece in markers:
            del vocab[f"{piece}§{i}§"]
            vocab[piece] = i
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<start>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("§[0-9]+§"), ""), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(token, special=False) for token, special in markers.items() if not special])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, special in markers.items() if special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = template
    table = 100.0 * torch.eye(len(wrapped)).roll(1, dims=1)  # each token is followed by the next one
    table[0] = 0
    table[0, 1] = 100.0
    drafter = model_drafter(table_lm(table, name="draft")) if has_draft else NO_DRAFTER
    return Decoder(table_lm(table), wrapped, frozenset([len(script) + 1]), drafter, num_draft_tokens=8)


def talker(template: str, markers: Mapping[str, bool], *, context_len: int = 1024) -> Decoder:
    """A tiny random model of bytes, with drafts: what it says is what a grammar forces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marked = [AddedToken(token, special=special) for token, special in markers.items()]
    tokenizer.add_tokens([AddedToken("<end>", special=True), *marked])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = template
    model = tiny_llama(vocab_size=len(wrapped), context_len=context_len, eos_token_id=len(letters))
    lm = as_lm(model, context_len=context_len)
    return Decoder(lm, wrapped, frozenset([len(letters)]), ngram_drafter())
