"""Training of heads, EAGLE-3 and DFlash: what is trained is what drafts, and a trained head drafts what its target
generates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from contract import lead
from outrider.distill.blocks import BlockStudent, default_layers, drafted_blocks, mask_token, new_dflash
from outrider.distill.chains import ChainStudent, new_eagle3, unroll
from outrider.distill.data import Mixture
from outrider.distill.heads import default_features, most_frequent
from outrider.distill.teacher import read_target
from outrider.distill.train import Recipe, distil
from outrider.drafters import chains
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.blocks import BlockSession
from outrider.drafters.heads import head_drafter
from outrider.measure.teacher_forcing import Text
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.records import Stats
from outrider.runtime.lm import LM
from outrider.runtime.modules import recorded_states
from outrider.sampling.rules import BLOCK
from toys import as_lm, request, run, tiny_llama

K = 4
PROMPTS = torch.randint(60, (8, 4), generator=torch.Generator().manual_seed(0))
FEW = [*range(0, 60, 3)]


def target_lm(**options: Any) -> LM:
    """A random Llama in float32, whose next token depends on the whole text."""
    return as_lm(tiny_llama(0, num_layers=4, **options).float())


def random_student(target: LM, kind: str, token_ids: list[int] | None = None) -> Any:
    kept = None if token_ids is None else torch.tensor(token_ids)
    head: Any = new_eagle3(target, kept, seed=0) if kind == "eagle3" else new_dflash(target, 2, K, 59, kept, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return ChainStudent(target, head, K) if kind == "eagle3" else BlockStudent(target, head)


def read(target: LM, head: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits and hidden states along sequences."""
    return read_target(target, head.features, ids)[:2]


@torch.no_grad()
def test_unrolled_is_inference() -> None:
    """Each round of each length, fed to the cache of a session entry by entry: the same logits."""
    target = as_lm(tiny_llama(0, num_layers=4))  # float64
    drafter = random_student(target, "eagle3").as_stored("head", torch.float32)
    head: Any = drafter.models[0].model
    ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(2))
    steps = [logits for _, logits in unroll(head, ids, *read(target, head, ids), K)]
    assert [logits.shape[1] for logits in steps] == [11, 10, 9, 8]
    with recorded_states(target.model, head.features) as found:
        target.model(input_ids=ids, use_cache=False)
    states = head.fuse(torch.cat([found[i] for i in head.features], dim=-1))
    for first in range(11):
        cache = drafter.models[0].new_cache(1, 20)
        fed, state, positions = ids[:, 1 : first + 2], states[:, : first + 1], torch.arange(first + 1)[None]
        for d in range(min(K, 11 - first)):
            logits, outputs = chains.feed_entries(drafter.models[0], 20, 1, cache, fed, state, positions)
            torch.testing.assert_close(logits[:, -1], steps[d][:, first], rtol=0, atol=1e-10)
            fed, state, positions = ids[:, first + 2 + d :][:, :1], outputs[:, -1:], positions[:, -1:] + 1


