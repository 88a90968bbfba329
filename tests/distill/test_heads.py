"""Training of EAGLE-3 heads: what is trained is what drafts, and a trained head drafts what its target generates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.distill.heads import HeadStudent, default_features, new_eagle3, unroll
from outrider.distill.student import read_target
from outrider.drafters import chains
from outrider.measure.teacher_forcing import Text
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.runtime.lm import LM
from outrider.runtime.modules import recorded_states
from toys import as_lm, tiny_llama

K = 4
PROMPTS = torch.randint(60, (8, 4), generator=torch.Generator().manual_seed(0))


def random_student(target: LM, token_ids: list[int] | None = None) -> HeadStudent:
    head = new_eagle3(target, None if token_ids is None else torch.tensor(token_ids), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return HeadStudent(target, head, K)


@torch.no_grad()
def test_unrolled_is_inference() -> None:
    """Each round of each length, fed to the cache of a session entry by entry: the same logits."""
    target = as_lm(tiny_llama(0, num_layers=4))  # float64
    drafter = random_student(target).as_stored("head", torch.float32)
    head: Any = drafter.models[0].model
    ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(2))
    steps = [logits for _, logits in unroll(head, ids, *read_target(target, ids, head.features), K)]
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


def test_alpha_is_the_overlap_with_a_q_of_the_whole_vocabulary() -> None:
    target, token_ids = as_lm(tiny_llama(0, num_layers=4).float()), [1, 4, 7, 30, 59]
    student = random_student(target, token_ids)
    texts = [Text(ids[: 12 - i], 2 * i + 1) for i, ids in enumerate(PROMPTS[:4].repeat(1, 3).tolist())]
    drafter = student.as_stored("head", torch.float32)
    head: Any = drafter.models[0].model
    for d, alpha in enumerate(student.alphas(drafter, texts)):
        values = []
        for text in texts:
            with torch.no_grad():
                ids = torch.tensor([text.ids])
                p, q = list(unroll(head, ids, *read_target(target, ids, head.features), K))[d]
            for i, (mine, its) in enumerate(zip(p[0].softmax(-1), q[0].softmax(-1), strict=True)):
                if i + 2 >= text.num_given:
                    values.append(sum(min(float(mine[v]), float(its[j])) for j, v in enumerate(token_ids)))
        assert alpha.value == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_the_head_that_is_judged_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """With a reduced vocabulary, in bfloat16: from the file as in training."""
    target = as_lm(tiny_llama(0, num_layers=4).float())
    student = random_student(target, [2, 3, 5, 41])
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
    assert heads[0].features == heads[1].features == default_features(4) == (1, 2, 3)
    with torch.no_grad():
        given = PROMPTS, *read_target(target, PROMPTS, heads[0].features)
        pairs = zip(*(unroll(head, *given, 2) for head in heads), strict=True)
        assert all(torch.equal(one[1], other[1]) for one, other in pairs)
