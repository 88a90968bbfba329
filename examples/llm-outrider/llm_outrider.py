"""A plugin of ``llm``: the pair runs in its process.

pip install llm examples/llm-outrider
llm -m outrider 'Once upon a time' -o seed 1 -o max_new_tokens 40
OUTRIDER_TARGET=... OUTRIDER_DRAFT=... llm -m outrider 'any other pair'

Without the plugin: ``outrider serve``, and a model in ``extra-openai-models.yaml`` with ``api_base``.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import llm
from pydantic import Field

import outrider


@cache
def pair() -> outrider.Decoder:
    """Load the pair at the first prompt."""
    return outrider.load(os.environ.get("OUTRIDER_TARGET", "fable"), os.environ.get("OUTRIDER_DRAFT", "fable-draft"))


class Outrider(llm.Model):
    model_id = "outrider"
    can_stream = True

    class Options(llm.Options):
        """Some of the fields of ``outrider.Sampling``."""

        max_new_tokens: int = Field(default=128, description="Most tokens of an answer")
        temperature: float = Field(default=1.0, description="0 is greedy")
        seed: int | None = Field(default=None, description="The same seed gives the same answer")

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any = None) -> Iterator[str]:
        decoder = pair()
        options = prompt.options.model_dump()
        if getattr(decoder.tokenizer, "chat_template", None):
            system = [{"role": "system", "content": prompt.system}] if prompt.system else []
            turns = [*(conversation.responses if conversation else ()), response]
            messages = [m for turn in turns for m in _messages(turn, response)]
            chunks = decoder.stream_chat([*system, *messages], **options)
        else:  # a base model continues the text
            chunks = decoder.stream(prompt.prompt, **options)
        for chunk in chunks:
            yield chunk.text


def _messages(turn: Any, current: Any) -> Iterator[dict[str, str]]:
    """A turn of a conversation: the question, and the answer if it is there."""
    yield {"role": "user", "content": turn.prompt.prompt}
    if turn is not current:
        yield {"role": "assistant", "content": turn.text()}


@llm.hookimpl
def register_models(register: Any) -> None:
    register(Outrider())
