"""The recipe of the embedded pair, end to end on a small text: corpus, tokenizer, target."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import script

STORIES = "\n\n".join(f"Once upon a time there was a king who had {i} sons, and each had a horse." for i in range(400))


def test_tokenizer_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(script("recipes/fable/corpus.py").mixed(STORIES))
    script("recipes/fable/tokenizer.py").train(corpus, 400).save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    text = "The king's 345 horses, naïvely \u2014 12 * 345 ="
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert {"1", "2", "3", "4", "5"} <= set(tokenizer.tokenize(text)) and "12" not in tokenizer.tokenize(text)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0

    sizes = "--layers 1 --hidden-size 32 --intermediate-size 64 --head-size 16"
    steps = "--length 32 --batch-size 4 --steps 20 --cpu"
    arguments = [corpus, tmp_path / "target", "--tokenizer", tmp_path / "tokenizer", *f"{sizes} {steps}".split()]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *map(str, arguments)])
    script("recipes/fable/pretrain.py").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["validation_loss"] < 5.9  # log(400) is 6.0, which a model that knows nothing has
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in model.parameters()) == result["num_params"]
    assert (tmp_path / "target" / "training" / "checkpoint-20").is_dir()
