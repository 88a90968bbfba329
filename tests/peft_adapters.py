"""Adapters of PEFT, on disk beside their base."""

import copy
from pathlib import Path
from typing import Any

import peft
import torch

from pairs import random_llama, save, word_tokenizer

WIDE = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "init_lora_weights": False}


def adapted(
    path: Path, config: Any, base: Any = None, *, folder: str = "adapter", tokenizer: Any = None, seed: int = 0
) -> Any:
    """A base in ``path / "base"``, and its adapter in ``path / folder``. The model with both."""
    base = random_llama(tie_word_embeddings=False) if base is None else base
    save(path / "base", base, word_tokenizer())
    base.name_or_path = base.config.name_or_path = str(path / "base")
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, copy.deepcopy(config))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path / folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(path / folder)
    return model.eval()
