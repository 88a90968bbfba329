"""Gemma 4 assistants beside Transformers' own assisted generation. (Their contract is in test_contract.py.)

Transformers drafts once after its prefill, where its generator sees the keys of committed tokens alone. So each prompt
gives the drafts of one place, and all of them those of a text.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from assistants import assistant_pair, load_assistant, tiny_assistant, tiny_gemma4
from contract import check_state, lead
from outrider.drafters.heads import head_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.heads import assistant as assistant_module
from outrider.models.heads.assistant import AssistantHead
from outrider.sampling.rules import GUMBEL
from toys import as_lm, perturbed, request, run, tiny_llama

V, K = 60, 4
TEXT = torch.randint(V, (20,), generator=torch.Generator().manual_seed(5)).tolist()


def _drafts(target: Any, assistant: Any, prompt: list[int]) -> tuple[int, list[int], Tensor]:
    """Transformers' own: the token after a prompt, the tokens drafted after that one, and their logits [K, V]."""
    found: list[Any] = []
    forward = assistant.forward

    def noted(**arguments: Any) -> Any:
        found.append(forward(**arguments))
        return found[-1]

    assistant.forward, assistant.generation_config.num_assistant_tokens = noted, K
    try:
        ids = torch.tensor([prompt])
        output = target.generate(ids, assistant_model=assistant, max_new_tokens=K + 2, do_sample=False)
    finally:
        del assistant.forward
    logits = torch.cat([one.logits[0] for one in found[:K]])
    return int(output[0, len(prompt)]), logits.argmax(dim=-1).tolist(), logits


def _check_beside_transformers(num_groups: int) -> None:
    model, assistant = tiny_gemma4(V), tiny_assistant(V, num_groups=num_groups, num_chosen=3)
    target = as_lm(model)
    drafter = head_drafter(load_assistant(assistant, target))
    for length in (1, 4, 5, 6, 7, 8, 20):
        following, drafted, logits = _drafts(model, assistant, TEXT[:length])
        led = lead(target, drafter, [([*TEXT[:length], following], drafted)], K, temperature=1.0)
        _, ids, q = led.drafts[0, length + 1]
        assert ids == drafted
        assert q is not None
        if num_groups:  # other tokens have the least logit less 1 there
            logits = logits.masked_fill(logits == logits.amin(dim=-1, keepdim=True), -torch.inf)
            assert bool(((q > 0) == (logits > -torch.inf)).all())
        assert float((q - logits.softmax(dim=-1)).abs().max()) < 1e-12, f"after {length} tokens"


@pytest.mark.parametrize("num_groups", [0, 12])
def test_q_is_that_of_transformers(num_groups: int) -> None:
    _check_beside_transformers(num_groups)


def _displace(monkeypatch: pytest.MonkeyPatch, *, rotated: int, seen: int) -> None:
    """Move the places to which queries are rotated, and those that they see."""
    forward = AssistantHead.forward

    def moved(self: Any, ids: Tensor, states: Tensor, positions: Tensor, *others: Any) -> Any:
        rotary = self.model.rotary_emb
        rotate = type(rotary).forward
        rotary.forward = lambda x, places, kind: rotate(rotary, x, places + rotated - seen, kind)
        return forward(self, ids, states, positions + seen, *others)

    monkeypatch.setattr(AssistantHead, "forward", moved)


def test_wrong_places_and_windows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query at the place of its state, where EAGLE-3's are; the window of the target; a rejected token that is
    seen."""
    with monkeypatch.context() as patch:
        _displace(patch, rotated=-1, seen=0)
        with pytest.raises(AssertionError, match="assert"):
            _check_beside_transformers(0)
    with monkeypatch.context() as patch:
        patch.setattr(assistant_module, "replace", lambda reach, **_: reach)
        with pytest.raises(AssertionError, match="after 7 tokens"):
            _check_beside_transformers(0)
    _displace(monkeypatch, rotated=0, seen=1)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(*assistant_pair(4), [([3, 1, 2], [0, 1, 2, 2, 0, 1, 3] * 2), ([1, 2], [3, 0, 1, 1, 2, 0])], 3)


def test_gemma_4_goes_on_as_in_generate() -> None:
    """With drafts, in a batch, with experts."""
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    model = tiny_gemma4(V, **moe).float()
    target, draft = as_lm(model), model_drafter(as_lm(perturbed(model, 0.02), "draft"))
    options = {"max_new_tokens": 12, "repetition_penalty": 1.5}
    asked = [request(TEXT[i:end], temperature=0.0, **options) for i, end in ((0, 1), (3, 14), (2, 6))]
    outputs = run(target, draft, asked, GUMBEL, 3)
    assert sum(output.stats.num_accepted_draft_tokens for output in outputs) > 0
    for one, output in zip(asked, outputs, strict=True):
        own = model.generate(torch.tensor([one.prompt_ids]), do_sample=False, **options)
        assert list(output.token_ids) == own[0, len(one.prompt_ids) :].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 4}, "in sliding_attention it reads 2 heads of 4 numbers, and target has 2 of 8"),
        ({"num_key_value_heads": 4}, "in sliding_attention it reads 4 heads of 8"),
        ({"vocab_size": 50}, "has logits for 50 tokens; target has 60"),
        ({"num_groups": 7}, "divides 60 tokens into 7 groups"),
        ({"num_groups": 12, "num_chosen": 13}, "chooses 13 of 12 groups"),
        ({"num_groups": 12, "num_chosen": 0}, "chooses 0 of 12 groups"),
    ],
)
def test_an_assistant_of_another_target_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ModelCorrupt, match=message):
        load_assistant(tiny_assistant(**options), as_lm(tiny_gemma4(V)))


def test_other_targets_and_orders_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layers of the type sliding_attention, which target does not have"):
        load_assistant(tiny_assistant(), as_lm(tiny_llama()))
    model = tiny_assistant(num_groups=12)
    model.masked_embedding.token_ordering[0] = model.masked_embedding.token_ordering[1]
    with pytest.raises(ModelCorrupt, match="does not name each of its tokens once"):
        load_assistant(model, as_lm(tiny_gemma4(V)))
