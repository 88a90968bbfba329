"""Drafts with few tokens: which tokens, and that their logits are those of the whole draft. (Their contract is in
test_contract.py.)"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import check_state
from heads import mtp_pair, write_eagle3
from hybrids import V, hybrid
from outrider.api import load, load_drafter
from outrider.drafters.draft_options import DraftOptions, split_name
from outrider.drafters.few_tokens import with_vocab
from outrider.drafters.heads import head_drafter
from outrider.errors import FileError, OptionError, UnsupportedModel
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.measure.log import Header
from outrider.measure.replay import load_draft
from outrider.models.few_tokens import with_few_tokens
from outrider.runtime.lm import LM
from outrider.runtime.stand_in import StandIn
from pairs import NUM_WORDS, embedded, random_llama, save
from toys import as_lm, tiny_llama

IDS = torch.tensor([[5, 9, 1, 33]])
END = NUM_WORDS - 1


def _logits(lm: LM, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        return lm.forward(ids, torch.arange(ids.shape[1])[None], lm.new_cache(1, 8), 8)


def _check(few: LM, whole: LM, chosen: Tensor) -> None:
    """Its logits are those of the whole draft where it has any; to the bit by the native engine, whose sums have an
    order."""
    assert few.token_ids is not None and few.token_ids.tolist() == chosen.tolist()
    got, want = _logits(few), _logits(whole)
    is_chosen = torch.zeros(want.shape[-1], dtype=torch.bool).index_fill(0, chosen, True)
    tolerance = 1e-5 if few.native is None else 0.0
    torch.testing.assert_close(got[..., is_chosen], want[..., is_chosen], atol=tolerance, rtol=0.0)
    assert bool((got[..., ~is_chosen] == -1e4).all())


@pytest.mark.parametrize("execution", ["eager", "native"])
@pytest.mark.parametrize("num", [1, 37, 1000])
def test_logits_are_those_of_the_whole_model(execution: str, num: int) -> None:
    """An embedding that is the LM head, too, stays whole."""
    whole = load("fable-draft", None, execution=execution, device="cpu", dtype="float32").target
    chosen = torch.randperm(whole.vocab_size, generator=torch.Generator().manual_seed(num))[:num].sort().values
    few = with_few_tokens(whole, chosen)
    _check(few, whole, chosen)
    _check(few.with_execution(whole.execution), whole, chosen)
    assert (few.native is None) == (execution == "eager") and whole.token_ids is None


def test_a_stand_in_and_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is opened from notes has no LM head by itself, if that is the embedding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for is_tied in (True, False):
        folder = save(tmp_path / str(is_tied), random_llama(tie_word_embeddings=is_tied))
        load(folder, None, device="cpu")
        whole = load(folder, None, device="cpu").target
        assert isinstance(whole.weights, StandIn)
        chosen = torch.tensor([2, 3, 50, END])
        few = with_few_tokens(whole, chosen)
        _check(few, whole, chosen)
        few.native = whole.native = None
        _check(few, whole, chosen)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_rows_in_blocks(name: str) -> None:
    """In the file's own blocks, so that no number changes."""
    form = next(one for one in BLOCK_FORMS.values() if one.name == name)
    generator = torch.Generator().manual_seed(0)
    model: Any = tiny_llama(vocab_size=70, hidden_size=256, num_attention_heads=4)
    scales = torch.full((70, 256 // form.num_numbers, 1), 1.0).half().view(torch.uint8)
    rows = torch.randint(256, (70, 256 // form.num_numbers, form.num_bytes), generator=generator, dtype=torch.uint8)
    rows[..., -2:] = scales.view(70, -1, 2)
    rows[..., :2] = scales.view(70, -1, 2)
    weight = NarrowWeight.of_blocks(rows.view(70, -1), form)
    model.float().lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    whole = LM(model, name="draft", vocab_size=70, context_len=64)
    chosen = torch.tensor([0, 1, 5, 17, 40, 41, 69])
    few = with_few_tokens(whole, chosen)
    _check(few, whole, chosen)
    head: Any = few.model
    assert isinstance(head.lm_head.weight, NarrowWeight) and head.lm_head.weight.blocks == form


def test_the_most_frequent_tokens(tmp_path: Path) -> None:
    """Of outputs alone; of equally frequent ones those of lower ids; and always the end tokens."""
    lm = as_lm(tiny_llama(vocab_size=NUM_WORDS))
    log = tmp_path / "log.jsonl"
    rows = [{"prompt_ids": [1, 1, 1], "token_ids": [7, 5, 5]}, {"prompt_ids": [2], "token_ids": [9, 7, 3, 5]}]
    log.write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for vocab in ("3", str(log), f"2@{log}", f"3@{log}", f"40@{log}"):
        few, options = with_vocab(lm, DraftOptions(vocab=vocab, is_greedy=True), None, [END])
        assert options == DraftOptions(is_greedy=True) and few.token_ids is not None
        found[vocab] = few.token_ids.tolist()
        assert few.name.startswith("target:vocab=") and str(tmp_path) not in few.name
    assert found["3"] == [0, 1, 2, END]
    assert found[str(log)] == [3, 5, 7, 9, END]
    assert found[f"2@{log}"] == [5, 7, END] and found[f"3@{log}"] == [3, 5, 7, END]
    assert len(found[f"40@{log}"]) == 41 and found[f"40@{log}"][:4] == [0, 1, 2, 3]  # those that never occur, by id
    same, other = (with_vocab(lm, DraftOptions(vocab=vocab), None, [END])[0].name for vocab in (str(log), f"2@{log}"))
    assert same != other
    log.write_text(json.dumps({"token_ids": [NUM_WORDS]}))
    with pytest.raises(FileError, match="not token ids of the target"):
        with_vocab(lm, DraftOptions(vocab=str(log)), None, [])


def test_names() -> None:
    model, options = split_name("some/model:int8:vocab=800@logs/a.jsonl:min-prob=0.3")
    assert model == "some/model:int8" and options == DraftOptions(min_prob=0.3, vocab="800@logs/a.jsonl")
    assert options.full_name("m") == "m:vocab=800@logs/a.jsonl:min-prob=0.3"
    for name in ("m:vocab=", "m:vocab=0", "m:vocab=5@", "m:vocab=3:vocab=4"):
        with pytest.raises(OptionError):
            split_name(name)


def test_a_draft_by_its_name() -> None:
    """Text at temperature 0, and that of a seed, are those of plain decoding. The end is always among the tokens."""
    decoder = embedded(acceptance="gumbel")
    drafter = load_drafter(decoder, "fable-draft:vocab=500")
    assert drafter.name == "fable-draft:vocab=500" and drafter.lm is not None
    chosen = torch.tensor(sorted({*range(500), *decoder.eos_ids}))
    _check(drafter.lm, load_drafter(decoder, "fable-draft").models[0], chosen)
    few = replace(decoder, drafter=drafter)
    for options in ({"temperature": 0.0}, {"seed": 3, "top_p": 0.9}, {"seed": 4, "repetition_penalty": 1.2}):
        [got], [want] = (
            one.generate(["Once upon a time"], max_new_tokens=40, **options) for one in (few, decoder.plain())
        )
        assert got.token_ids == want.token_ids and got.stats.num_accepted_draft_tokens > 0


def test_constraints() -> None:
    """Masks are of all tokens, at each of the drafted places."""
    plain = load("fable", None, device="cpu")
    decoder = replace(plain, drafter=load_drafter(plain, "fable-draft:vocab=200"))
    options: dict[str, Any] = {"bad_words": [[300], [5]], "max_new_tokens": 12, "num_draft_tokens": 4}
    for more in ({"temperature": 0.0}, {"seed": 3, "acceptance": "gumbel"}):
        texts = [one.generate(["Once upon a time"], **options, **more)[0].token_ids for one in (plain, decoder)]
        assert texts[0] == texts[1] and not {300, 5} & {*texts[0]}


def test_a_draft_of_a_log() -> None:
    """Replayed without the target."""
    decoder = embedded()
    header = Header.of(decoder, {}, has_probs=False)
    drafter = load_draft("fable-draft:vocab=300", header, device="cpu")
    assert drafter.name == "fable-draft:vocab=300"
    assert drafter.lm is not None and drafter.lm.token_ids is not None
    assert drafter.lm.token_ids.tolist() == sorted({*range(300), *decoder.eos_ids})


def test_tokens_of_a_head(tmp_path: Path) -> None:
    """Those that it has, whatever their order in its d2t; by the native engine, too."""
    target = random_llama(num_layers=4)
    write_eagle3(tmp_path, target, token_ids=[3, 90, 8, 40, END])
    for execution in ("eager", "native"):
        decoder = load(target.float(), None, execution=execution)
        drafter = load_drafter(decoder, f"{tmp_path}:vocab=41")
        assert drafter.models[0].name.endswith(":vocab=41")
        module: Any = drafter.models[0].model
        whole: Any = load_drafter(decoder, str(tmp_path)).models[0].model
        assert module.token_ids.tolist() == [3, 8, 40, END] and whole.token_ids.tolist() == [3, 8, 40, 90, END]
        assert torch.equal(module.lm_head.weight, whole.lm_head.weight[[0, 1, 2, 4]])
        assert (drafter.models[0].native is None) == (execution == "eager")
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
        few = replace(decoder, drafter=drafter)
        assert (
            few.generate([[5, 6, 7]], **options)[0].token_ids == decoder.generate([[5, 6, 7]], **options)[0].token_ids
        )


def test_tokens_of_an_mtp_layer() -> None:
    """Whose LM head is the target's."""
    target, drafter = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    whole: Any = target.model
    chosen = torch.tensor([i for i in range(V) if i % 5])
    few = with_few_tokens(drafter.models[0], chosen)
    assert len(whole.lm_head.weight) == V and torch.equal(few.model.lm_head.weight, whole.lm_head.weight[chosen])  # type: ignore[union-attr,index]
    generator = torch.Generator().manual_seed(3)
    first, rest, other, last = (torch.randint(V, (num,), generator=generator).tolist() for num in (5, 9, 9, 9))
    sequences = [(first, rest), (other, last), ([*first, *rest[:4]], last)]
    check_state(target, head_drafter(few), sequences, 3, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    decoder = embedded()
    size = decoder.target.vocab_size
    for name, error, message in (
        (f"fable-draft:vocab={size}", OptionError, f"fewer than the {size} tokens of the target"),
        ("fable-draft:vocab=nowhere.jsonl", FileError, "nowhere.jsonl"),
        ("ngram:vocab=5", OptionError, "takes no options"),
    ):
        with pytest.raises(error, match=message):
            load_drafter(decoder, name)
    lm = as_lm(tiny_llama(vocab_size=8)).with_vocabulary(8, (1, 2))
    with pytest.raises(UnsupportedModel, match="knows none of the tokens"):
        with_few_tokens(lm, torch.tensor([1, 2]))
    model: Any = tiny_llama(vocab_size=8)
    model.lm_head.weight = torch.nn.Parameter(torch.ones(8, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match="no rows are taken"):
        with_few_tokens(LM(model, name="draft", vocab_size=8, context_len=64), torch.tensor([1]))
