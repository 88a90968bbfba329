"""When a row ends: at the very token, with nothing of a stop string ever shown."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.records import FinishReason
from outrider.text.row_text import RowText
from outrider.text.thinking import Stage, Thinking
from outrider.text.thought_splitter import ThoughtSplitter
from outrider.text.tokenizer import Detokenizer
from pairs import byte_level_tokenizer


class Pieces:
    """A detokenizer by table: token i has text i; what was not asked for comes with the flush."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.push, self.rest = pieces.__getitem__, rest

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


Shown = tuple[list[str], str, FinishReason | None, int, list[tuple[int, str]]]
"""What came of a row: the text after each token, the text in the end, why and when it ended, and the text by token."""


def play(pieces: Sequence[str], stop: Sequence[str] = (), *, rest: str = "", end: int | None = None) -> Shown:
    row = RowText(Pieces(pieces, rest), () if end is None else {end}, stop)
    steps, owners, reason, count = list[str](), list[tuple[int, str]](), None, 0
    for count in range(1, len(pieces) + 1):
        if (reason := row.push(count - 1)) is not None:
            break
        owners += row.take()
        steps.append("".join(piece for _, piece in owners))
    row.finish()
    owners += row.take()
    assert row.take() == []
    return steps, "".join(piece for _, piece in owners), reason, count, owners


def ends_at(text: str, stop: Sequence[str]) -> int | None:
    found = [at for at in map(text.find, stop) if at >= 0]
    return min(found, default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    beginnings = {""} | {string[:n] for string in stop for n in range(len(string))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings)


TEXTS = st.lists(st.text("ab.", max_size=3), max_size=12)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(pieces=TEXTS, stop=STOPS)
def test_every_row_ends_as_a_search_of_its_text_says(pieces: list[str], stop: list[str]) -> None:
    """All is shown at once that cannot become a stop string. Text keeps the token that it came with."""
    steps, shown, reason, num_tokens, owners = play(pieces, stop)
    for count, step in enumerate(steps, start=1):
        text = "".join(pieces[:count])
        assert step == text[: len(text) - held_back(text, stop)]
    by_token = [""] * len(pieces)
    for index, piece in owners:
        assert piece
        by_token[index] += piece
    assert all(piece.startswith(part) for piece, part in zip(pieces, by_token, strict=True))
    assert owners == sorted(owners, key=lambda owner: owner[0])
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        at = ends_at(text, stop)
        if at is not None:
            assert (reason, num_tokens, shown) == ("stop", count, text[:at])
            return
    assert (reason, num_tokens, shown) == (None, len(pieces), "".join(pieces))


MARKERS = Thinking("[a", "b]", (90,), 91)
THOUGHTS = st.lists(st.sampled_from(["[a", "b]", "[", "a", "b", "]", " ", "ab", "b] a", "a "]), max_size=12)


@given(THOUGHTS, st.lists(st.sampled_from(["a", "b", " ", "ab", "]", "[", "b] a"]), max_size=2), st.data())
def test_stop_strings_wait_for_the_end_of_a_thought(pieces: list[str], stop: list[str], data: st.DataObject) -> None:
    """They are searched in the content that a client sees; thoughts are shown at once, and so are their parts."""
    stage: Stage = data.draw(st.sampled_from(("before", "in", "after")))
    is_continued = data.draw(st.booleans())

    def split(text: str) -> tuple[ThoughtSplitter, str]:
        splitter = ThoughtSplitter(MARKERS, stage, is_continued=is_continued)
        return splitter, "".join(piece.text for piece in splitter.feed(text) if piece.kind == "content")

    def shown_content() -> str:
        return "".join(part.text for parts in row.parts for part in parts if part.kind == "content")

    row = RowText(Pieces(pieces), (), stop, thoughts=split("")[0])
    shown = ""
    for count in range(1, len(pieces) + 1):
        reason = row.push(count - 1)
        shown += "".join(piece for _, piece in row.take())
        text = "".join(pieces[:count])
        splitter, content = split(text)
        begins = len(text) - len(content)
        at = ends_at(content, stop)
        if at is not None:
            assert (reason, shown, shown_content()) == ("stop", text[: begins + at], content[:at])
            return
        num_held = held_back(content, stop)
        held = num_held + splitter.num_waiting if stop else 0
        assert (reason, shown) == (None, text[: len(text) - held])
        assert shown_content() == content[: len(content) - num_held]
    row.finish()
    assert shown + "".join(piece for _, piece in row.take()) == "".join(pieces)


def test_the_end_of_a_row() -> None:
    """Nothing after a stop string is shown. At an end token, what was held back is text after all."""
    assert play(["a", "STOP and go on"], ["STOP"], rest="?")[1:3] == ("a", "stop")
    assert play(["a", "\n", "never", "shown"], ["\n\n"], end=2)[1:4] == ("a\n", "eos", 3)
    assert play(["a", ""], ["ab"], rest="\ufffd")[1::3] == ("a\ufffd", [(0, "a"), (1, "\ufffd")])
    row = RowText(Pieces(["a", "b", "c"]), {2}, (), stop_ids={1, 2})
    assert [row.push(i) for i in (0, 1, 2)] == [None, "stop", "eos"] and row.stop_reason == 1
    row = RowText(Pieces(["ab", "x", "b"]), (), ["b", "abc"], min_tokens=1)
    reasons = [row.push(i) for i in range(3)]
    assert reasons == [None, None, "stop"] and row.stop_reason == "b"  # one came too early
    assert "".join(piece for _, piece in row.take()) == "abx"
    row = RowText(None, {9}, ())
    assert [row.push(i) for i in (1, 9)] == [None, "eos"] and row.take() == []


def test_a_stop_string_before_half_a_character_ends_the_row_at_once() -> None:
    """With the token that holds both (GPT-2 has one of a space and F0), and not with the one after it."""
    tokenizer = byte_level_tokenizer(["!\u00f0"])  # the byte F0, with which emoji begin, is written \u00f0
    ids = tokenizer("go!🙂", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[2:3]).startswith("!") and len(ids) == 6
    row = RowText(Detokenizer(tokenizer, tokenizer("Once").input_ids), (), ["!"])
    assert [row.push(i) for i in ids[:3]] == [None, None, "stop"]
    row.finish()
    assert "".join(piece for _, piece in row.take()) == "go"
