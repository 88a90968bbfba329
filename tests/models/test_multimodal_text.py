"""Multimodal checkpoints continue text: from the folder, as Transformers' own ``generate`` does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from multimodal import KINDS, multimodal
from outrider.errors import UnsupportedModel
from pairs import random_llama, save, word_tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_text_from_a_folder_is_that_of_generate(name: str, tmp_path: Path) -> None:
    """Plain, and with a draft, for prompts of different lengths; as target and as draft."""
    model: Any = multimodal(name)
    folder = save(tmp_path / name, model, word_tokenizer())
    prompts = [[1, 2, 3], [5, 4, 3, 2, 8, 7] * 4]
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        want.append(text[0, len(prompt) :].tolist())
    for draft in ("none", folder):
        done = outrider.load(folder, draft).generate(prompts, temperature=0, max_new_tokens=8, ignore_eos=True)
        assert [list(one.token_ids) for one in done] == want
    decoder = outrider.load(random_llama(), folder)  # without a tokenizer in common
    assert len(decoder.generate([[1, 2, 3]], max_new_tokens=8, ignore_eos=True)[0].token_ids) == 8


def test_kinds_that_no_class_continues_are_refused_by_name(tmp_path: Path) -> None:
    """Before their weights are read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": None}))
    with pytest.raises(UnsupportedModel, match="is of the type clip, for which Transformers .* no model that"):
        outrider.load(tmp_path)
