"""Training of DFlash heads: its blocks are those of inference, and a trained head drafts what its target generates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from contract import lead
from outrider.distill.blocks import BlockStudent, default_layers, drafted_blocks, mask_token, new_dflash
from outrider.distill.data import Mixture
from outrider.distill.recipe import Budget, Recipe
from outrider.distill.train import distil
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.block import BlockDrafter, BlockSession
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.records import Stats
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from outrider.scoring.teacher_forcing import Text
from toys import as_lm, request, run, tiny_llama

K = 4
FEW = [*range(0, 60, 3)]


def random_student(target: LM, token_ids: Tensor | None = None) -> BlockStudent:
    head = new_dflash(target, 2, K, 59, token_ids, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return BlockStudent(target, head)


@pytest.mark.parametrize("token_ids", [None, FEW], ids=["all", "reduced"])
@torch.no_grad()
def test_blocks_are_those_of_inference(tmp_path: Path, token_ids: list[int] | None) -> None:
    """From its file, in rounds of the engine: the same q at every anchor and offset."""
    target = as_lm(tiny_llama(0, num_layers=4))  # float64
    student = random_student(target, None if token_ids is None else torch.tensor(token_ids))
    student.save(tmp_path, torch.float64)
    stated, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert stated["block_size"] == K + 1 and stated["mask_token_id"] == 59
    assert stated["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert ("lm_head.weight" in tensors) == ("d2t" in tensors) == (token_ids is not None)
    assert not any("embed_tokens" in name for name in tensors)
    drafter = BlockDrafter(load_head(resolve(str(tmp_path)), target))
    ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([0, 3, 4, 7])
    head: Any = drafter.head.model
    steps = [logits for _, logits in drafted_blocks(head, target, ids, anchors)]
    kept = list(range(60)) if token_ids is None else token_ids
    text = [kept[token % len(kept)] for token in ids[0].tolist()]
    for i, at in enumerate(anchors.tolist()):
        led = lead(target, drafter, [(tuple(ids[0, : at + 1].tolist()), text[: K + 1])], K)
        _, _, q = led.drafts[0, at + 1]
        assert q is not None
        for offset, logits in enumerate(steps):
            torch.testing.assert_close(q[offset, kept], logits[0, i].softmax(-1), rtol=0, atol=1e-10)


def test_a_head_learns_its_target(tmp_path: Path) -> None:
    """Trained on greedy texts, by the recipe of users: it drafts nearly all of them; with the target's states one place
    late, or untrained, nearly nothing. (At K = 4 a round commits at most 5 tokens.)"""
    target = as_lm(tiny_llama(0, num_layers=4, initializer_range=0.5).float())
    model: Any = target.model
    model.lm_head.weight.mul_(4.0)  # a sharp distribution, so that the greedy token is most of it
    prompts = torch.randint(60, (3, 4), generator=torch.Generator().manual_seed(0))

    def generated(drafter: Drafter, k: int) -> tuple[Tensor, float | None]:
        """Texts with their prompts, and the tokens of a round."""
        requests = [request(prompt, max_new_tokens=20, temperature=0.0) for prompt in prompts.tolist()]
        outputs = run(target, drafter, requests, BLOCK, k)
        ids = torch.cat((prompts, torch.tensor([output.token_ids for output in outputs])), dim=1)
        return ids, sum((output.stats for output in outputs), Stats()).mean_acceptance_length

    ids, _ = generated(NoDrafter(), 0)
    student = BlockStudent(target, new_dflash(target, 1, K, 59, None, seed=0))
    drafters: dict[str, Drafter] = {"untrained": student.as_stored("untrained", torch.float32)}
    recipe = Recipe(batch_size=12, learning_rate=1e-2, patience=20, save_s=1e9)
    held_out = [Text(row, 4) for row in ids.tolist()]
    checks = distil(
        student, tmp_path, Mixture(None, ids, 24, 1.0, 0), held_out, recipe, Budget(150), save_dtype=torch.float32
    )
    assert len(checks[-1].alphas) == K and checks[-1].mean_alpha > 0.6 > 0.3 > checks[0].mean_alpha

    drafters["trained"] = BlockDrafter(load_head(resolve(str(tmp_path)), target))
    results = {name: generated(drafter, K) for name, drafter in drafters.items()}
    keep = BlockSession._keep

    def keep_late(self: BlockSession, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        keep(self, cache, features, torch.where(positions < 0, -1, positions + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSession, "_keep", keep_late)
        results["late"] = generated(drafters["trained"], K)
    assert all(torch.equal(one, ids) for one, _ in results.values())
    tau = {name: value for name, (_, value) in results.items()}
    assert tau["trained"] >= 3.2 and max(tau["late"], tau["untrained"]) <= 1.5


def test_the_rarest_token_fills_the_slots() -> None:
    """Unless its embedding is zero."""
    target = as_lm(tiny_llama(0, num_layers=12).float())
    counts = torch.full((60,), 5)
    counts[[7, 9]] = 1
    assert mask_token(target, counts) == 7
    model: Any = target.model
    model.get_input_embeddings().weight.data[7] = 0.0
    assert mask_token(target, counts) == 9
    assert default_layers(target) == 2
