"""Adaptive K from call to call: no text depends on what was learned but through K."""

from dataclasses import replace

import pytest

from block_heads import tiny_block_drafter
from outrider.decoder import Decoder
from outrider.decoding.schedule import favoured_ks
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.sampling.rules import RULES
from toys import as_lm, table_pair, tiny_llama


def test_auto_is_learned_by_pair_and_rule_and_shows_in_no_text_with_a_seed() -> None:
    target, drafter = table_pair(5)
    decoder = Decoder(target, None, frozenset(), drafter, acceptance="rejection", num_draft_tokens="auto")
    before = decoder.generate([[1]], seed=3, max_new_tokens=40)[0].token_ids
    decoder.generate([[1], [2]], max_new_tokens=40)
    assert decoder.generate([[1]], seed=3, max_new_tokens=40)[0].token_ids == before
    # Rows of one seed meet the same noise, so that K for one must not follow from what happened to the other.
    chunks = list(decoder.stream_many([[1], [2]], seed=[3, 3], max_new_tokens=30))
    assert [chunk.stats.num_draft_tokens for chunk in chunks[:6]] == [4] * 6
    auto, plain = (
        one.generate([[1], [2]], seed=[3, 4], max_new_tokens=40, acceptance="gumbel")
        for one in (decoder, decoder.plain())
    )
    assert [c.token_ids for c in auto] == [c.token_ids for c in plain]
    assert decoder.pair_state is not None
    by_rule = [decoder.pair_state.estimates(RULES[name]) for name in ("rejection", "gumbel", "block")]
    assert [bool(one._outcomes) for one in by_rule] == [True, True, False]
    assert replace(decoder, acceptance="block", num_draft_tokens=3).pair_state is decoder.pair_state
    for changed in (decoder.plain(), replace(decoder, target=table_pair(5, 1)[0])):
        assert changed.pair_state is not decoder.pair_state
    with pytest.raises(OptionError, match="num_draft_tokens = 'much'"):
        decoder.generate([[1]], num_draft_tokens="much")


def test_a_drafter_adds_its_own_k() -> None:
    """The whole block, and half of a large one; none beyond what the drafter can draft."""
    usual = {0, 1, 2, 3, 4, 6, 8}
    target = as_lm(tiny_llama(num_layers=4), "target")
    for size, wanted in ((17, usual | {16}), (16, usual | {7, 15}), (4, {0, 1, 2, 3})):
        assert set(favoured_ks(target, tiny_block_drafter(target, block_size=size))) == wanted
    draft = as_lm(tiny_llama(), "draft")
    at_once = model_drafter(draft, mask_id=59)
    for one in (at_once, hybrid_drafter(suffix_drafter(None), at_once, 60)):
        assert favoured_ks(draft, one) == (0, 1, 2, 3, 4, 6, 7, 8, 15)
    assert set(favoured_ks(draft, model_drafter(draft))) == usual and favoured_ks(draft, NO_DRAFTER) == (0,)
