"""Multimodal checkpoints continue text: from the folder, as Transformers' own ``generate`` does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outrider
from multimodal import KINDS, multimodal
from outrider.bench.predicted_memory import Predictor
from outrider.errors import UnsupportedModel
from outrider.models.weights import num_bytes
from pairs import random_llama, save, word_tokenizer


def folder_of(name: str, path: Path) -> tuple[Path, Any]:
    model = multimodal(name)
    return save(path / name, model, word_tokenizer()), model


@pytest.mark.parametrize("name", KINDS)
def test_text_from_a_folder_is_that_of_generate(name: str, tmp_path: Path) -> None:
    """Plain, and with a draft, for prompts of different lengths; as target and as draft."""
    folder, model = folder_of(name, tmp_path)
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


@pytest.mark.parametrize(("name", "quantization"), [("llava", "int8"), ("gemma3", "none")])
def test_memory_is_predicted(name: str, quantization: str, tmp_path: Path) -> None:
    """With the vision tower, which is loaded, too."""
    folder, _ = folder_of(name, tmp_path)
    target = outrider.load(folder, quantization=quantization).target
    config = transformers.AutoConfig.from_pretrained(folder)
    predicted = Predictor(config, 128, 2, torch.float32).memory(quantization)
    assert predicted.weights == num_bytes(target.model)
    assert predicted.cache == sum(store.nbytes for store in target.new_cache(2, 128).storage)


def test_kinds_that_no_class_continues_are_refused_by_name(tmp_path: Path) -> None:
    """Before their weights are read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": None}))
    with pytest.raises(UnsupportedModel, match="is of the type clip, for which Transformers .* no model that"):
        outrider.load(tmp_path)
