"""``outrider chat``: as a filter of lines, and in a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider
from outrider.cli.commands import chat
from outrider.cli.shared.terminal import Writer
from outrider.records import Chunk
from pairs import embedded, random_llama, save, word_tokenizer

LONG = "Once upon a time there was a king who had a daughter, and she was the fairest of them all"


def _instruct(folder: Path) -> Path:
    """A model with a template that reads all messages, and the words of roles as unknown ones."""
    tokenizer = word_tokenizer()
    end = "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + end
    return save(folder, random_llama(context_len=128), tokenizer)


def test_chat_continues_the_text_of_a_base_model(outrider: Outrider) -> None:
    """By a base model: one text, of which only the new part is fed; an empty line continues it."""
    ended = outrider("chat", "--seed", 3, "-n", 6, "-k", 4, stdin=b"The king\n\n/reset\nThe king\n/quit\nnever\n")
    first = embedded().generate("The king", seed=3, max_new_tokens=6)[0].text
    second = embedded().generate("The king" + first, seed=4, max_new_tokens=6)[0].text
    third = embedded().generate("The king", seed=5, max_new_tokens=6)[0].text
    assert (ended.code, ended.out) == (0, f"{first}\n{second}\n{third}\n")
    assert len(re.findall(r"6 tokens, .* of \d+ prompt tokens cached", ended.err)) == len(ended.err.splitlines()) == 3


def test_a_chat_has_a_history_and_a_system_message(outrider: Outrider, tmp_path: Path) -> None:
    """The second prompt finds the first answer in the cache. Words that begin like commands are refused."""
    folder = _instruct(tmp_path / "model")
    said = b"w1 w2 w3 w4 w5 w6 w7 w8 w9 w10\nw2\n/system w40\n/what\n/help\n/etc/hosts: w3\n"
    ended = outrider("chat", folder, "none", "--seed", 1, "-n", 4, "--system", "w30", stdin=said)
    assert ended.code == 0, ended.err
    counts = [tuple(map(int, one)) for one in re.findall(r"(\d+) of (\d+) prompt tokens cached", ended.err)]
    assert [num_cached for num_cached, _ in counts] == [0, counts[0][1] - 1 + 4, 0]
    assert "there is no command /what" in ended.err and ended.err.count(chat._HELP) == 2
    assert len(ended.out.splitlines()) == 3
    assert "shorten it" in outrider("chat", folder, "none", "--generation-config", "none", stdin=b"w1 " * 130).error
    assert "has no chat template" in outrider("chat", "--system", "Be kind.").error
    assert "is not UTF-8" in outrider("chat", stdin=b"\xff\n").error


def test_a_model_for_chats_that_states_no_sampling(outrider: Outrider, tmp_path: Path) -> None:
    """It gets the options of other programs' chats; a line says which. Options that a checkpoint states win."""
    folder, asked = _instruct(tmp_path / "model"), ("--seed", 1, "-n", 2)
    said = {"stdin": b"w1 w2\n"}
    ended = outrider("chat", folder, "none", *asked, **said)
    lines = ended.err.splitlines()
    assert lines[0] == "sampling: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, since model states none"
    assert ended.code == 0
    ended = outrider("chat", folder, "none", *asked, "-t", 1, "--top-p", 1, **said)  # those given stand
    assert ended.err.startswith("sampling: top-k 40, min-p 0.05, since")
    assert "sampling" not in outrider("chat", folder, "none", *asked, "--generation-config", "none", **said).err
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert "sampling" not in outrider("chat", folder, "none", *asked, **said).err


def test_ctrl_c_stops_an_answer(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps its text so far, with its cache."""
    write, num_written = Writer.write_chunk, 0

    def pressed(writer: Writer, chunk: Chunk, styles: Any) -> None:
        nonlocal num_written
        write(writer, chunk, styles)
        num_written += 1
        if num_written == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Writer, "write_chunk", pressed)
    before = signal.getsignal(signal.SIGINT)
    ended = outrider("chat", "--seed", 3, "-n", 40, stdin=f"{LONG}\n\n".encode())
    assert ended.code == 0 and signal.getsignal(signal.SIGINT) is before
    first, second = re.findall(r"(\d+) tokens, .*, (\d+) of (\d+) prompt tokens cached(, stopped)?", ended.err)
    assert first[3] and int(first[0]) < 11 and not second[3]
    whole = embedded().generate(LONG, seed=3, max_new_tokens=40)[0].text
    cut = ended.out.partition("\n")[0]
    assert cut and whole.startswith(cut) and int(second[1]) > 0


@pytest.mark.slow
def test_chat_in_a_terminal() -> None:
    """Accepted tokens are underlined, a pasted text is one message, Ctrl-D ends."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "outrider", "chat", "fable", "fable-draft", "--seed", "1", "-n", "20", "-k", "4"]
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    seen = ""

    def until(pattern: str) -> re.Match[str]:
        nonlocal seen
        end_s = time.monotonic() + 300  # until a test that hangs is given up
        while (match := re.search(pattern, seen)) is None:
            assert time.monotonic() < end_s, seen
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 2**16).decode(errors="replace")
        seen = seen[match.end() :]
        return match

    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            text = until(r"(?s).*fable with fable-draft \(/help\).*a base model, which continues your text")[0]
            assert re.search(r"\r\x1b\[Kloading .*\r\x1b\[K", text)
            until("> ")
            os.write(master, b"Once upon a time\nthere was a miller\n")
            until(r"\x1b\[4m")
            assert int(until(r"0 of (\d+) prompt tokens cached")[1]) > 7
            until("> ")
            os.write(master, b"\x04")
            assert process.wait(300) == 0
        finally:
            process.kill()
            os.close(master)
