"""LiLiCorr: its lattice beside a slow twin, and its anchor in rounds of the engine. (Its contract is in
test_contract.py.)

The twin follows the formulas of ``modeling_lilicorr`` in NVIDIA's Model-Optimizer: with PyTorch's own attention, and
one pair of candidates after the other.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from block_heads import write_block
from contract import lead
from outrider.drafters.heads import head_drafter
from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.few_tokens import with_few_tokens
from outrider.models.heads.lattice import Lattice
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from toys import as_lm, tiny_llama

SLOTS, CANDIDATES = 4, 3
TEXT = [3, 17, 5, 40, 8, 8, 21, 59, 2, 11]


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(functional.normalize(first, dim=0, eps=1e-4) @ functional.normalize(second, dim=0, eps=1e-4))


def _norm(values: Tensor, weight: Tensor) -> Tensor:
    return values / (values.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def _twin(
    part: dict[str, Tensor], logits: Tensor, outputs: Tensor, embedding: Tensor, anchor: Tensor | None
) -> tuple[list[list[int]], Any]:
    """Candidates of each slot, and a function: (slot, index of the candidate before, of the candidate) -> score."""

    def linear(name: str, values: Tensor) -> Tensor:
        return functional.linear(values, part[f"{name}.weight"], part[f"{name}.bias"])

    ids = [row.argsort(descending=True)[:CANDIDATES].tolist() for row in logits]
    nodes = []
    for slot, row in enumerate(logits.log_softmax(dim=-1)):
        for rank, token in enumerate(ids[slot]):
            share = rank / (CANDIDATES - 1)
            facts = torch.stack([row[token], row[token].exp(), row[token] - row.max()])
            facts = torch.cat((facts, torch.tensor([share, float(rank == 0)], dtype=facts.dtype)))
            facts = functional.layer_norm(facts, (5,), part["feature_mlp.0.weight"], part["feature_mlp.0.bias"])
            node = linear("token_proj", embedding[token]) + linear("pass_hidden_proj", outputs[slot])
            node = node + linear("feature_mlp.3", functional.silu(linear("feature_mlp.1", facts)))
            nodes.append(node + part["slot_embedding"][0, 0, slot, 0] + part["rank_embedding"][0, 0, 0, rank])
    hidden = torch.stack(nodes)
    slots = [slot for slot in range(SLOTS) for _ in range(CANDIDATES)]
    relative, same = part["relative_slot_bias"], part["same_slot_bias"]
    rows = [torch.stack([relative[:, a - b + SLOTS] + (a == b) * same for b in slots]) for a in slots]
    bias = torch.stack(rows)  # [N, N, heads]
    for i in range(2):
        own = {name.removeprefix(f"layers.{i}."): value for name, value in part.items()}
        attention = nn.MultiheadAttention(12, 2, batch_first=True, dtype=torch.float64).eval()
        attention.load_state_dict({name[5:]: value for name, value in own.items() if name.startswith("attn.")})
        normed = _norm(hidden, own["attn_norm.weight"])[None]
        hidden = hidden + attention(normed, normed, normed, attn_mask=bias.permute(2, 0, 1), need_weights=False)[0][0]
        inner = functional.silu(linear(f"layers.{i}.mlp.0", _norm(hidden, own["mlp_norm.weight"])))
        hidden = hidden + linear(f"layers.{i}.mlp.2", inner)
    hidden = _norm(hidden, part["output_norm.weight"])
    state = torch.zeros(12, dtype=torch.float64) if anchor is None else linear("context_proj", anchor)
    state = _norm(state, part["anchor_norm.weight"])
    factors = [functional.silu(linear("factor_input_proj", torch.cat((node, state, node * state)))) for node in hidden]

    def score(slot: int, before: int, candidate: int) -> float:
        incoming = linear("in_head", factors[slot * CANDIDATES + candidate])
        if slot == 0:
            return 3 * _cosine(linear("anchor_out_head", state), incoming)
        return 3 * _cosine(linear("out_head", factors[(slot - 1) * CANDIDATES + before]), incoming)

    return ids, score


@torch.inference_mode()
def test_the_lattice_equals_its_twin(tmp_path: Path) -> None:
    write_block(tmp_path, tiny_llama(num_layers=4), num_candidates=CANDIDATES)
    found = load_file(tmp_path / "model.safetensors")
    part = {name.removeprefix("lilicorr."): value for name, value in found.items() if name.startswith("lilicorr.")}
    lattice = Lattice(part, 32, CANDIDATES, eps=1e-6, vector_eps=1e-4, logit_scale=3.0).double().eval()
    lattice.load_state_dict(part)
    generator = torch.Generator().manual_seed(0)
    logits, outputs, anchors, embedding = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, SLOTS, 60), (2, SLOTS, 32), (2, 32), (60, 32))
    )
    state = lattice.start(logits, outputs, lambda ids: embedding[ids], anchors, torch.tensor([True, False]))
    paths = [(0, 1, 2, 0), (2, 2, 0, 1)]
    twins = [_twin(part, logits[row], outputs[row], embedding, anchors[row] if row == 0 else None) for row in range(2)]
    before = torch.tensor([7, 7])
    for slot in range(SLOTS):
        here, *state = lattice(logits[:, slot], outputs[:, slot], before, *state)
        for row, (ids, score) in enumerate(twins):
            want = [score(slot, paths[row][slot - 1], candidate) for candidate in range(CANDIDATES)]
            assert torch.allclose(here[row, ids[slot]], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)
            assert int((here[row] > -100).sum()) == CANDIDATES
        before = torch.tensor([ids[slot][path[slot]] for (ids, _), path in zip(twins, paths, strict=True)])


def test_the_anchor_is_the_state_of_the_token_before_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejections, too; a single token has none."""
    target = as_lm(tiny_llama(num_layers=4))
    write_block(tmp_path, target.model, num_candidates=CANDIDATES)
    head = load_head(resolve(str(tmp_path), None), target)
    given: list[tuple[Tensor, Tensor]] = []
    start = Lattice.start

    def noted(self: Lattice, *arguments: Any) -> Any:
        given.append(arguments[3:])
        return start(self, *arguments)

    monkeypatch.setattr(Lattice, "start", noted)
    drawn = [token if i % 3 else (token + 1) % 60 for i, token in enumerate(TEXT)]  # some are rejected
    led = lead(target, head_drafter(head), [(TEXT[:1], TEXT[1:])], 3, drawn=[drawn])
    with torch.inference_mode():
        states = target.model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        fused = head.model.fuse(torch.cat([states[i] for i in head.model.features], dim=-1))[0]
    lengths = [length for _, length in sorted(led.drafts)]
    assert lengths[0] == 1 and len(lengths) > 2 and len(given) >= len(lengths)
    for length, (anchor, has_anchor) in zip(lengths, given, strict=False):
        assert bool(has_anchor) == (length > 1)
        assert length == 1 or torch.allclose(anchor[0], fused[length - 2], rtol=0, atol=1e-12), length


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_candidates": 70}, ModelCorrupt, r"chooses among 70 candidates \(lilicorr_candidate_topk\)"),
        ({"token_ids": [*range(1, 60, 2)]}, UnsupportedModel, "a reduced vocabulary, which DFlash 2 and LiLiCorr"),
    ],
)
def test_others_are_refused(changes: dict[str, Any], error: type, message: str, tmp_path: Path) -> None:
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, **{"num_candidates": CANDIDATES} | changes)
    with pytest.raises(error, match=message):
        load_head(resolve(str(tmp_path), None), as_lm(model))


def test_few_tokens_are_refused(tmp_path: Path) -> None:
    """Rows of an LM head of few tokens are not the ids whose embeddings the lattice reads."""
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, num_candidates=CANDIDATES)
    head = load_head(resolve(str(tmp_path), None), as_lm(model))
    with pytest.raises(UnsupportedModel, match="is a LiLiCorr head, .*: leave out vocab="):
        with_few_tokens(head, torch.arange(9))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lilicorr_logit_scale", None, "states no lilicorr_logit_scale"),
        ("lilicorr_enabled", False, "says that they are not used"),
        ("lilicorr_candidate_topk", 9, "chooses among 9 candidates"),
        ("block_size", 4, "drafts 3 tokens, and its lilicorr.* is for 4"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    model = tiny_llama(num_layers=4)
    write_block(tmp_path, model, num_candidates=CANDIDATES)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    place = stated if field == "block_size" else stated["dflash_config"]
    place[field] = value
    path.write_text(json.dumps(stated))
    with pytest.raises((ModelCorrupt, UnsupportedModel), match=message):
        load_head(resolve(str(tmp_path), None), as_lm(model))
