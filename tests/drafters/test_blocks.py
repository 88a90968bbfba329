"""Block heads: DFlash and DFlash 2 in their layouts. (Their contract is in test_contract.py.)"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import golden.blocks as golden
import outrider
from block_heads import add_tensors, tiny_block_drafter, write_block
from contract import lead
from outrider.api import load_drafter
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import ModelCorrupt, OptionError, UnsupportedModel
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.sampling.rules import GUMBEL
from pairs import random_llama, word_tokenizer
from toys import InTurn, as_lm, request, tiny_llama, tokens


@pytest.mark.parametrize("name", golden.CASES)
def test_q_is_that_of_the_packages(name: str, tmp_path: Path) -> None:
    """In rounds of the engine that begin at the anchors."""
    model = golden.target()
    golden.write(tmp_path, name, model)
    target = as_lm(model)
    drafter = load_drafter(outrider.load(model), tmp_path)
    expected = load_file(golden.FILE)[f"{name}: logits"].double().softmax(dim=-1)
    if (ids := golden.CASES[name].get("token_ids")) is not None:
        few, expected = expected, torch.zeros(*expected.shape[:-1], golden.NUM_TOKENS, dtype=torch.double)
        expected.index_copy_(-1, torch.tensor(ids), few)
    k = drafter.most_drafted
    assert k == expected.shape[1]
    led = lead(target, drafter, [(golden.TEXT[: at + 1], golden.TEXT[at + 1 : at + 2 + k]) for at in golden.ANCHORS], k)
    for i, (at, want) in enumerate(zip(golden.ANCHORS, expected, strict=True)):
        _, ids, q = led.drafts[i, at + 1]
        assert ids == [*golden.TEXT[at + 1 : at + 1 + k]]
        assert q is not None and (q - want).abs().max() < 1e-5


@pytest.mark.each_execution
@pytest.mark.parametrize("options", [{"layout": "speculators", "token_ids": [*range(0, 60, 2)]}, {"is_second": True}])
def test_a_block_may_end_beyond_the_context(options: dict[str, Any]) -> None:
    target = as_lm(tiny_llama(num_layers=4, context_len=32), context_len=32)
    drafter = tiny_block_drafter(target, **options)
    prompts = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
    requests = [request(ids, seed=10 + i, max_new_tokens=32 - len(ids)) for i, ids in enumerate(prompts)]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, InTurn(4, 4, 3, 0, 0, 1)) == plain


def test_a_folder_is_loaded_as_a_draft(tmp_path: Path) -> None:
    """Constraints mask its drafts one by one; options of models are refused."""
    model = random_llama(num_layers=4)
    write_block(tmp_path, model)
    decoder = outrider.load(model, tmp_path, tokenizer=word_tokenizer(), acceptance="gumbel")
    assert decoder.drafter.most_drafted == 4
    options: dict[str, Any] = {"bad_words": [[5], [6, 7]], "max_new_tokens": 30, "temperature": 1.3, "seed": 4}
    got, plain = (one.generate(["w1 w2", "w3"], **options) for one in (decoder, decoder.plain()))
    assert [one.token_ids for one in got] == [one.token_ids for one in plain]
    assert sum(one.stats.num_draft_tokens for one in got) > 10
    for option in ("greedy", "min-prob=0.3"):
        with pytest.raises(OptionError, match="does not take it"):
            load_drafter(decoder, f"{tmp_path}:{option}")


_DSPARK = "a DSpark head, which is not run here: take an EAGLE-3, DFlash or DFlash 2 head"


@pytest.mark.parametrize(
    ("changes", "tensors", "error", "message"),
    [
        ({}, {"refiner.weight": torch.zeros(2)}, ModelCorrupt, "1 weights that do not belong .* refiner.weight"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, {}, ModelCorrupt, "no mask token that .*: None"),
        ({"dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3}}, {}, ModelCorrupt, "for another target"),
        ({}, {"lm_head.weight": torch.zeros(50, 32)}, ModelCorrupt, "50 tokens, and no d2t"),
        ({"architectures": ["Qwen3DSparkModel"]}, {}, UnsupportedModel, "is a DSpark draft, which is not run here"),
        ({"use_swa": True}, {}, UnsupportedModel, "states use_swa, which is not run here: take a plain DFlash head"),
        ({"markov_rank": 3}, {}, UnsupportedModel, "states markov_rank, which is not run here"),
        ({"speculators_model_type": "peagle"}, {}, UnsupportedModel, "is a P-EAGLE head, which is not run here"),
        ({}, {"markov_head.markov_w1.weight": torch.zeros(60, 3)}, UnsupportedModel, _DSPARK),
        ({}, {"lilicorr.out_head.bias": torch.zeros(2)}, UnsupportedModel, "is a LiLiCorr head, which is not run here"),
    ],
)
def test_block_heads_refuse_other_checkpoints(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    add_tensors(tmp_path, tensors)
    with pytest.raises(error, match=message):
        load_head(resolve(str(tmp_path), None), as_lm(model))
