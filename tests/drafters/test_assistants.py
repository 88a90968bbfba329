"""Gemma 4 assistants beside Transformers' own assisted generation, where each prompt gives one place's drafts."""

from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from assistants import assistant_pair, load_assistant, tiny_assistant, tiny_gemma4
from contract import check_state, lead
from outrider.drafters.heads import head_drafter
from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.heads import assistant as assistant_module
from outrider.models.heads.assistant import AssistantHead
from toys import as_lm, tiny_llama

V, K = 60, 4
TEXT = torch.randint(V, (20,), generator=torch.Generator().manual_seed(5)).tolist()


def _check_beside_transformers(num_groups: int) -> None:
    model, assistant = tiny_gemma4(V), tiny_assistant(V, num_groups=num_groups, num_chosen=3)
    target = as_lm(model)
    drafter = head_drafter(load_assistant(assistant, target))
    forward, found = assistant.forward, list[Any]()
    assistant.forward = lambda **given: found.append(forward(**given)) or found[-1]
    assistant.generation_config.num_assistant_tokens = K
    for length in (1, 4, 5, 6, 7, 8, 20):
        found.clear()
        prompt = torch.tensor([TEXT[:length]])
        output = model.generate(prompt, assistant_model=assistant, max_new_tokens=K + 2, do_sample=False)
        logits = torch.cat([one.logits[0] for one in found[:K]])
        sequence = [*TEXT[:length], int(output[0, length])], logits.argmax(dim=-1).tolist()
        _, ids, q = lead(target, drafter, [sequence], K, temperature=1.0).drafts[0, length + 1]
        assert ids == sequence[1] and q is not None
        if num_groups:  # other tokens have the least logit less 1 there
            logits = logits.masked_fill(logits == logits.amin(dim=-1, keepdim=True), -torch.inf)
            assert bool(((q > 0) == (logits > -torch.inf)).all())
        assert float((q - logits.softmax(dim=-1)).abs().max()) < 1e-12, f"after {length} tokens"


@pytest.mark.parametrize("num_groups", [0, 12])
def test_q_is_that_of_transformers(num_groups: int) -> None:
    _check_beside_transformers(num_groups)


def test_wrong_places_and_windows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query at the place of its state; the window of the target; a rejected token that is seen."""
    forward = AssistantHead.forward

    def moved(
        self: Any, ids: Tensor, states: Tensor, positions: Tensor, *others: Any, by: int = 0, seen: int = 0
    ) -> Any:
        rotary = self.model.rotary_emb
        rotary.forward = lambda x, places, kind: type(rotary).forward(rotary, x, places + by - seen, kind)
        return forward(self, ids, states, positions + seen, *others)

    with monkeypatch.context() as patch:
        patch.setattr(AssistantHead, "forward", partialmethod(moved, by=-1))
        with pytest.raises(AssertionError, match="assert"):
            _check_beside_transformers(0)
    with monkeypatch.context() as patch:
        patch.setattr(assistant_module, "replace", lambda reach, **_: reach)
        with pytest.raises(AssertionError, match="after 7 tokens"):
            _check_beside_transformers(0)
    monkeypatch.setattr(AssistantHead, "forward", partialmethod(moved, seen=1))
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(*assistant_pair(4), [([3, 1, 2], [0, 1, 2, 2, 0, 1, 3] * 2), ([1, 2], [3, 0, 1, 1, 2, 0])], 3)


def test_an_assistant_of_another_target_is_refused() -> None:
    gemma4, unordered = as_lm(tiny_gemma4(V)), tiny_assistant(num_groups=12)
    unordered.masked_embedding.token_ordering[0] = unordered.masked_embedding.token_ordering[1]
    with pytest.raises(UnsupportedModel, match="layers of the type sliding_attention, which target does not have"):
        load_assistant(tiny_assistant(), as_lm(tiny_llama()))
    for model, message in (
        (tiny_assistant(head_dim=4), "in sliding_attention it reads 2 heads of 4 numbers, and target has 2 of 8"),
        (tiny_assistant(50), "has logits for 50 tokens; target has 60"),
        (tiny_assistant(num_groups=7), "divides 60 tokens into 7 groups"),
        (tiny_assistant(num_groups=12, num_chosen=13), "chooses 13 of 12 groups"),
        (unordered, "does not name each of its tokens once"),
    ):
        with pytest.raises(ModelCorrupt, match=message):
            load_assistant(model, gemma4)
