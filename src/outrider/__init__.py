"""Outrider: speculative sampling for Hugging Face causal language models.

decoder = outrider.load("fable", "fable-draft")
for chunk in decoder.stream("Once upon a time", temperature=0.8, seed=1):
    print(chunk.text, end="")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.system.resources import gc_paused

if TYPE_CHECKING:
    from outrider.api import load
    from outrider.custom_generate import assisted, generate
    from outrider.decoder import Decoder
    from outrider.errors import OutriderError, UsageError
    from outrider.models.registry import Placement
    from outrider.options import Sampling
    from outrider.records import Chunk, Completion, DraftedToken, Stats, Timing, TokenLogprob
    from outrider.requests.async_session import AsyncSession
    from outrider.requests.session import Session
    from outrider.text.chat import Chat, ChatOptions

__all__ = [
    "AsyncSession",
    "Chat",
    "ChatOptions",
    "Chunk",
    "Completion",
    "Decoder",
    "DraftedToken",
    "OutriderError",
    "Placement",
    "Sampling",
    "Session",
    "Stats",
    "Timing",
    "TokenLogprob",
    "UsageError",
    "assisted",
    "generate",
    "load",
]

_HOMES = {
    "AsyncSession": "requests.async_session",
    "Chat": "text.chat",
    "ChatOptions": "text.chat",
    "Decoder": "decoder",
    "load": "api",
    "assisted": "custom_generate",
    "generate": "custom_generate",
    "OutriderError": "errors",
    "UsageError": "errors",
    "Placement": "models.registry",
    "Sampling": "options",
    "Session": "requests.session",
}


if not TYPE_CHECKING:  # else a type checker would take any name for one of this module's

    def __getattr__(name: str) -> Any:
        # Names are imported on first use, so that `import outrider` and `outrider --help` do not import torch.
        if name not in __all__:
            raise AttributeError(f"module 'outrider' has no attribute {name!r}")
        with gc_paused():
            return getattr(import_module(f"outrider.{_HOMES.get(name, 'records')}"), name)


def __dir__() -> list[str]:
    return __all__
