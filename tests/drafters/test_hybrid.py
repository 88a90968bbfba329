"""The suffix drafts where its score is high, and another drafter in the other rows."""

import re
from pathlib import Path
from typing import Any

import pytest

from contract import check_state
from outrider.api import load, load_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.drafters.model import ModelSession, model_drafter
from outrider.errors import OptionError
from outrider.measure.log import Header
from outrider.measure.replay import replay
from toys import as_lm, tiny_llama


def test_a_model_that_misses_the_tokens_of_the_suffix_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the contract: a round without drafts of the model commits more than one token here."""
    target = as_lm(tiny_llama(vocab_size=4))
    model = model_drafter(as_lm(tiny_llama(1, vocab_size=4), "draft"))
    sequences = [
        ([3, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 1, 0, 2]),
        ([0, 2], [0, 2, 0, 2, 0, 2, 0, 1, 3, 2, 1]),
    ]
    drafter = hybrid_drafter(suffix_drafter(), model, 4, 0.4)
    check_state(target, drafter, sequences, 3)
    monkeypatch.setattr(ModelSession, "_note", lambda self, rows: setattr(self, "_gaps", [0] * len(self._gaps)))
    with pytest.raises(AssertionError, match="q is off by|is drafted, not"):
        check_state(target, drafter, sequences, 3)


def test_by_name(tmp_path: Path) -> None:
    """The model's drafts are masked by constraints; a forbidden token of the suffix is rejected."""
    path = tmp_path / "corpus.txt"
    path.write_text("The old king lived in a castle by the sea.")
    decoder = load("fable", "suffix+fable-draft", device="cpu", num_draft_tokens=4)
    drafter = load_drafter(decoder, "suffix+fable-draft", corpus=[path])
    assert re.fullmatch("suffix[+][0-9a-f]{8}[+]fable-draft", drafter.name)
    options: dict[str, Any] = {"regex": "(the (king|queen) and ){12}", "temperature": 0.0, "max_new_tokens": 40}
    prompts = ["the king and the queen and the cat and the king and the queen and ", "Once upon a time "]
    got, want = decoder.generate(prompts, **options), decoder.plain().generate(prompts, **options)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert all(one.stats.num_accepted_draft_tokens > 10 for one in got)
    for name in ("suffix+", "suffix+ngram", "suffix+suffix+fable-draft"):
        with pytest.raises(OptionError, match="give the name of a model after 'suffix[+]'"):
            load_drafter(decoder, name)
    header = Header.of(decoder, {}, has_probs=False)  # a log does not tell its drafts
    with pytest.raises(OptionError, match="its q is known in rounds with the target only"):
        next(replay([], header, decoder.drafter, "block", [2]))
