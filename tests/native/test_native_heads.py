"""Heads on the native engine: what the engine gives is what their modules give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import write_eagle3, write_mtp
from native_cases import VOCAB, random_model
from outrider.drafters import chains
from outrider.models.executions import beside
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.registry import ModelSpec
from outrider.runtime.lm import LM

_NUM, _STEPS = 11, 3
_EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "no embedding, few tokens": {"has_embedding": False, "token_ids": [*range(1, 90, 3)]},
    "normed residual": {"norm_before_residual": True, "num_layers": 2},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "layout": "specforge"},
    "normed features": {"norm_before_fc": True, "layout": "safeailab"},
    "a short context": {"context_len": 4, "num_layers": 2},
    "a window": {"window": 4, "num_layers": 2},
}


def _target(family: str, **fields: Any) -> LM:
    model = random_model(family, {"num_hidden_layers": 4, "hidden_size": 48} | fields)
    return build_lm(Checkpoint("target", model, tokenizer=None, execution="native"), VOCAB)


@torch.inference_mode()
def _results(head: LM, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and states of drafts along given tokens. [B, _STEPS, V], [B, _STEPS, H]"""
    cache = head.new_cache(len(ids), 64)
    positions = torch.arange(_NUM).repeat(len(ids), 1)
    chains.keep_states(head, cache, features, positions)
    found, tokens, states = [], ids[:, 1 : _NUM + 1], chains.stored_states(cache, positions)
    positions[0, :2] = -1  # a shorter sequence
    for step in range(_STEPS):
        logits, states = chains.feed_entries(head, 64, 1, cache, tokens, states, positions)
        states, tokens, positions = states[:, -1:], ids[:, _NUM + step + 1, None], positions[:, -1:] + 1
        found.append((logits, states))
    logits, states = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return logits, states


def _check(head: LM, target: LM) -> None:
    native = beside(head, target)
    assert native.native is not None and head.native is None
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


@pytest.mark.parametrize("case", _EAGLE3)
def test_eagle3(case: str, tmp_path: Path) -> None:
    target = _target("llama")
    write_eagle3(tmp_path, target.model, **_EAGLE3[case])
    spec = ModelSpec(name="head", path=tmp_path)
    _check(load_head(spec, target, allow_pickle=True), target)


@pytest.mark.parametrize(("family", "layout"), [("llama", "deepseek"), ("qwen3", "qwen"), ("glm4", "deepseek")])
def test_mtp(family: str, layout: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False}
    write_mtp(tmp_path, _target(family, **fields).model, layout=layout)
    target = _target(family, **fields)
    target.model.config._name_or_path = str(tmp_path)
    _check(load_mtp_of(target), target)
