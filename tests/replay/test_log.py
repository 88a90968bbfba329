"""Logs: what is written is read, damage of any file is named, and a log that was cut short is gone on with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from logs import written

from outrider.errors import FileError
from outrider.options import Sampling
from outrider.replay import log_writer as module
from outrider.replay.log import Log
from outrider.replay.log_format import Header, Record
from outrider.replay.log_writer import LogWriter
from toys import llama_pair

PROMPTS = [[1 + i % 4, 2, i % 50] for i in range(40)]


@pytest.fixture(scope="module")
def made() -> tuple[Header, list[Record]]:
    header, records = written(llama_pair()[0], PROMPTS, 3, temperature=0.8, max_new_tokens=4)
    kinds = ["tale", None, "sum"]
    return header, [Record(r.index, f"prompt {r.index} \u2028 ü", kinds[r.index % 3], *_rest(r)) for r in records]


def _rest(r: Record) -> tuple[object, ...]:
    return r.seed, r.finish_reason, r.prompt_ids, r.token_ids, r.probs


def expected(records: list[Record]) -> list[tuple[str, str | None, int]]:
    return [(r.prompt, r.category, r.seed) for r in records]


def write(path: Path, made: tuple[Header, list[Record]]) -> Path:
    header, records = made
    writer = LogWriter(path, header, expected(records))
    for record in records:
        writer.append([record])
    writer.flush()
    return path


def assert_same(a: Record, b: Record) -> None:
    assert (a.index, a.prompt, a.category, *_rest(a)[:-1]) == (b.index, b.prompt, b.category, *_rest(b)[:-1])
    for name in ("token_probs", "top_ids", "top_probs", "tail"):
        torch.testing.assert_close(getattr(a.probs, name), getattr(b.probs, name), rtol=0, atol=0)


def test_what_is_written_is_read(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    log = Log.open(write(tmp_path / "log", made))
    header, records = made
    assert log.header == header and len(log) == 40
    assert sorted(file.name for file in (tmp_path / "log").iterdir()) == [
        "index.jsonl",
        "log.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    for got, want in zip(log, records, strict=True):
        assert_same(got, want)


def test_large_records_fill_a_shard_sooner(
    made: tuple[Header, list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, records = made
    monkeypatch.setattr(module, "_MOST_SHARD_BYTES", 1)
    writer = LogWriter(tmp_path / "log", header, expected(records[:3]))
    for one in records[:3]:
        writer.append([one])
        assert writer.num_finished == one.index + 1
    assert [line.shard for line in Log.open(tmp_path / "log").lines] == [0, 1, 2]


def test_the_header_keeps_every_option(tmp_path: Path) -> None:
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.2, {3: -float("inf"), 5: 0.1}, stop=("a", "b"), max_new_tokens=9)
    later = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 3, "stop_token_ids": (7,)}
    sampling = replace(sampling, **later)
    header = Header("t", sampling, None, 10, 64, (1, 2), None, {"chat": True}, {"time": "now"})
    LogWriter(tmp_path / "log", header, [])
    assert Log.open(tmp_path / "log").header == header


@pytest.mark.parametrize("name", ["log.json", "index.jsonl", "shard-00000.safetensors", "shard-00001.safetensors"])
def test_no_flipped_byte_goes_unseen(made: tuple[Header, list[Record]], tmp_path: Path, name: str) -> None:
    """At places spread over every file: an error of ours that names the file or the record, or the very same records
    (white space, and padding in the shards, say nothing)."""
    path = write(tmp_path / "log", made)
    whole = (path / name).read_bytes()
    num_seen = 0
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        try:
            log = Log.open(path)
            assert log.header == made[0]
            for got, want in zip(log, made[1], strict=True):
                assert_same(got, want)
        except FileError as error:
            num_seen += 1
            assert "damaged" in str(error) or "is known here" in str(error)
            assert str(path) in str(error) and "\n" not in str(error)
    assert num_seen >= 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "log.json").unlink(), "is not a log: it has no log.json"),
        (lambda path: (path / "log.json").write_text("{}"), "log.json is damaged"),
        (lambda path: (path / "log.json").write_text("["), "log.json is damaged"),
        (lambda path: (path / "shard-00001.safetensors").unlink(), "record 32 is damaged: shard-00001"),
        (lambda path: _cut(path / "shard-00000.safetensors"), "record 0 is damaged: shard-00000"),
        (lambda path: (path / "log.json").write_text("[" * 99_999), "log.json is damaged"),
        (lambda path: (path / "log.json").write_text("9" * 5000), "log.json is damaged"),
        (lambda path: _line(path, 7, "[" * 99_999), "record 7 is damaged: line 8 of index.jsonl"),
        (lambda path: _line(path, 7, "rubbish"), "record 7 is damaged: line 8 of index.jsonl"),
        (lambda path: _line(path, 7, '{"index": 7}'), "record 7 is damaged: line 8 of index.jsonl"),
        (lambda path: _swap(path), "record 3 is damaged: line 4 of index.jsonl"),
        (lambda path: _edit(path), "record 5 is damaged: its checksum does not match"),
        (lambda path: _schema(path), "has the schema 'outrider/log/9'"),
    ],
)
def test_damage_is_named(made: tuple[Header, list[Record]], tmp_path: Path, damage: object, message: str) -> None:
    path = write(tmp_path / "log", made)
    damage(path)
    with pytest.raises(FileError, match=message.replace("(", r"\(")):
        list(Log.open(path))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def _line(path: Path, index: int, text: str) -> None:
    lines = (path / "index.jsonl").read_text().split("\n")
    lines[index] = text
    (path / "index.jsonl").write_text("\n".join(lines))


def _swap(path: Path) -> None:
    lines = (path / "index.jsonl").read_text().split("\n")
    lines[3], lines[4] = lines[4], lines[3]
    (path / "index.jsonl").write_text("\n".join(lines))


def _edit(path: Path, index: int = 5) -> None:
    """A prompt that somebody has mended by hand."""
    row = json.loads((path / "index.jsonl").read_text().split("\n")[index])
    _line(path, index, json.dumps(row | {"prompt": "another"}))


def _schema(path: Path) -> None:
    document = json.loads((path / "log.json").read_text())
    (path / "log.json").write_text(json.dumps(document | {"schema": "outrider/log/9"}))


def test_other_records_are_read_beside_a_damaged_one(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    path = write(tmp_path / "log", made)
    (path / "shard-00001.safetensors").unlink()
    log = Log.open(path)
    assert_same(log.read(31), made[1][31])
    with pytest.raises(FileError, match="record 32"):
        log.read(32)


def _resume(writer: LogWriter, path: Path, records: Sequence[Record], num_finished: int) -> None:
    """Write what is missing; the log then has all records."""
    assert writer.num_finished == num_finished
    writer.append(records[num_finished:])
    writer.flush()
    for got, want in zip(Log.open(path), records, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("num_whole", [0, 1, 31, 32, 33, 40])
@pytest.mark.parametrize("half", ["", '{"ind', '{"index": 99, "prompt": "ab'])
def test_a_log_that_was_cut_short_is_gone_on_with(
    made: tuple[Header, list[Record]], tmp_path: Path, num_whole: int, half: str
) -> None:
    """After any line of the index, whole or half; what is in the end there is what was to be written."""
    header, records = made
    path = write(tmp_path / "log", made)
    lines = (path / "index.jsonl").read_text().split("\n")[:-1]
    (path / "index.jsonl").write_text("".join(f"{line}\n" for line in lines[:num_whole]) + half)
    assert len(Log.open(path)) == num_whole
    _resume(LogWriter(path, header, expected(records)), path, records, num_whole)


def test_the_log_of_another_run_is_left_alone(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    header, records = made
    path = write(tmp_path / "log", made)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    others = [
        (Header("other", *_of(header)[1:]), expected(records), "its target differ"),
        (Header(*_of(header)[:1], Sampling(0.5), *_of(header)[2:]), expected(records), "its sampling differ"),
        (header, expected(records[:-1]), "record 39 comes from another run"),
        (header, [("else", None, 0), *expected(records[1:])], "record 0 comes from another run"),
    ]
    for other, prompts, message in others:
        with pytest.raises(FileError, match=message):
            LogWriter(path, other, prompts)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def _of(header: Header) -> tuple[object, ...]:
    return (
        header.target,
        header.sampling,
        header.num_probs,
        header.vocab_size,
        header.context_len,
        header.eos_ids,
        header.tokenizer,
    )


def test_a_folder_that_is_no_log_is_left_alone(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match="is not a log"):
        LogWriter(tmp_path, made[0], expected(made[1]))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        LogWriter(tmp_path / "file" / "log", made[0], expected(made[1]))


def test_what_is_referred_to_is_on_disk_first(
    made: tuple[Header, list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header, the shard and the folder's entry for it before the index grows, and then the index."""
    path, seen = tmp_path / "log", []

    def to_disk(file: Path) -> None:
        index = path / "index.jsonl"
        seen.append((file.name, index.stat().st_size if index.exists() else 0))

    monkeypatch.setattr(module, "to_disk", to_disk)
    write(path, (made[0], made[1][:3]))
    size = (path / "index.jsonl").stat().st_size
    assert seen == [
        ("log.json", 0),
        ("log", 0),
        ("shard-00000.safetensors", 0),
        ("log", 0),
        ("index.jsonl", size),
        ("log", size),
    ]


