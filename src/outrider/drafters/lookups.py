"""Look-ups: drafts from earlier in the sequence, and from other texts. q is one-hot, so only tokens are reported.

Suffix decoding (``suffix``): the longest suffix of the sequence is searched for in the sequence itself and in a corpus,
on the host. Of the tokens that followed it there, the most frequent one is drafted, then the most frequent one
after suffix and draft, and so on. With N of F occurrences followed by that token, after m equal tokens, its probability
is estimated as N / (F + 2 / m): one place after one equal token counts for little, after twenty for much. The draft
ends where the product of its estimates falls below ``min_prob``. The sum of these products, the expected number of
accepted tokens, decides between sequence and corpus. Prompt look-up (``ngram``) has no corpus and no least
probability: a draft ends only where the place that it copies meets the end of the sequence.

Sources: prompt lookup decoding, Saxena 2023, and, with references as the source, Yang et al. 2304.04487.
SuffixDecoding, Oliaro et al. 2411.04975, whose D(N) and score these are, but for the summand 2 / m, which takes the
place of a draft length proportional to m and of a search over shorter suffixes; suffix automata for drafts: Hu et al.,
ACL 2025 (long.595); their construction: Blumer et al. 1985.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.drafters.base import Drafter, DraftSession, Rows, empty_draft
from outrider.drafters.corpus import MAX_MATCH, Corpus
from outrider.records import Draft
from outrider.sampling.rules import Rule

MIN_PROB = 0.1
_DOUBT = 2.0  # the summand 2 / m


def suffix_drafter(corpus: Corpus | None = None, min_prob: float = MIN_PROB) -> Drafter:
    """Draft from the sequence so far, and from a corpus, whose digest is part of the name: the output of a seed depends
    on it.

    Args:
        min_prob: a draft ends where its estimated probability falls below.
    """
    return Drafter(
        "suffix" if corpus is None else f"suffix+{corpus.digest}",
        lambda models, num_slots, *_: SuffixSession(corpus, min_prob, num_slots),
        is_one_hot=True,
        reads_on_host=True,
    )


def ngram_drafter() -> Drafter:
    """Draft from the sequence so far, however improbable the tokens are."""
    return replace(suffix_drafter(min_prob=0.0), name="ngram")


def looked_up(rows: Rows, drafts: Sequence[Sequence[int]]) -> Draft:
    """A draft of tokens that the host has found."""
    width = max(map(len, drafts))
    if width == 0:
        return empty_draft(rows)
    device = rows.ids.device
    ids = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], device=device)
    num_drafted = torch.tensor([len(draft) for draft in drafts], device=device)
    return Draft(ids=ids, probs=None, num_drafted=torch.minimum(num_drafted, rows.num_wanted))


class SuffixSession(DraftSession):
    """An index of each slot's sequence, which reads the committed tokens before it drafts."""

    def __init__(self, corpus: Corpus | None, min_prob: float, num_slots: int) -> None:
        self._corpus, self._min_prob = corpus, min_prob
        self._indices = [SuffixIndex() for _ in range(num_slots)]

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        """Take over the source's index if it has read no further; else the tokens are read again."""
        index = SuffixIndex() if source is None else self._indices[source]
        if index.num_tokens > num_tokens:
            index = SuffixIndex()
        elif source is not None:
            self._indices[source] = SuffixIndex()
        self._indices[slot] = index

    def catch_up(self, rows: Rows) -> bool:
        has_prompts = False
        for slot, (num_wanted, length) in enumerate(zip(rows.most_wanted, rows.lengths.tolist(), strict=True)):
            if num_wanted > 0:
                index = self._indices[slot]
                has_prompts |= index.num_tokens == 0
                index.extend(rows.ids[slot, index.num_tokens : length].tolist())
        return has_prompts

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return looked_up(rows, [ids for _, ids in self.scored(rows)])

    def scored(self, rows: Rows) -> list[tuple[float, list[int]]]:
        """For each row, the expected number of accepted tokens, and the draft."""
        return [
            self._best(self._indices[slot], num_wanted) if num_wanted > 0 else (0.0, [])
            for slot, num_wanted in enumerate(rows.most_wanted)
        ]

    def _best(self, index: SuffixIndex, k: int) -> tuple[float, list[int]]:
        found = self._likely(index.continuation(), k)
        if self._corpus is not None:
            other = self._likely(self._corpus.continuation(index.last_ids), k)
            if other[0] > found[0]:
                return other
        return found

    def _likely(self, continuation: Iterable[tuple[int, int, int, int]], k: int) -> tuple[float, list[int]]:
        """Cut a continuation at k tokens, and where it becomes unlikely: the expected number of accepted tokens, and
        the tokens."""
        score, prob, ids = 0.0, 1.0, list[int]()
        for token, count, num_followed, length in continuation:
            prob *= count / (num_followed + _DOUBT / length)
            if prob < self._min_prob:
                break
            score += prob
            ids.append(token)
            if len(ids) == k:
                break
        return score, ids


