"""Suffix decoding: its index and its corpus against a search in plain Python, and what the loop does with it."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from contract import check_state
from outrider.api import load, load_drafter
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.drafters import corpus as corpus_module
from outrider.drafters import draft_cache
from outrider.drafters import lookups as suffix_module
from outrider.drafters.corpus import Corpus, read_corpus
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import SuffixIndex, ngram_drafter, suffix_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import FileError, OptionError
from outrider.measure.along import proposals
from outrider.measure.log import Header
from outrider.measure.replay import load_draft, replay
from outrider.measure.teacher_forcing import Text
from pairs import word_tokenizer
from toys import as_lm, tiny_llama

Step = tuple[int, int, int, int]  # token, how often it followed, how often any did, length of what they followed


def _places_after(text: Sequence[int], part: Sequence[int]) -> list[int]:
    return [i + len(part) for i in range(len(text) - len(part) + 1) if list(text[i : i + len(part)]) == list(part)]


def _continuation(text: Sequence[int], most: int) -> Iterator[Step]:
    """By the latest of the most frequent followers of at most ``most`` tokens."""
    matched = [m for m in range(1, min(most, len(text)) + 1) if _followers(text, text[-m:])]
    part = list(text[len(text) - max(matched, default=0) :])
    while part and (found := _followers(text, part[-most:])):
        token = max(found, key=lambda one: (len(found[one]), found[one][-1]))
        yield token, len(found[token]), sum(map(len, found.values())), len(part)
        part.append(token)


def _followers(text: Sequence[int], part: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for end in _places_after(text, part):
        if end < len(text):
            found.setdefault(text[end], []).append(end)
    return found


def _continuation_in(corpus: Sequence[Sequence[int]], text: Sequence[int], most: int) -> Iterator[Step]:
    """By the most frequent followers of the longest suffix and all tokens after it; of several the smallest."""
    matched = [m for m in range(1, min(most, len(text)) + 1) if any(_places_after(one, text[-m:]) for one in corpus)]
    part = list(text[len(text) - max(matched, default=0) :])
    while part:
        counts: dict[int, int] = {}
        for one in corpus:
            for token, ends in _followers(one, part).items():
                counts[token] = counts.get(token, 0) + len(ends)
        if not counts:
            return
        token = min(counts, key=lambda one: (-counts[one], one))
        yield token, counts[token], sum(counts.values()), len(part)
        part.append(token)


def _texts(rng: random.Random, num: int) -> list[list[int]]:
    size = rng.randint(1, 4)
    return [[rng.randrange(size) for _ in range(rng.randint(1, 24))] for _ in range(num)]


@pytest.fixture(params=[1, 3])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(corpus_module, "_MOST_PLACES", 1000)
    for module in (suffix_module, corpus_module):
        monkeypatch.setattr(module, "MAX_MATCH", request.param)
    return request.param


def test_index_and_corpus_equal_a_search_over_all_substrings(most: int) -> None:
    """The index after each piece of a text. In a corpus nothing follows the end of a sequence, nor crosses it."""
    rng = random.Random(0)
    for _ in range(200):
        (text,), index = _texts(rng, 1), SuffixIndex()
        while (begin := index.num_tokens) < len(text):
            index.extend(text[begin : begin + rng.randint(1, 4)])
            read = text[: index.num_tokens]
            assert list(islice(index.continuation(), 8)) == list(islice(_continuation(read, most), 8)), read
            assert index.last_ids == read[-most:]
    for _ in range(300):
        text, *texts = _texts(rng, rng.randint(2, 5))
        found = Corpus(texts).continuation(text[-most:])
        assert list(islice(found, 8)) == list(islice(_continuation_in(texts, text, most), 8)), (texts, text)


def test_ngram_drafts_as_many_tokens_as_are_wanted() -> None:
    """However improbable they are, wherever the last token occurred before."""
    text = Text([3, 1, 3, 2, 3, 1, 4, 0, 3, 0], 9)
    for drafter, num in ((ngram_drafter(), 4), (suffix_drafter(), 2)):
        [[ids]] = proposals(drafter, [text], [[4]])
        assert ids == [1, 4, 0, 3][:num]
    assert proposals(ngram_drafter(), [Text([3, 1, 4, 0], 3)], [[4]]) == [[[]]]


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        (["w1 w2 w3", "w4"], [[1, 2, 3, 4]]),  # a text is one sequence
        ([{"prompt": "w1 w2", "text": " w3"}, {"text": "w4"}, {"prompt": "w5"}], [[1, 2, 3], [4], [5]]),
        ([{"prompt_ids": [1, 2], "token_ids": [3]}, {"token_ids": [7, 8]}], [[1, 2, 3], [7, 8]]),
        # As ``outrider generate --output`` writes them.
        ([{"prompt": "w1 ", "prompt_ids": [9], "token_ids": [800], "text": "w3 w4", "seed": 1}], [[1, 3, 4]]),
        (["", {"prompt": "w1", "finish_reason": "error"}, {"prompt": "w2"}], [[2]]),
        ([" ", ""], "contains no text"),
        ([{"text": "w1"}, "no JSON"], "line 2: not JSON"),
        ([{"token_ids": [97]}], "line 1: not token ids of the target (0 to 96)"),
    ],
)
def test_corpus_file_formats(tmp_path: Path, lines: list[Any], ids: list[list[int]] | str) -> None:
    """Token ids, or the error, which names the file."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    if isinstance(ids, list):
        assert read_corpus([path], word_tokenizer(), 97).digest == Corpus(ids).digest
        return
    with pytest.raises(FileError, match=re.escape(ids)) as error:
        read_corpus([path], word_tokenizer(), 97)
    assert str(path) in str(error.value)


def test_suffix_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Once upon a time there was a king.")
    decoder = load("fable", "suffix", device="cpu", corpus=[path])
    name = decoder.drafter.name
    assert re.fullmatch("suffix[+][0-9a-f]{8}", name) and load_drafter(decoder, "suffix").name == "suffix"
    (chunk, *_) = decoder.stream("Once upon a time", temperature=0.0, max_new_tokens=8, reports_drafts=True)
    assert chunk.drafted and decoder.tokenizer.decode(chunk.drafted[0].token_id) == " there"
    assert load_draft("suffix", Header.of(decoder, {}, has_probs=False), corpus=[path]).name == name
    pair = PairOptions(draft=["ngram", "suffix"], corpus=[path])
    assert [pair.load_draft(decoder, one).name for one in pair.draft_names] == ["ngram", name]
    assert options_json(pair, {})["corpus"] == [str(path)]
    for draft, files, message in (
        ("ngram", [path], "only the draft 'suffix' reads one"),
        ("suffix", [tmp_path / "none.txt"], "cannot read .*none.txt: No such file"),
    ):
        with pytest.raises((OptionError, FileError), match=message):
            load_drafter(decoder, draft, corpus=files)
    with pytest.raises(OptionError, match="--corpus = .*: only the draft 'suffix' reads one"):
        _ = PairOptions(draft=["ngram"], corpus=[path]).draft_names


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
    monkeypatch.setattr(draft_cache, "_ROUNDS", 0)
    with pytest.raises(AssertionError, match="q is off by|is drafted, not"):
        check_state(target, drafter, sequences, 3)


def test_a_hybrid_by_name(tmp_path: Path) -> None:
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
