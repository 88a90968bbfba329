"""Block heads: DFlash, DFlash 2 and DSpark in their layouts."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import golden.blocks as golden
import outrider
from block_heads import add_tensors, block_drafter, write_block
from contract import lead
from hybrids import hybrid, hybrid_lm
from outrider.api import load_drafter
from outrider.drafters import block
from outrider.drafters.base import NoDrafter
from outrider.drafters.block import BlockDrafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.errors import ModelCorrupt, ModelNotFound, OptionError, UnsupportedModel
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.records import Stats
from outrider.runtime.hidden_states import recorded_states
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, RULES, Rule
from pairs import NUM_WORDS, random_llama
from sampled_law import law_z
from toys import InTurn, as_lm, request, run, tiny_llama, tokens

GOLDEN = load_file(golden.FILE)


def _head(folder: Path, target: LM) -> BlockDrafter:
    return BlockDrafter(load_head(resolve(str(folder), None), target))


def _expected_q(name: str) -> Tensor:
    """q over the target's vocabulary, [N, K, V] for N anchors."""
    probs = GOLDEN[f"{name}: logits"].double().softmax(dim=-1)
    ids = golden.CASES[name].get("token_ids")
    if ids is None:
        return probs
    return torch.zeros(*probs.shape[:-1], golden.NUM_TOKENS, dtype=probs.dtype).index_copy(-1, torch.tensor(ids), probs)


@pytest.mark.parametrize("name", golden.CASES)
def test_q_is_that_of_the_packages(name: str, tmp_path: Path) -> None:
    """In rounds of the engine that begin at their anchors."""
    model = golden.target()
    golden.write(tmp_path, name, model)
    target = as_lm(model)
    drafter, expected = _head(tmp_path, target), _expected_q(name)
    k = drafter.most_drafted
    assert expected.shape[1] == k
    sequences = [(golden.TEXT[: at + 1], golden.TEXT[at + 1 : at + 2 + k]) for at in golden.ANCHORS]
    led = lead(target, drafter, sequences, k)
    for i, at in enumerate(golden.ANCHORS):
        _, ids, q = led.drafts[i, at + 1]
        assert ids == [*golden.TEXT[at + 1 : at + 1 + k]]
        assert (q - expected[i]).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in golden.CASES if f"{name}: confidence" in GOLDEN])
def test_a_draft_ends_where_confidence_is_low(name: str, tmp_path: Path) -> None:
    """Before the first token for which the package's is less."""
    model = golden.target()
    golden.write(tmp_path, name, model)
    target = as_lm(model)
    confidence = GOLDEN[f"{name}: confidence"]
    threshold = float(confidence[:, 0].median()) - 1e-4
    drafter = replace(_head(tmp_path, target), options=DraftOptions(min_confidence=threshold))
    k, found = drafter.most_drafted, []
    sequences = [(golden.TEXT[: at + 1], golden.TEXT[at + 1 : at + 2 + k]) for at in golden.ANCHORS]
    led = lead(target, drafter, sequences, k)
    for i, at in enumerate(golden.ANCHORS):
        _, ids, _ = led.drafts.get((i, at + 1), (k, [], None))
        assert len(ids) == int((confidence[i] >= threshold).long().cumprod(dim=0).sum())
        found.append(len(ids))
    assert 0 < sum(found) < len(found) * k


def test_only_some_heads_predict_acceptance() -> None:
    drafter = block_drafter(as_lm(tiny_llama(num_layers=4)))
    with pytest.raises(OptionError, match="does not predict acceptance"):
        replace(drafter, options=DraftOptions(min_confidence=0.5))


def test_least_confidence_in_a_name(tmp_path: Path) -> None:
    """It is that of the drafter and of its name; other heads and models refuse it, and block heads all others."""
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, layout="deepspec", markov="vanilla", has_confidence=True)
    decoder = outrider.load(model)
    name = f"{tmp_path}:min-confidence=0.4"
    drafter = load_drafter(decoder, name)
    assert isinstance(drafter, BlockDrafter) and drafter.options == DraftOptions(min_confidence=0.4)
    assert drafter.name == f"{drafter.head.name}:min-confidence=0.4"
    assert decoder.drafter.name == "none" and load_drafter(decoder, tmp_path).name == drafter.head.name
    for option, remedy in (
        ("greedy", "greedy of the draft = True is invalid: .* does not take it"),
        ("min-prob=0.3", "min-prob of the draft = 0.3 is invalid"),
        ("min-confidence=1", "min-confidence is a probability between 0 and 1"),
        ("min-confidence", "min-confidence"),
        ("min-confidence=0.4:min-confidence=0.5", "each once"),
        ("min-confidence=0.4:min-prob=0.5", "write min-prob before min-confidence"),
    ):
        with pytest.raises((OptionError, ModelNotFound), match=remedy):
            load_drafter(decoder, f"{tmp_path}:{option}")
    with pytest.raises(OptionError, match="min_confidence|min-confidence of the draft"):
        ModelDrafter(decoder.target, DraftOptions(min_confidence=0.4))
    with pytest.raises(OptionError, match="min_prob = 1"):
        DraftOptions(min_prob=1)