class SuffixIndex:
    """A suffix automaton of a sequence, with frequencies, extended token by token in linear time.

    A state stands for strings that occur at the same places, suffixes of one another. Its link leads to the state of
    the next shorter suffixes. A state counts the places that were followed by a token, and knows the token that
    followed most often (of equally frequent ones the latest). A new token changes the counts of all suffixes, so only
    those of at most MAX_MATCH + 1 tokens are counted; suffixes longer than MAX_MATCH are treated as that long.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # of each state: token -> state; state 0 is the empty string
        self._links, self._lengths = array("i", [-1]), array("i", [0])  # the length is that of its longest string
        self._num_followed = array("i", [0])
        self._best, self._best_counts = array("i", [-1]), array("i", [0])
        self._last = 0  # the state of the whole sequence
        self._suffixes: list[int] = []  # the states of its counted suffixes, the longest first
        self.last_ids: list[int] = []
        """The last tokens of the sequence, at most MAX_MATCH."""

    @property
    def num_tokens(self) -> int:
        return self._lengths[self._last]

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._count(token)
            self._append(token)
        self.last_ids = [*self.last_ids, *ids[-MAX_MATCH:]][-MAX_MATCH:]

    def continuation(self) -> Iterator[tuple[int, int, int, int]]:
        """The most frequent token after the longest suffix that occurred before, then the one after both, and so on:
        the token; how often it followed; how often any token did; length of the string that they followed."""
        for state in self._suffixes:
            if self._num_followed[state] and self._shortest(state) <= MAX_MATCH:
                break
        else:
            return
        length = min(self._lengths[state], MAX_MATCH)
        while (token := self._best[state]) >= 0:
            yield token, self._best_counts[state], self._num_followed[state], length
            length += 1
            state = self._next[state][token]
            if self._shortest(state) > MAX_MATCH:
                state = self._links[state]

    def _shortest(self, state: int) -> int:
        return self._lengths[self._links[state]] + 1

    def _count(self, token: int) -> None:
        num_followed, best, best_counts = self._num_followed, self._best, self._best_counts
        for state in self._suffixes:
            num_followed[state] += 1
        for state in self._suffixes:
            following = self._next[state].get(token)
            # All earlier places of suffix and token were followed, by now.
            count = 1 if following is None else num_followed[following] + 1
            if count >= best_counts[state]:
                best[state], best_counts[state] = token, count

    def _append(self, token: int) -> None:
        following, links, lengths = self._next, self._links, self._lengths
        longest = self._suffixes[0] if self._suffixes else 0  # the state of the last MAX_MATCH + 1 tokens
        num_longest = min(self.num_tokens, MAX_MATCH + 1)
        new = self._add({}, 0, self.num_tokens + 1)
        state = self._last
        self._last = new
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state >= 0:
            links[new] = old = following[state][token]
            if lengths[old] > lengths[state] + 1:
                # Its shorter strings now occur at one more place than the others: they get a state of their own.
                links[new] = own = self._add(following[old].copy(), links[old], lengths[state] + 1, old)
                links[old] = own
                while state >= 0 and following[state].get(token) == old:
                    following[state][token] = own
                    state = links[state]
                if longest == old and num_longest <= lengths[own]:
                    longest = own
        longest = following[longest][token]
        if self._shortest(longest) > MAX_MATCH + 1:
            longest = links[longest]
        self._suffixes = []
        while longest > 0:
            self._suffixes.append(longest)
            longest = links[longest]

    def _add(self, following: dict[int, int], link: int, length: int, like: int | None = None) -> int:
        self._next.append(following)
        self._links.append(link)
        self._lengths.append(length)
        self._num_followed.append(0 if like is None else self._num_followed[like])
        self._best.append(-1 if like is None else self._best[like])
        self._best_counts.append(0 if like is None else self._best_counts[like])
        return len(self._links) - 1
