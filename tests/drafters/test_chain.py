"""Chain heads: EAGLE-3 and MTP layers. (Their contract is in test_contract.py.)"""

import pytest
import torch

from contract import check_state
from heads import eagle3_drafter, mtp_pair
from hybrids import V, hybrid
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.chains import ChainSession
from outrider.sampling.rules import GUMBEL
from toys import as_lm, request, tiny_llama, tokens

FEW = [1, 2, 3, 5, 8, 13, 21, 34, 55, 20, 30, 40]


def test_a_bias_may_forbid_all_tokens_of_the_head() -> None:
    """Then it drafts others, which it does not know; other rows do not change."""
    target = as_lm(tiny_llama(num_layers=4))
    drafter = eagle3_drafter(target, token_ids=FEW)
    bias = dict.fromkeys(FEW, -torch.inf)
    requests = [request((1, 2, 3), max_new_tokens=16, logit_bias=bias), request((4, 5, 6), max_new_tokens=16)]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 3) == plain


def test_an_entry_of_another_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a shared prefix has the token after it, which differs in the new sequence."""
    target = as_lm(tiny_llama(vocab_size=4, num_layers=4))
    drafter = eagle3_drafter(target)
    shared = [3, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 3] * 2
    sequences = [([*shared, first], [2, 0, 1, 3, 2, 1]) for first in (1, 2, 3)]
    check_state(target, drafter, sequences, 3)
    assign = ChainSession.assign

    def stale(self: ChainSession, slot: int, source: int | None, num_tokens: int) -> None:
        known = None if source is None else min(int(self._cached[source]), num_tokens)
        assign(self, slot, source, num_tokens)
        if known is not None:
            self._cached[slot] = known

    monkeypatch.setattr(ChainSession, "assign", stale)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, drafter, sequences, 3)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_5_text", "qwen"),
        ("deepseek_v3", "deepseek"),
        pytest.param("qwen3_next", "qwen", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "deepseek", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_mtp_layers_are_a_function_of_the_sequence(family: str, layout: str) -> None:
    """In float32, or with recurrences in float32."""
    target, drafter = mtp_pair(hybrid(family), layout)
    generator = torch.Generator().manual_seed(3)
    first, rest, other, last = (torch.randint(V, (num,), generator=generator).tolist() for num in (5, 9, 9, 9))
    check_state(target, drafter, [(first, rest), (other, last), ([*first, *rest[:4]], last)], 3, atol=1e-4)