def test_the_cases_differ() -> None:
    """Or they would show nothing."""
    alike = [
        {"speculators", "speculators, from the anchor", "zlab", "deepspec"},
        {"speculators, vanilla", "deepspec, vanilla"},
        {"speculators, rnn", "deepspec, rnn"},
    ]
    found = {name: _expected_q(name)[:, -4:] for name in golden.CASES}  # those from the anchor have five
    for one, other in combinations(found, 2):
        is_same = bool((found[one] - found[other]).abs().max() < 1e-3)
        assert is_same == any({one, other} <= group for group in alike), (one, other)


KINDS: dict[str, dict[str, Any]] = {
    "zlab": {},
    "few tokens": {"layout": "speculators", "token_ids": [*range(0, 60, 2)]},
    "from the anchor": {"layout": "deepspec", "has_own_tokens": True},
    "dflash2": {"is_second": True},
    "dspark": {"layout": "speculators", "markov": "rnn", "token_ids": [*range(0, 60, 2)]},
}


@pytest.mark.pairwise
@pytest.mark.each_execution
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", KINDS)
def test_its_text_is_plain_text(kind: str, rule: Rule) -> None:
    """To the end of the context, where blocks reach beyond it."""
    target = as_lm(tiny_llama(num_layers=4, context_len=32), context_len=32)
    drafter = block_drafter(target, **KINDS[kind])
    prompts = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
    temperatures = [0.0, 1.3] if rule is GUMBEL else [0.0]
    for temperature in temperatures:
        requests = [
            request(ids, seed=10 + i, max_new_tokens=32 - len(ids), temperature=temperature)
            for i, ids in enumerate(prompts)
        ]
        plain = tokens(target, NoDrafter(), requests, rule, 0)
        assert tokens(target, drafter, requests, rule, drafter.most_drafted) == plain
        assert tokens(target, drafter, requests, rule, InTurn(3, 0, 0, 1)) == plain


@pytest.mark.parametrize(
    "kind", [{"is_second": True, "selector_top_k": 40}, {"layout": "speculators", "markov": "vanilla"}]
)
def test_a_padded_vocabulary(kind: dict[str, Any]) -> None:
    """Tokens beyond the vocabulary have an embedding, as mask tokens do, and are no candidates."""
    target = LM(tiny_llama(num_layers=4), name="target", vocab_size=40, context_len=256)
    drafter = block_drafter(target, **kind)
    requests = [request(ids, seed=i, max_new_tokens=20) for i, ids in enumerate(((5, 6, 7), (1,)))]
    plain = tokens(target, NoDrafter(), requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 4) == plain
    led = lead(target, drafter, [((5, 6, 7), range(8))], 4)
    _, ids, q = led.drafts[0, 3]
    assert ids == [0, 1, 2, 3] and q is not None and q.shape == (4, 40) and q.min() > 0


@pytest.mark.each_execution
def test_a_hybrid_target() -> None:
    """Its states wait at an anchor, so its hidden states come from other columns."""
    target = hybrid_lm(hybrid("qwen3_5_text"))
    drafter = block_drafter(target, is_second=True)
    requests = [request(ids, max_new_tokens=20, temperature=0.0) for ids in ((5, 6, 7) * 4, (1,), (2, 3) * 5)]
    plain = tokens(target, NoDrafter(), requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 4) == plain
    assert tokens(target, drafter, requests, GUMBEL, InTurn(3, 0, 0, 1)) == plain


def _train(drafter: BlockDrafter, target: LM, sequences: Tensor, first: int) -> None:
    """Train a head to predict sequences after each of their places from ``first`` on. [N, L]"""
    head: Any = drafter.head.model
    with torch.no_grad(), recorded_states(target.model, head.features) as states:
        target.model(sequences)
    features = torch.cat([states[i] for i in head.features], dim=-1)
    parameters = [one for name, one in head.named_parameters() if not name.startswith(("embed_tokens.", "lm_head."))]
    for one in parameters:
        one.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    k, length = head.most_drafted, sequences.shape[1]
    for _ in range(200):
        of = torch.randint(len(sequences), (32,), generator=generator)
        anchors = torch.randint(first, length - k, (32, 1), generator=generator)
        cache = drafter.head.new_cache(32, length + k)
        places = torch.arange(length).expand(32, -1)
        places = torch.where(places < anchors, places, -1)
        cache.at(places, cache.capacity, is_single=False)
        head.keep(head.fuse(features[of]), places, cache.argument)
        blocks = cache, sequences[of].gather(1, anchors), anchors[:, 0] + 1, torch.ones(32, dtype=torch.long)
        logits = block._block_step(drafter.head, cache.capacity, k, *blocks)[0]
        wanted = sequences[of].gather(1, anchors + 1 + torch.arange(k))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for one in parameters:
        one.requires_grad_(False)


