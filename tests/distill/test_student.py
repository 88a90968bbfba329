"""The shape of a draft, and the weights it begins with."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config

from outrider.distill.student import ModelStudent, copy_slices, default_shape, draft_config, kept_layers, new_draft
from outrider.errors import OptionError
from toys import as_lm, tiny_llama


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
        (LlamaConfig(), (1, 0), "hidden_size = 0"),
        (GPT2Config(n_embd=32, n_head=4), (1, 20), "a multiple of 8"),
    ):
        with pytest.raises(OptionError, match=message):
            draft_config(config, shape)


def test_slices() -> None:
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
