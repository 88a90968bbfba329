"""Block heads: DFlash, DFlash 2 and DSpark in their layouts."""

import json
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
from block_heads import add_tensors, tiny_block_drafter, write_block
from contract import lead
from outrider.api import load_drafter
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.heads import head_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import ModelCorrupt, ModelNotFound, OptionError, UnsupportedModel
from outrider.models.heads.block import Reach
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL
from pairs import NUM_WORDS, random_llama
from toys import InTurn, as_lm, request, tiny_llama, tokens

GOLDEN = load_file(golden.FILE)


def _head(folder: Path, target: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    return head_drafter(load_head(resolve(str(folder), None), target), options)


def _expected_q(name: str) -> Tensor:
    """q over the target's vocabulary, [N, K, V] for N anchors."""
    probs = GOLDEN[f"{name}: logits"].double().softmax(dim=-1)
    ids = golden.CASES[name].get("token_ids")
    if ids is None:
        return probs
    return torch.zeros(*probs.shape[:-1], golden.NUM_TOKENS, dtype=probs.dtype).index_copy(-1, torch.tensor(ids), probs)


def _led(folder: Path, name: str, options: DraftOptions = NO_OPTIONS) -> tuple[int, list[Any]]:
    """The most drafted tokens; and drafts in rounds of the engine that begin at the anchors, with q."""
    model = golden.target()
    golden.write(folder, name, model)
    target = as_lm(model)
    drafter = _head(folder, target, options)
    k = drafter.most_drafted
    sequences = [(golden.TEXT[: at + 1], golden.TEXT[at + 1 : at + 2 + k]) for at in golden.ANCHORS]
    led = lead(target, drafter, sequences, k)
    return k, [led.drafts.get((i, at + 1), (k, [], None))[1:] for i, at in enumerate(golden.ANCHORS)]


@pytest.mark.parametrize("name", golden.CASES)
def test_q_is_that_of_the_packages(name: str, tmp_path: Path) -> None:
    k, drafts = _led(tmp_path, name)
    expected = _expected_q(name)
    assert expected.shape[1] == k
    for at, (ids, q), want in zip(golden.ANCHORS, drafts, expected, strict=True):
        assert ids == [*golden.TEXT[at + 1 : at + 1 + k]]
        assert (q - want).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in golden.CASES if f"{name}: confidence" in GOLDEN])
def test_a_draft_ends_where_confidence_is_low(name: str, tmp_path: Path) -> None:
    """Before the first token for which the package's is less."""
    confidence = GOLDEN[f"{name}: confidence"]
    threshold = float(confidence[:, 0].median()) - 1e-4
    k, drafts = _led(tmp_path, name, DraftOptions(min_confidence=threshold))
    found = [len(ids) for ids, _ in drafts]
    assert found == (confidence >= threshold).long().cumprod(dim=1).sum(dim=1).tolist()
    assert 0 < sum(found) < len(found) * k


def test_least_confidence_in_a_name(tmp_path: Path) -> None:
    """It is that of the drafter and of its name; other heads and models refuse it, and block heads all others."""
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, layout="deepspec", markov="vanilla", has_confidence=True)
    decoder = outrider.load(model)
    name = f"{tmp_path}:min-confidence=0.4"
    drafter = load_drafter(decoder, name)
    assert drafter.most_drafted is not None
    assert drafter.name == f"{drafter.models[0].name}:min-confidence=0.4"
    assert decoder.drafter.name == "none" and load_drafter(decoder, tmp_path).name == drafter.models[0].name
    for option, remedy in (
        ("greedy", "greedy of the draft = True is invalid: .* does not take it"),
        ("min-prob=0.3", "min-prob of the draft = 0.3 is invalid"),
        ("min-confidence=1", "min-confidence is a probability between 0 and 1"),
        ("min-confidence", "min-confidence"),
        ("min-confidence=0.4:min-confidence=0.5", "give min-confidence once"),
    ):
        with pytest.raises((OptionError, ModelNotFound), match=remedy):
            load_drafter(decoder, f"{tmp_path}:{option}")
    with pytest.raises(OptionError, match="min_confidence|min-confidence of the draft"):
        model_drafter(decoder.target, DraftOptions(min_confidence=0.4))
    with pytest.raises(OptionError, match="min_prob = 1"):
        DraftOptions(min_prob=1)
    with pytest.raises(OptionError, match="does not predict acceptance"):
        head_drafter(tiny_block_drafter(as_lm(model)).models[0], DraftOptions(min_confidence=0.5))


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
    "few tokens": {"layout": "speculators", "token_ids": [*range(0, 60, 2)]},
    "from the anchor": {"layout": "deepspec", "has_own_tokens": True},
    "dflash2": {"is_second": True},
    "dspark": {"layout": "speculators", "markov": "rnn", "token_ids": [*range(0, 60, 2)]},
}


@pytest.mark.each_execution
@pytest.mark.parametrize("kind", KINDS)
def test_its_text_is_plain_text(kind: str) -> None:
    """To the end of the context, where blocks reach beyond it."""
    target = as_lm(tiny_llama(num_layers=4, context_len=32), context_len=32)
    drafter = tiny_block_drafter(target, **KINDS[kind])
    prompts = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
    requests = [request(ids, seed=10 + i, max_new_tokens=32 - len(ids)) for i, ids in enumerate(prompts)]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, drafter.most_drafted) == plain
    assert tokens(target, drafter, requests, GUMBEL, InTurn(3, 0, 0, 1)) == plain


@pytest.mark.parametrize(
    "kind", [{"is_second": True, "selector_top_k": 40}, {"layout": "speculators", "markov": "vanilla"}]
)
def test_a_padded_vocabulary(kind: dict[str, Any]) -> None:
    """Tokens beyond the vocabulary have an embedding, as mask tokens do, and are no candidates."""
    target = LM(tiny_llama(num_layers=4), name="target", vocab_size=40, context_len=256)
    drafter = tiny_block_drafter(target, **kind)
    requests = [request(ids, seed=i, max_new_tokens=20) for i, ids in enumerate(((5, 6, 7), (1,)))]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 4) == plain
    led = lead(target, drafter, [((5, 6, 7), range(8))], 4)
    _, ids, q = led.drafts[0, 3]
    assert ids == [0, 1, 2, 3] and q is not None and q.shape == (4, 40) and q.min() > 0


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
        ({"use_swa": True}, {}, UnsupportedModel, "layers of type sliding_attention with the window None"),
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


def test_windows_of_both_sides(tmp_path: Path) -> None:
    """Of all layers, or of those that are named (TensorRT-LLM's ``dspark_layer_window_size``)."""
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, use_swa=True, swa_window_size=3)
    assert _head(tmp_path, as_lm(model)).models[0].model.reaches == [Reach(False, 3), Reach(False, 3)]
    kinds = ["full_attention", "sliding_attention"]
    write_block(tmp_path, model, use_swa=True, layers={"layer_types": kinds, "sliding_window": 4})
    assert _head(tmp_path, as_lm(model)).models[0].model.reaches == [Reach(False), Reach(False, 4)]


def test_layers_are_spread_where_they_are_not_named(tmp_path: Path) -> None:
    """As in the first checkpoints."""
    model = tiny_llama(num_layers=8)
    write_block(tmp_path, model, num_layers=3, dflash_config={"mask_token_id": 5})
    assert _head(tmp_path, as_lm(model)).features == (2, 4, 6)
