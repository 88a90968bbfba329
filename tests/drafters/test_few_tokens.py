"""Drafts with few tokens: which tokens, and that their logits are the whole draft's. (Contract: test_contract.py.)"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import mtp_pair, write_eagle3
from hybrids import V, hybrid
from outrider.api import load, load_drafter
from outrider.drafters.draft_options import DraftOptions, split_name, with_vocab
from outrider.errors import FileError, OptionError, UnsupportedModel
from outrider.models.few_tokens import with_few_tokens
from outrider.native.planned_model import PlannedModel
from outrider.runtime.lm import LM
from pairs import NUM_WORDS, embedded, random_llama, save
from toys import as_lm, tiny_llama

IDS = torch.tensor([[5, 9, 1, 33]])
END = NUM_WORDS - 1


def _logits(lm: LM, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        return lm.forward(ids, torch.arange(ids.shape[1])[None], lm.new_cache(1, 8), 8)


def _check(few: LM, whole: LM, chosen: Tensor) -> None:
    """Its logits are the whole draft's, where it has any; to the bit by the native engine, whose sums have an order."""
    assert few.token_ids is not None and few.token_ids.tolist() == chosen.tolist()
    got, want = _logits(few), _logits(whole)
    is_chosen = torch.zeros(want.shape[-1], dtype=torch.bool).index_fill(0, chosen, True)
    tolerance = 0.0 if few.backend.is_batch_invariant else 1e-5
    torch.testing.assert_close(got[..., is_chosen], want[..., is_chosen], atol=tolerance, rtol=0.0)
    assert bool((got[..., ~is_chosen] == -1e4).all())


@pytest.mark.parametrize("execution", ["eager", "native"])
def test_logits_are_those_of_the_whole_model(execution: str) -> None:
    """An embedding that is the LM head, too, stays whole."""
    whole = load("fable-draft", None, execution=execution, device="cpu", dtype="float32").target
    chosen = torch.randperm(whole.vocab_size, generator=torch.Generator().manual_seed(0))[:1000].sort().values
    few = with_few_tokens(whole, chosen)
    _check(few, whole, chosen)
    _check(few.with_execution(whole.execution), whole, chosen)
    assert few.backend.is_batch_invariant == (execution == "native") and whole.token_ids is None


def test_few_tokens_of_a_planned_model(tmp_path: Path) -> None:
    """The LM head has rows of its own, if it is the embedding, too."""
    for is_tied in (True, False):
        whole = load(
            save(tmp_path / str(is_tied), random_llama(tie_word_embeddings=is_tied).float()), None, device="cpu"
        ).target
        chosen = torch.tensor([2, 3, 50, END])
        few = with_few_tokens(whole, chosen)
        assert isinstance(whole.weights, PlannedModel) and isinstance(few.weights, PlannedModel)
        _check(few, whole, chosen)
        assert torch.equal(few.model.lm_head.weight, whole.model.lm_head.weight)


def test_the_most_frequent_tokens(tmp_path: Path) -> None:
    """Of outputs alone; of equally frequent ones those of lower ids; and always the end tokens."""
    lm, log = as_lm(tiny_llama(vocab_size=NUM_WORDS)), tmp_path / "log.jsonl"
    rows = [{"prompt_ids": [1, 1, 1], "token_ids": [7, 5, 5]}, {"prompt_ids": [2], "token_ids": [9, 7, 3, 5]}]
    log.write_text("\n".join(map(json.dumps, rows)))
    for vocab, ids in (
        ("3", [0, 1, 2, END]),
        (str(log), [3, 5, 7, 9, END]),
        (f"2@{log}", [5, 7, END]),
        (f"6@{log}", [0, 1, 3, 5, 7, 9, END]),  # those that never occur, by id
    ):
        few, options = with_vocab(lm, DraftOptions(vocab=vocab, is_greedy=True), None, [END])
        assert options == DraftOptions(is_greedy=True) and few.token_ids is not None and few.token_ids.tolist() == ids
        assert few.name.startswith("target:vocab=") and str(tmp_path) not in few.name
    log.write_text(json.dumps({"token_ids": [NUM_WORDS]}))
    with pytest.raises(FileError, match="not token ids of the target"):
        with_vocab(lm, DraftOptions(vocab=str(log)), None, [])


def test_a_draft_by_its_name() -> None:
    """Its text is that of plain decoding, also with constraints, which mask all tokens. The end is always drafted."""
    decoder = embedded(acceptance="gumbel")
    drafter = load_drafter(decoder, "fable-draft:vocab=500")
    assert drafter.name == "fable-draft:vocab=500"
    chosen = torch.tensor(sorted({*range(500), *decoder.eos_ids}))
    _check(drafter.lm, load_drafter(decoder, "fable-draft").models[0], chosen)
    few = replace(decoder, drafter=drafter)
    for options in ({"temperature": 0.0}, {"seed": 4, "repetition_penalty": 1.2, "bad_words": [[300], [5]]}):
        given: dict[str, Any] = {"max_new_tokens": 40, **options}
        [got], [want] = (one.generate(["Once upon a time"], **given) for one in (few, decoder.plain()))
        assert got.token_ids == want.token_ids and got.stats.num_accepted_draft_tokens > 0


def test_tokens_of_a_head(tmp_path: Path) -> None:
    """Those that it has, whatever their order in its d2t. The LM head of an MTP layer's target stays whole."""
    target = random_llama(num_layers=4)
    write_eagle3(tmp_path, target, token_ids=[3, 90, 8, 40, END])
    decoder = load(target.float(), None)
    drafters = [load_drafter(decoder, f"{tmp_path}{vocab}") for vocab in (":vocab=41", "")]
    module, whole = (drafter.models[0].model for drafter in drafters)
    assert module.token_ids.tolist() == [3, 8, 40, END]
    assert torch.equal(module.lm_head.weight, whole.lm_head.weight[[0, 1, 2, 4]])
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    few = replace(decoder, drafter=drafters[0])
    assert few.generate([[5, 6, 7]], **options)[0].token_ids == decoder.generate([[5, 6, 7]], **options)[0].token_ids
    lm, drafter = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    own: Any = lm.model.lm_head
    mtp: Any = with_few_tokens(drafter.models[0], torch.tensor([1, 2, 5])).model
    assert len(own.weight) == V and torch.equal(mtp.lm_head.weight, own.weight[[1, 2, 5]])


def test_few_tokens_names_and_refusals() -> None:
    decoder = embedded()
    split = "some/model:int8", DraftOptions(min_prob=0.3, vocab="800@logs/a.jsonl")
    assert split_name("some/model:int8:vocab=800@logs/a.jsonl:min-prob=0.3") == split
    names = ("m:vocab=", "m:vocab=0", "m:vocab=3:vocab=4", f"fable-draft:vocab={decoder.target.vocab_size}")
    for name in (*names, "fable-draft:vocab=nowhere.jsonl", "ngram:vocab=5"):
        with pytest.raises((OptionError, FileError), match="vocab|nowhere.jsonl|takes no options"):
            load_drafter(decoder, name)
    lm = as_lm(tiny_llama(vocab_size=8)).with_vocabulary(8, (1, 2))
    with pytest.raises(UnsupportedModel, match="knows none of the tokens"):
        with_few_tokens(lm, torch.tensor([1, 2]))
