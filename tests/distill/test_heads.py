"""Training of EAGLE-3 heads: unrolling is inference, and a trained head drafts what its target generates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.distill.chains import ChainStudent, new_eagle3, unrolled
from outrider.distill.data import Mixture
from outrider.distill.heads import default_features, most_frequent
from outrider.distill.recipe import Budget, Recipe
from outrider.distill.train import distil
from outrider.drafters import chain
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.chain import ChainDrafter
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.records import Stats
from outrider.runtime.hidden_states import recorded_states
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from outrider.scoring.teacher_forcing import Text
from toys import as_lm, request, run, tiny_llama

K = 4
PROMPTS = torch.randint(60, (8, 4), generator=torch.Generator().manual_seed(0))
NUM_NEW = 40  # eight rounds of K + 1 tokens


def target_lm(**options: Any) -> LM:
    """A random Llama in float32, whose next token depends on the whole text."""
    return as_lm(tiny_llama(0, num_layers=4, **options).float())


def random_head(target: LM, token_ids: Tensor | None = None) -> ChainStudent:
    head = new_eagle3(target, token_ids, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return ChainStudent(target, head, K)


def generated(target: LM, drafter: Drafter, k: int) -> tuple[Tensor, Stats]:
    """Greedy texts with their prompts, and the counts of all rounds."""
    requests = [request(prompt, max_new_tokens=NUM_NEW, temperature=0.0) for prompt in PROMPTS.tolist()]
    outputs = run(target, drafter, requests, BLOCK, k)
    ids = torch.cat((PROMPTS, torch.tensor([output.token_ids for output in outputs])), dim=1)
    return ids, sum((output.stats for output in outputs), Stats())


@torch.no_grad()
def test_unrolled_is_inference() -> None:
    """Each round of each length, fed to the cache of a session entry by entry: the same logits."""
    target = as_lm(tiny_llama(0, num_layers=4))  # float64
    drafter = random_head(target).as_stored("head", torch.float32)
    head: Any = drafter.head.model
    ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(2))
    steps = [logits for _, logits in unrolled(head, target, ids, K)]
    assert [logits.shape[1] for logits in steps] == [11, 10, 9, 8]
    with recorded_states(target.model, head.features) as found:
        target.model(input_ids=ids, use_cache=False)
    states = head.fuse(torch.cat([found[i] for i in head.features], dim=-1))
    for first in range(11):
        cache = drafter.head.new_cache(1, 20)
        fed, state, positions = ids[:, 1 : first + 2], states[:, : first + 1], torch.arange(first + 1)[None]
        for d in range(min(K, 11 - first)):
            logits, outputs = chain._feed(drafter.head, 20, cache, fed, state, positions, num_logits=1)
            torch.testing.assert_close(logits[:, -1], steps[d][:, first], rtol=0, atol=1e-10)
            fed, state, positions = ids[:, first + 2 + d :][:, :1], outputs[:, -1:], positions[:, -1:] + 1


@pytest.mark.parametrize("token_ids", [None, [1, 4, 7, 30, 59]], ids=["all", "reduced"])
def test_alpha_is_the_overlap_with_a_q_of_the_whole_vocabulary(token_ids: list[int] | None) -> None:
    target = target_lm()
    student = random_head(target, None if token_ids is None else torch.tensor(token_ids))
    texts = [
        Text(ids, given) for ids, given in zip(PROMPTS.repeat(1, 3).tolist(), (1, 2, 3, 4, 5, 6, 7, 8), strict=True)
    ]
    drafter = student.as_stored("head", torch.float32)
    found = student.alphas(drafter, texts)
    head: Any = drafter.head.model
    kept = list(range(60)) if token_ids is None else token_ids
    for d, alpha in enumerate(found):
        values = []
        for text in texts:
            with torch.no_grad():
                p, q = list(unrolled(head, target, torch.tensor([text.ids]), K))[d]
            for i, (mine, its) in enumerate(zip(p[0].softmax(-1), q[0].softmax(-1), strict=True)):
                if i + 2 >= text.num_given:
                    values.append(sum(min(float(mine[v]), float(its[j])) for j, v in enumerate(kept)))
        assert alpha.value == pytest.approx(sum(values) / len(values), abs=1e-6)


@pytest.mark.slow
def test_a_head_learns_its_target(tmp_path: Path) -> None:
    """Trained on greedy texts, by the recipe of users: it drafts nearly all of them; with the target's states one place
    late, nearly nothing. (At K = 4 a round commits at most 5 tokens.)"""
    target = target_lm(initializer_range=0.5)
    model: Any = target.model
    model.lm_head.weight.mul_(4.0)  # a sharp distribution, so that the greedy token is most of it
    ids, _ = generated(target, NoDrafter(), 0)
    student = ChainStudent(target, new_eagle3(target, None, seed=0), K)
    recipe = Recipe(batch_size=16, learning_rate=1e-2, patience=20, save_s=1e9)
    held_out = [Text(row, 4) for row in ids.tolist()]
    checks = distil(
        student, tmp_path, Mixture(None, ids, 44, 1.0, 0), held_out, recipe, Budget(350), save_dtype=torch.float32
    )
    assert len(checks[-1].alphas) == K and checks[-1].mean_alpha > 0.8 > 0.4 > checks[0].mean_alpha

    drafter = ChainDrafter(load_head(resolve(str(tmp_path)), target))
    with_head, stats = generated(target, drafter, K)
    assert torch.equal(with_head, ids)
    assert stats.mean_acceptance_length >= 4.5
    keep_states = chain._keep_states

    def keep_late(head: LM, cache: Any, features: Tensor, positions: Tensor) -> None:
        keep_states(head, cache, features, torch.where(positions < 0, -1, positions + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "_keep_states", keep_late)
        with_late, stats = generated(target, drafter, K)
    assert torch.equal(with_late, ids)
    assert stats.mean_acceptance_length <= 1.5


def test_the_head_that_is_judged_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """With a reduced vocabulary, in bfloat16: from the file as in training."""
    target = target_lm()
    student = random_head(target, torch.tensor([2, 3, 5, 41]))
    student.save(tmp_path, torch.bfloat16)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["draft_vocab_size"] == 4
    assert stated["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any("embed_tokens" in name for name in tensors)
    assert tensors["d2t"].tolist() == [2, 2, 3, 38]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 3, 5, 41]
    heads: list[Any] = [
        lm.model for lm in (load_head(resolve(str(tmp_path)), target), student.as_stored("h", torch.bfloat16).head)
    ]
    assert heads[0].features == heads[1].features == default_features(4)
    with torch.no_grad():
        pairs = zip(*(unrolled(head, target, PROMPTS, 2) for head in heads), strict=True)
        assert all(torch.equal(one[1], other[1]) for one, other in pairs)


def test_layers_and_tokens_that_a_head_knows() -> None:
    assert [default_features(n) for n in (32, 8, 7)] == [(2, 16, 29), (2, 4, 5), (2, 3, 4)]
    assert [default_features(n) for n in (6, 4, 2, 1)] == [(1, 3, 5), (1, 2, 3), (1, 1, 1), (0, 0, 0)]
    assert most_frequent(torch.tensor([0, 5, 2, 9, 5, 0]), 3).tolist() == [1, 3, 4]
    assert most_frequent(torch.tensor([0, 5, 2, 9, 5, 0]), 5).tolist() == [0, 1, 2, 3, 4]
