"""Heads on the native engine: what the engine gives is what their modules give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_heads import write_block
from heads import write_eagle3, write_mtp
from native_cases import VOCAB, random_model
from outrider.drafters import heads
from outrider.models.executions import beside
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.registry import ModelSpec
from outrider.runtime.lm import LM

_NUM, _STEPS = 11, 3
_EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "no embedding, few tokens": {"has_embedding": False, "token_ids": [*range(1, 90, 3)]},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "layout": "specforge"},
    "normed features and residual": {"norm_before_fc": True, "norm_before_residual": True, "layout": "safeailab"},
    "a window": {"window": 4, "num_layers": 2},
}
_OTHERS = ("qwen3", "gemma3_text", "granite")
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
_BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "its own tokens, few": {"layout": "speculators", "token_ids": [*range(1, 90, 3)]},
    "windows": {"layers": _WINDOW, "input_embedding_scale": 3.0, "output_multiplier": 0.5},
    "a long window": {"layers": _WINDOW | {"sliding_window": 7}, "block_size": 9, "is_causal": False},
    "from the anchor": {"layout": "speculators", "sample_from_anchor": True, "final_logit_softcapping": 5.0},
}


def _target(family: str, **fields: Any) -> LM:
    model = random_model(family, {"num_hidden_layers": 4, "hidden_size": 48} | fields)
    return build_lm(Checkpoint("target", model, tokenizer=None, execution="native"), VOCAB)


@torch.inference_mode()
def _results(head: LM, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and states of drafts along given tokens. [B, _STEPS, V], [B, _STEPS, H]"""
    cache = head.new_cache(len(ids), 64)
    positions = torch.arange(_NUM).repeat(len(ids), 1)
    heads.keep_states(head, cache, features, positions)
    found, tokens, states = [], ids[:, 1 : _NUM + 1], heads.stored_states(cache, positions)
    positions[0, :2] = -1  # a shorter sequence
    for step in range(_STEPS):
        logits, states = heads.feed_entries(head, 64, 1, cache, tokens, states, positions)
        states, tokens, positions = states[:, -1:], ids[:, _NUM + step + 1, None], positions[:, -1:] + 1
        found.append((logits, states))
    logits, states = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return logits, states


def _check(head: LM, target: LM) -> None:
    native = beside(head, target)
    assert native.backend.is_batch_invariant and not head.backend.is_batch_invariant
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (3, 20), generator=random)
    features = torch.randn(3, _NUM, len(head.model.features) * target.model.config.hidden_size, generator=random)
    found, expected = _results(native, ids, features), _results(head, ids, features)
    for mine, its in zip(found, expected, strict=True):
        known = its > -1000  # other tokens than the head's
        assert torch.equal(mine[~known], its[~known])
        assert (mine - its)[known].abs().max() < 1e-4 * its[known].std() and its[known].std() > 0.05
    alone = _results(native, ids[:1], features[:1])
    assert all(torch.equal(mine[:1], other) for mine, other in zip(found, alone, strict=True))


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("llama", case) for case in _EAGLE3), *((one, "no embedding, few tokens") for one in _OTHERS)],
)
def test_native_eagle3_heads(family: str, case: str, tmp_path: Path) -> None:
    """The head is a Llama's; the embedding is the target's, with what it multiplies."""
    target = _target(family, **({"head_dim": 12} if family == "gemma3_text" else {}))
    write_eagle3(tmp_path, target.model, **_EAGLE3[case])
    _check(load_head(ModelSpec(name="head", path=tmp_path), target, allow_pickle=True), target)


@pytest.mark.parametrize(("family", "layout"), [("llama", "deepseek"), ("qwen3", "qwen"), ("glm4", "deepseek")])
def test_native_mtp_heads(family: str, layout: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False}
    write_mtp(tmp_path, _target(family, **fields).model, layout=layout)
    target = _target(family, **fields)
    target.model.config._name_or_path = str(tmp_path)
    _check(load_mtp_of(target), target)


@torch.inference_mode()
def _block_results(head: LM, context: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    session = heads.head_drafter(head).open(len(lengths), 64, torch.device("cpu"), 4)
    assert isinstance(session, heads.BlockSession)
    places = torch.arange(context.shape[1]).expand(len(lengths), -1)
    counts = torch.tensor(lengths)
    heads.keep_block(head, session._cache, context, torch.where(places < counts[:, None] - 1, places, -1))
    last_id = torch.arange(5, 5 + len(lengths))
    num_drafted = torch.tensor([2, 0, 3])[: len(lengths)]
    k = head.model.most_drafted
    logits, outputs = heads.feed_blocks(head, 64, k, session._cache, last_id, counts, num_drafted)
    return logits[num_drafted > 0], outputs[num_drafted > 0]


@pytest.mark.parametrize("case", _BLOCKS)
def test_native_block_heads(case: str, tmp_path: Path) -> None:
    """Of rows with contexts of different lengths, one of which does not draft; and of the first row alone."""
    target = _target("llama")
    write_block(tmp_path, target.model, **_BLOCKS[case])
    head = load_head(ModelSpec(name="head", path=tmp_path), target)
    native = beside(head, target)
    assert native.backend.is_batch_invariant and not head.backend.is_batch_invariant
    context = torch.randn(3, 30, 3 * 48, generator=torch.Generator().manual_seed(0))
    found, expected = (_block_results(one, context, [30, 12, 3]) for one in (native, head))
    for mine, its in zip(found, expected, strict=True):
        assert (mine - its).abs().max() < 1e-4 * its.std() and its.std() > 0.05
    alone = _block_results(native, context[:1], [30])
    assert all(torch.equal(mine[:1], other) for mine, other in zip(found, alone, strict=True))


def test_native_heads_without_a_plan_run_eagerly(tmp_path: Path) -> None:
    target = _target("llama")
    for name, options in (("convolutions", {"is_second": True}), ("long", {"block_size": 200})):
        write_block(tmp_path / name, target.model, **options)
        assert (
            beside(load_head(ModelSpec(name="head", path=tmp_path / name), target), target).backend.is_batch_invariant
            is False
        )
