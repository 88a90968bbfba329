"""The drafters of heads, which draft from the target's hidden states (see ``models/heads/base.py``).

*Entry by entry*: EAGLE-3 heads and MTP layers. Entry i of a sequence is its token i + 1 with the target's state of
token i, and predicts token i + 2. So a sequence of L tokens has L - 1 entries, and the output of the last one gives the
first draft. Drafted tokens are fed with the head's own output in place of the state; their entries are replaced once
the target's states are there. The states have places in a cache of their own, beside the head's keys and values.

*All at once*: block heads. The cache of the head holds the keys and values of the target's hidden states, which are
written once, when a token is committed. A block writes its own keys and values at the places of the last token and of
those to come; they are replaced when these tokens are committed. All slots of a block are fed, also where fewer tokens
are wanted. So q depends neither on K nor on other rows. Tokens are drawn one after the other from the outputs of that
forward: DFlash 2 corrects q by the token before.

So all that a session knows is a function of the committed tokens: prefixes are shared, rows move, and rounds without
drafts only leave entries to be fed later.

Sources: Li et al. 2401.15077, 2503.01840; DeepSeek-V3 2412.19437; DFlash (2602.06036), DFlash 2. Some of these draft
greedily or in trees; here drafts are drawn from q.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.base import Drafter, DraftSession
from outrider.drafters.chains import ChainSession
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.head_states import BlockSession, SharingSession
from outrider.runtime.lm import LM

_LARGE = 8  # K; executions favour some up to half of it


def head_drafter(head: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with a head. Raises OptionError.

    Args:
        head: its module is a ``Head``.
        options: greedy, and a least probability; none for blocks.
    """
    module = head.model
    most = module.most_drafted if module.block_size else None
    options.check_taken(head.name, *(("is_greedy", "min_prob") if most is None else ()))

    def opens(models: Sequence[LM], num_slots: int, capacity: int, device: torch.device, max_k: int) -> DraftSession:
        if module.shared_layers:
            return SharingSession(models[0], options, num_slots, capacity)
        if most is not None:
            return BlockSession(models[0], options, num_slots, capacity)
        return ChainSession(models[0], options, num_slots, capacity, device, max_k)

    return Drafter(
        options.full_name(head.name),
        opens,
        (head,),
        is_one_hot=options.is_greedy,
        most_drafted=most,
        # The whole block, which costs one forward in any case, and half of a large one, to verify less.
        favoured_k=() if most is None else (most // 2, most) if most > _LARGE else (most,),
        features=module.features,
        shared_layers=module.shared_layers,
    )