def test_a_trained_head_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its context is a place late: its text is the same then, and no other test would see it."""
    target = as_lm(tiny_llama(num_layers=4, vocab_size=24).float())
    drafter = block_drafter(target, scale=0.1)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(24, (4, 5), generator=generator).tolist()
    requests = [request(ids, max_new_tokens=35, temperature=0.0) for ids in prompts]
    plain = tokens(target, NoDrafter(), requests, GUMBEL, 0)
    _train(drafter, target, torch.tensor([[*ids, *more] for ids, more in zip(prompts, plain, strict=True)]), 4)

    def tau() -> float:
        outputs = run(target, drafter, requests, GUMBEL, 4)
        assert [output.token_ids for output in outputs] == plain
        return sum((output.stats for output in outputs), Stats()).mean_acceptance_length

    assert tau() > 4.5
    keep = block.BlockSession._keep
    monkeypatch.setattr(
        block.BlockSession,
        "_keep",
        lambda self, cache, features, at: keep(self, cache, features, torch.where(at >= 0, at + 1, at)),
    )
    assert tau() < 1.5


WORDS = [chr(97 + i // 10) + chr(97 + i % 10) for i in range(NUM_WORDS)]


def _loaded(folder: Path, acceptance: str = "gumbel", **options: Any) -> outrider.Decoder:
    model = random_llama(num_layers=4)
    write_block(folder, model, **options)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[-1])
    return outrider.load(model, folder, tokenizer=tokenizer, acceptance=acceptance)


def test_a_folder_is_loaded_as_a_draft(tmp_path: Path) -> None:
    """Constraints mask its drafts one by one."""
    decoder = _loaded(tmp_path)
    assert decoder.drafter.most_drafted == 4
    for options in ({"max_new_tokens": 30}, {"regex": "(ah|aj|bb|jf){8}", "max_new_tokens": 20}):
        given: dict[str, Any] = {"temperature": 1.3, "seed": 4, **options}
        got, plain = decoder.generate(["ab ac", "ad"], **given), decoder.plain().generate(["ab ac", "ad"], **given)
        assert [one.token_ids for one in got] == [one.token_ids for one in plain]
        assert sum(one.stats.num_draft_tokens for one in got) > 10
    assert sum(one.stats.num_accepted_draft_tokens for one in got) > 0  # there are only four tokens


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_the_distribution_is_the_targets(kind: str) -> None:
    """With drafts that end where confidence is low, too."""
    options: dict[str, dict[str, Any]] = {
        "dflash": {"token_ids": [0, 1, 2, 4, 5]},
        "dflash2": {"is_second": True, "selector_top_k": 3},
        "dspark": {"layout": "speculators", "markov": "rnn", "has_confidence": True},
    }
    target = as_lm(tiny_llama(vocab_size=6, num_layers=4))
    drafter = block_drafter(target, **options[kind])
    if kind == "dspark":
        drafter = replace(drafter, options=DraftOptions(min_confidence=0.7))
    assert law_z(target, drafter, BLOCK, (3, 1, 2), k=3, num_samples=2500) < 5


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "tensors", "error", "message"),
    [
        ({}, {"refiner.weight": torch.zeros(2)}, ModelCorrupt, "1 weights that do not belong .* refiner.weight"),
        (
            {},
            {"layers.1.mlp_conv.base_kernel": torch.zeros(2, 2, 32)},
            ModelCorrupt,
            "1 weights that do not belong .* layers.1.mlp_conv.base_kernel",
        ),
        ({}, {"layers.0.attention_conv.strange": torch.zeros(2)}, ModelCorrupt, "lacks weights .* base_kernel"),
        ({"speculators_model_type": "xpress"}, {}, UnsupportedModel, "of the kind xpress, which is not known"),
        ({"selector_rank": 8}, {}, ModelCorrupt, r"no weights candidate_selector.\*"),
        ({"markov_rank": 8}, {}, ModelCorrupt, r"no weights markov_head.\*, although .* markov_rank"),
        ({"num_hidden_layers": 3}, {}, ModelCorrupt, "lacks 11 weights"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, {}, ModelCorrupt, "no mask token that .*: None"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4], "mask_token_id": 3}}, {}, ModelCorrupt, "reads layers"),
        ({"dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3}}, {}, ModelCorrupt, "for another target"),
        ({}, {"lm_head.weight": torch.zeros(50, 32)}, ModelCorrupt, "50 tokens, and no d2t"),
        ({}, {"d2t": torch.zeros(60, dtype=torch.long)}, ModelCorrupt, "a d2t and no LM head of its own"),
        (
            {},
            {"markov_head.markov_w1.weight": torch.zeros(59, 3), "markov_head.markov_w2.weight": torch.zeros(60, 3)},
            ModelCorrupt,
            "knows 59 tokens; target has 60",
        ),
    ],
)
def test_others_are_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model)
    _change(tmp_path, **changes)
    add_tensors(tmp_path, tensors)
    with pytest.raises(error, match=message):
        _head(tmp_path, as_lm(model))


def test_layers_are_spread_where_they_are_not_named(tmp_path: Path) -> None:
    """As in the first checkpoints."""
    model = tiny_llama(num_layers=8)
    write_block(tmp_path, model, num_layers=3, dflash_config={"mask_token_id": 5})
    assert _head(tmp_path, as_lm(model)).features == (2, 4, 6)