@pytest.mark.parametrize("token_ids", [None, FEW], ids=["all", "reduced"])
@torch.no_grad()
def test_blocks_are_those_of_inference(tmp_path: Path, token_ids: list[int] | None) -> None:
    """From its file, in rounds of the engine: the same q at every anchor and offset."""
    target = as_lm(tiny_llama(0, num_layers=4))  # float64
    random_student(target, "dflash", token_ids).save(tmp_path, torch.float64)
    stated, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert stated["block_size"] == K + 1 and stated["mask_token_id"] == 59
    assert stated["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert ("lm_head.weight" in tensors) == ("d2t" in tensors) == (token_ids is not None)
    assert not any("embed_tokens" in name for name in tensors)
    drafter = head_drafter(load_head(resolve(str(tmp_path)), target))
    ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([0, 3, 4, 7])
    head: Any = drafter.models[0].model
    steps = [logits for _, logits in drafted_blocks(head, ids, *read(target, head, ids), anchors)]
    kept = list(range(60)) if token_ids is None else token_ids
    text = [kept[token % len(kept)] for token in ids[0].tolist()]
    for i, at in enumerate(anchors.tolist()):
        led = lead(target, drafter, [(tuple(ids[0, : at + 1].tolist()), text[: K + 1])], K)
        _, _, q = led.drafts[0, at + 1]
        assert q is not None
        for offset, logits in enumerate(steps):
            torch.testing.assert_close(q[offset, kept], logits[0, i].softmax(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("token_ids", [None, [1, 4, 7, 30, 59]], ids=["all", "reduced"])
def test_alpha_is_the_overlap_with_a_q_of_the_whole_vocabulary(token_ids: list[int] | None) -> None:
    target = target_lm()
    student = random_student(target, "eagle3", token_ids)
    texts = [Text(ids[: 12 - i], 2 * i + 1) for i, ids in enumerate(PROMPTS[:4].repeat(1, 3).tolist())]
    drafter = student.as_stored("head", torch.float32)
    head: Any = drafter.models[0].model
    kept = list(range(60)) if token_ids is None else token_ids
    for d, alpha in enumerate(student.alphas(drafter, texts)):
        values = []
        for text in texts:
            with torch.no_grad():
                ids = torch.tensor([text.ids])
                p, q = list(unroll(head, ids, *read(target, head, ids), K))[d]
            for i, (mine, its) in enumerate(zip(p[0].softmax(-1), q[0].softmax(-1), strict=True)):
                if i + 2 >= text.num_given:
                    values.append(sum(min(float(mine[v]), float(its[j])) for j, v in enumerate(kept)))
        assert alpha.value == pytest.approx(sum(values) / len(values), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_prompts", "num_new", "num_steps", "alphas", "least_tau"),
    [("eagle3", 8, 40, 350, (0.4, 0.8), 4.5), ("dflash", 3, 20, 150, (0.3, 0.6), 3.2)],
)
def test_a_head_learns_its_target(
    kind: str, num_prompts: int, num_new: int, num_steps: int, alphas: Any, least_tau: float, tmp_path: Path
) -> None:
    """Trained on greedy texts, by the recipe of users: it drafts nearly all of them; with the target's states one place
    late, or untrained, nearly nothing. (At K = 4 a round commits at most 5 tokens.)"""
    target = target_lm(initializer_range=0.5)
    model: Any = target.model
    model.lm_head.weight.mul_(4.0)  # a sharp distribution, so that the greedy token is most of it
    prompts = PROMPTS[:num_prompts]

    def generated(drafter: Drafter, k: int) -> tuple[Tensor, Any]:
        """Texts with their prompts, and the tokens of a round."""
        requests = [request(prompt, max_new_tokens=num_new, temperature=0.0) for prompt in prompts.tolist()]
        outputs = run(target, drafter, requests, BLOCK, k)
        ids = torch.cat((prompts, torch.tensor([output.token_ids for output in outputs])), dim=1)
        return ids, sum((output.stats for output in outputs), Stats()).mean_acceptance_length

    ids, _ = generated(NO_DRAFTER, 0)
    is_chain = kind == "eagle3"
    student: Any = (
        ChainStudent(target, new_eagle3(target, None, seed=0), K)
        if is_chain
        else BlockStudent(target, new_dflash(target, 1, K, 59, None, seed=0))
    )
    drafters: dict[str, Drafter] = {"untrained": student.as_stored("untrained", torch.float32)}
    recipe = Recipe(
        num_steps=num_steps, batch_size=2 * num_prompts if is_chain else 12, learning_rate=1e-2, patience=20, save_s=1e9
    )
    mixture, held_out = Mixture(None, ids, ids.shape[1], 1.0, 0), [Text(row, 4) for row in ids.tolist()]
    checks = distil(student, tmp_path, mixture, held_out, recipe, save_dtype=torch.float32)
    low, high = alphas
    assert len(checks[-1].alphas) == K and checks[-1].mean_alpha > high > low > checks[0].mean_alpha

    drafters["trained"] = head_drafter(load_head(resolve(str(tmp_path)), target))
    results = {name: generated(drafter, K) for name, drafter in drafters.items()}
    owner, name = (chains, "keep_states") if is_chain else (BlockSession, "_keep")
    keep = getattr(owner, name)

    def keep_late(holder: Any, cache: Any, features: Tensor, positions: Tensor) -> None:
        keep(holder, cache, features, torch.where(positions < 0, -1, positions + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, keep_late)
        results["late"] = generated(drafters["trained"], K)
    assert all(torch.equal(one, ids) for one, _ in results.values())
    tau = {name: value for name, (_, value) in results.items()}
    assert tau["trained"] >= least_tau and max(tau["late"], tau["untrained"]) <= 1.5


def test_the_head_that_is_judged_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """With a reduced vocabulary, in bfloat16: from the file as in training."""
    target = target_lm()
    student = random_student(target, "eagle3", [2, 3, 5, 41])
    student.save(tmp_path, torch.bfloat16)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["draft_vocab_size"] == 4
    assert stated["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any("embed_tokens" in name for name in tensors)
    assert tensors["d2t"].tolist() == [2, 2, 3, 38]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 3, 5, 41]
    heads: list[Any] = [
        lm.model for lm in (load_head(resolve(str(tmp_path)), target), student.as_stored("h", torch.bfloat16).models[0])
    ]
    assert heads[0].features == heads[1].features == default_features(4)
    with torch.no_grad():
        given = PROMPTS, *read(target, heads[0], PROMPTS)
        pairs = zip(*(unroll(head, *given, 2) for head in heads), strict=True)
        assert all(torch.equal(one[1], other[1]) for one, other in pairs)


def test_layers_and_tokens_that_a_head_knows() -> None:
    """The rarest token fills the slots of a block, unless its embedding is zero."""
    assert [default_features(n) for n in (32, 8, 7)] == [(2, 16, 29), (2, 4, 5), (2, 3, 4)]
    assert [default_features(n) for n in (6, 4, 2, 1)] == [(1, 3, 5), (1, 2, 3), (1, 1, 1), (0, 0, 0)]
    assert most_frequent(torch.tensor([0, 5, 2, 9, 5, 0]), 3).tolist() == [1, 3, 4]
    assert most_frequent(torch.tensor([0, 5, 2, 9, 5, 0]), 5).tolist() == [0, 1, 2, 3, 4]
    target = as_lm(tiny_llama(0, num_layers=12).float())
    counts = torch.full((60,), 5)
    counts[[7, 9]] = 1
    assert mask_token(target, counts) == 7
    model: Any = target.model
    model.get_input_embeddings().weight.data[7] = 0.0
    assert mask_token(target, counts) == 9
    assert default_layers(target) == 2
