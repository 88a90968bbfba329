"""Training sequences: a function of the seed and the index, from two sources."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.distill.data import Mixture, generate_sequences, pack, read_sequences
from outrider.errors import FileError, OptionError
from outrider.measure.teacher_forcing import Text
from pairs import embedded

TEXT = torch.arange(1000)
WRITTEN = 5000 + torch.arange(60).reshape(6, 10)


def test_a_mixture_is_a_function_of_seed_and_index() -> None:
    """2,000 sequences, a quarter written: 500 +- 5 standard deviations of 19 (p = 6e-7)."""
    one, same, other = (Mixture(TEXT, WRITTEN, 10, 0.25, seed) for seed in (1, 1, 2))
    rows, others = torch.stack([one[i] for i in range(2000)]), torch.stack([other[i] for i in range(50)])
    assert torch.equal(rows[7], same[7]) and not torch.equal(rows[:50], others)
    is_written = rows[:, 0] >= 5000
    assert abs(int(is_written.sum()) - 500) <= 97
    assert bool((rows.diff(dim=1) == 1).all())  # pieces of either source, not of both
    assert {int(row[0]) for row in rows[is_written]} == {int(row[0]) for row in WRITTEN}
    assert int(Mixture(None, WRITTEN, 10, 0.5, 0)[0][0]) >= 5000
    ids = Mixture(TEXT, WRITTEN, 10, 0.0, 0, beginning=(7000,))[0]  # a tokenizer's token before every text
    assert ids.shape == (10,) and ids[0] == 7000 and bool((ids[1:].diff() == 1).all())
    with pytest.raises(OptionError, match="only 5 tokens"):
        Mixture(TEXT[:5], WRITTEN, 10, 0.5, 0)


def test_outputs_are_packed() -> None:
    """All tokens of the texts that are not held out, in their order within a text, but for the rest at the end."""
    texts = [Text(range(100 * i, 100 * i + 7 + i), 3 if i else 6) for i in range(1, 41)] + [Text(range(30), 12)]
    sequences, held_out = pack(texts, 12, seed=0)
    assert sequences.shape[1] == 12 and torch.equal(sequences, pack(texts, 12, seed=0)[0])
    assert not torch.equal(sequences, pack(texts, 12, seed=1)[0])
    held = {text.ids[0] for text in held_out}
    assert len(held) == 2 and all(len(text.ids) == 12 and text.num_given == 3 for text in held_out)
    left = sequences.flatten().tolist()
    rest = [text for text in texts if text.ids[0] not in held]
    assert sum(len(text.ids) for text in rest) - 12 < len(left)
    assert not {i // 100 for i in left} & {i // 100 for i in held}
    breaks = [other for one, other in zip(left, left[1:], strict=False) if other != one + 1]
    assert len(breaks) <= len(rest) and all(other % 100 == 0 for other in breaks)
    with pytest.raises(OptionError, match="too few or too short"):
        pack([Text(range(11), 3)], 12, seed=0)


def test_written_sequences_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = embedded().plain()
    text = torch.tensor(decoder.tokenizer("Once upon a time there was a king who had a horse. " * 4).input_ids)

    def write(folder: Path, **share: Any) -> None:
        generate_sequences(decoder, text, folder, num_sequences=4, length=24, seed=3, **share)

    def read(folder: Path) -> torch.Tensor:
        rest, held = read_sequences(folder, num_sequences=4, length=24)
        assert [text.num_given for text in held] == [12]
        return torch.cat((rest, torch.tensor([held[0].ids])))

    monkeypatch.setattr("outrider.distill.data._FILE_SIZE", 2)
    write(tmp_path)
    rows = read(tmp_path)
    assert rows.shape == (4, 24)
    beginnings = {tuple(part.tolist()) for part in text.unfold(0, 12, 1)}
    assert all(tuple(row[:12].tolist()) in beginnings for row in rows)
    first, second = sorted(tmp_path.iterdir())
    before = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-9])  # as if it had been cut off
    with pytest.raises(FileError, match="written-0000002"):
        read_sequences(tmp_path, num_sequences=4, length=24)
    write(tmp_path)
    assert torch.equal(read(tmp_path), rows)
    assert first.stat().st_mtime_ns == before
    # Two processes write the same as one.
    for i in (1, 0):
        write(tmp_path / "two", share=(i, 2))
        assert len(list((tmp_path / "two").iterdir())) == 2 - i
    assert torch.equal(read(tmp_path / "two"), rows)
    generate_sequences(decoder, None, tmp_path / "own", num_sequences=2, length=30, seed=0)  # without a text
    own, _ = read_sequences(tmp_path / "own", num_sequences=2, length=30)
    assert decoder.tokenizer.decode(own[0].tolist()).startswith("Once upon a time there lived")
