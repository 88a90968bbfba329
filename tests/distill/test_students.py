"""Students: the shape and the first weights of a draft model, and EAGLE-3 heads, which draft as they are trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config

from outrider.distill.heads import HeadStudent, default_features, new_eagle3, unroll
from outrider.distill.student import (
    ModelStudent,
    copy_slices,
    default_shape,
    draft_config,
    kept_layers,
    new_draft,
    read_target,
)
from outrider.drafters.heads import feed_entries
from outrider.errors import OptionError
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
def test_unrolled_training_equals_inference() -> None:
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
            logits, outputs = feed_entries(drafter.models[0], 20, 1, cache, fed, state, positions)
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


def test_config_follows_the_target() -> None:
    """Heads that share the width keep their size; others have one of their own, as in Qwen3-0.6B and Gemma-3-1B."""
    own = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 99}
    target = LlamaConfig(hidden_size=512, intermediate_size=1024, **own)
    config = draft_config(target, (2, 256))
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 256, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (4, 1, 99)
    assert draft_config(target, (2, 192)).num_key_value_heads == 3  # four queries to a key do not divide three
    assert target.num_hidden_layers == 24 and default_shape(target) == (2, 512)
    layered = Qwen3Config(num_hidden_layers=4, layer_types=["full_attention", "sliding_attention"] * 2)
    assert draft_config(layered, (2, 32)).layer_types == ["full_attention", "sliding_attention"]
    target = Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    config = draft_config(target, (1, 512))
    assert (config.num_attention_heads, config.head_dim) == (8, 128)
    assert [kept_layers(6, n) for n in (1, 2, 3)] == [[0], [0, 5], [0, 2, 5]] and kept_layers(2, 4) == [0, 0, 1, 1]
    for config, shape, message in (
        (LlamaConfig(), (0, 64), "num_layers = 0"),
        (GPT2Config(n_embd=32, n_head=4), (1, 20), "a multiple of 8"),
    ):
        with pytest.raises(OptionError, match=message):
            draft_config(config, shape)


def test_copied_slices_of_a_target() -> None:
    """A draft of the target's shape begins as the target."""
    target = tiny_llama(num_layers=4)
    draft = new_draft(target.config, (2, 16), seed=0)
    copy_slices(target, draft)
    ours, theirs = draft.state_dict(), target.state_dict()
    for name, other in (("0", "0"), ("1", "3")):
        weight, from_target = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (name, other))
        torch.testing.assert_close(ours[weight], theirs[from_target][:16, :16].float())
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"][:, :16].float())
    state = torch.random.get_rng_state()
    a, b, c = (new_draft(target.config, (1, 16), seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(torch.random.get_rng_state(), state)
    same = new_draft(target.config, (4, 32), seed=0).double()
    copy_slices(target, same)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(same(ids).logits, target(ids).logits, check_dtype=False)
    # The leading part of weights that are several in one would mix queries with keys.
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    with pytest.raises(OptionError, match="use scratch"):
        copy_slices(GPT2LMHeadModel(config), new_draft(config, (1, 16), seed=0))


def test_a_draft_of_few_tokens_learns_their_distribution() -> None:
    """From their logits alone: those of the whole model, with the same gradients; and it drafts no other token."""
    target = as_lm(tiny_llama(0).float())
    few, found = torch.tensor([1, 5, 40]), []
    ids = torch.randint(60, (3, 10), generator=torch.Generator().manual_seed(0))
    for token_ids in (None, few):
        draft = new_draft(target.model.config, (1, 32), seed=0)
        student = ModelStudent(target, draft, None, token_ids)
        ((p, q),) = student.pairs(student.module(input_ids=ids), ids)
        p, q = (p[..., few], q[..., few]) if token_ids is None else (p, q)
        (q * p).sum().backward()
        found.append([p, q, *(weight.grad for weight in draft.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    lm: Any = student.as_stored("draft", torch.float32).lm
    logits = lm.forward(ids, torch.arange(10).expand_as(ids), lm.new_cache(3, 10), 10)
    assert (logits.softmax(-1) > 0).nonzero()[:, -1].unique().tolist() == few.tolist()