@pytest.mark.parametrize("place", range(1, 7))
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_flush_can_be_done_again(
    made: tuple[Header, list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, error: object
) -> None:
    """Wherever it was interrupted: the index holds each record once."""
    header, records = made
    writer = LogWriter(tmp_path / "log", header, expected(records))
    writer.append(records[:32])
    calls: list[object] = []

    def interrupted(function: object) -> object:
        def wrapped(*arguments: object) -> object:
            result = function(*arguments)
            calls.append(function)
            if len(calls) == place:
                raise error
            return result

        return wrapped

    for name in ("to_disk", "write_whole", "save"):
        monkeypatch.setattr(module, name, interrupted(getattr(module, name)))
    with pytest.raises((KeyboardInterrupt, FileError)):
        writer.append(records[32:])
        writer.flush()
    assert len(Log.open(tmp_path / "log")) == writer.num_finished == 32
    writer.flush()
    for got, want in zip(Log.open(tmp_path / "log"), records, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("damage", "num_good"),
    [
        (lambda path: (path / "shard-00001.safetensors").unlink(), 32),
        (lambda path: (path / "shard-00001.safetensors").write_bytes(b"\0" * 999), 32),
        (lambda path: _edit(path, 35), 35),
        (lambda path: [(path / f"shard-0000{i}.safetensors").write_bytes(b"") for i in range(2)], 0),
    ],
)
def test_records_at_the_end_that_cannot_be_read_are_recorded_again(
    made: tuple[Header, list[Record]], tmp_path: Path, damage: Callable[[Path], object], num_good: int
) -> None:
    header, records = made
    path = write(tmp_path / "log", made)
    damage(path)
    prompts = [(line.prompt, line.category, line.seed) for line in Log.open(path).lines]  # one may be edited
    writer = LogWriter(path, header, prompts)
    assert len(Log.open(path)) == num_good
    _resume(writer, path, records, num_good)


def test_a_missing_shard_before_the_last_is_told(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    header, records = made
    path = write(tmp_path / "log", made)
    (path / "shard-00000.safetensors").unlink()
    before = (path / "index.jsonl").read_bytes()
    with pytest.raises(FileError, match="record 0 is damaged: shard-00000.safetensors is missing; .* remove the fold"):
        LogWriter(path, header, expected(records))
    assert (path / "index.jsonl").read_bytes() == before


def test_a_log_of_nothing_yet_is_written_over(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    """And what a killed write has left does not count; but only a header of ours is written over."""
    header, records = made
    path = tmp_path / "log"
    LogWriter(path, Header("other", *_of(header)[1:]), [])
    (path / "shard-00000.safetensors.0f3a9c.part").write_bytes(b"half")
    write(path, made)
    assert Log.open(path).header == header and len(Log.open(path)) == len(records)
    other = tmp_path / "other"
    other.mkdir()
    (other / "log.json.77.part").write_bytes(b"")
    LogWriter(other, header, [])
    (other / "log.json").write_text('{"mine": 1}')
    with pytest.raises(FileError, match="damaged"):
        LogWriter(other, header, [])


def test_records_are_counted_from_the_beginning(made: tuple[Header, list[Record]], tmp_path: Path) -> None:
    log = Log.open(write(tmp_path / "log", made))
    for index in (-1, 40):
        with pytest.raises(IndexError):
            log.read(index)
