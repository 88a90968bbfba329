"""``--add-model``: more models on one server, each with a name and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cli.shared.pair_options import PairOptions
from outrider.errors import OptionError
from outrider.models.registry import resolve
from outrider.options import reads_corpus

_OPTION = "--add-model"
_DRAFT = ",draft="


def named_pairs(pair: PairOptions, names: Sequence[str], added: Sequence[str]) -> dict[tuple[str, ...], PairOptions]:
    """Pairs by their names for clients, in order.

    Args:
        pair: the first one. The others have its options.
        names: of the first.
        added: "NAME=TARGET" or "NAME=TARGET,draft=DRAFT"; the default draft is that of ``pair``.

    Raises:
        OptionError, ModelNotFound
    """
    first_draft, pairs = pair.single_draft, {tuple(names): pair}
    for text in added:
        name, _, rest = text.partition("=")
        target, comma, draft = rest.partition(_DRAFT)
        if not (name and target) or (comma and not draft):
            raise OptionError(_OPTION, text, "write NAME=TARGET or NAME=TARGET,draft=DRAFT")
        if any(name in others for others in pairs):
            raise OptionError(_OPTION, text, f"the name {name} is taken: give another")
        resolve(target, pair.models)  # before the others are loaded
        draft = draft or first_draft
        corpus = pair.corpus if reads_corpus(draft) else None
        pairs[(name,)] = replace(pair, target=target, draft=[draft], corpus=corpus)
    return pairs
