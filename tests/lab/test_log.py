"""Logs: what is written is read, damage of any file is named, and a log that was cut short is gone on with."""

import json
from pathlib import Path

import pytest
import torch
from logs import written

from outrider.errors import FileError
from outrider.flow import Sampling
from outrider.lab.log import Header, Log, LogWriter, Record
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


def test_the_header_keeps_every_option(tmp_path: Path) -> None:
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.2, {3: -float("inf"), 5: 0.1}, stop=("a", "b"), max_new_tokens=9)
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
        (lambda path: (path / "log.json").unlink(), "is no log: there is no log.json in it"),
        (lambda path: (path / "log.json").write_text("{}"), "log.json is damaged"),
        (lambda path: (path / "log.json").write_text("["), "log.json is damaged"),
        (lambda path: (path / "shard-00001.safetensors").unlink(), "record 32 is damaged: shard-00001"),
        (lambda path: _cut(path / "shard-00000.safetensors"), "record 0 is damaged: shard-00000"),
        (lambda path: _line(path, 7, "rubbish"), "record 7 is damaged: line 8 of index.jsonl"),
        (lambda path: _line(path, 7, '{"index": 7}'), "record 7 is damaged: line 8 of index.jsonl"),
        (lambda path: _swap(path), "record 3 is damaged: line 4 of index.jsonl"),
        (lambda path: _edit(path), "record 5 is damaged: its checksum does not fit"),
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


def _edit(path: Path) -> None:
    """A prompt that somebody has mended by hand."""
    row = json.loads((path / "index.jsonl").read_text().split("\n")[5])
    _line(path, 5, json.dumps(row | {"prompt": "another"}))


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
    writer = LogWriter(path, header, expected(records))
    assert writer.num_finished == num_whole
    writer.append(records[num_whole:])
    writer.flush()
    for got, want in zip(Log.open(path), records, strict=True):
        assert_same(got, want)


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
    with pytest.raises(FileError, match="is no log"):
        LogWriter(tmp_path, made[0], expected(made[1]))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        LogWriter(tmp_path / "file" / "log", made[0], expected(made[1]))
