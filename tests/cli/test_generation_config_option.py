"""``--generation-config``: commands take the checkpoint's sampling options where none are given."""

from pathlib import Path

from commands import Outrider, only_document
from pairs import stating

STATED = {"temperature": 0.4, "top_k": 9}


def test_commands_take_them_and_say_so(outrider: Outrider, tmp_path: Path) -> None:
    folder = stating(tmp_path / "fable", STATED)
    arguments = ("generate", "Once", "--target", folder, "--draft", "none", "-n", 2, "--seed", 1, "--json", "-")
    line = f"sampling as {folder} states in its generation_config.json: "
    ended = outrider(*arguments)
    assert f"{line}temperature 0.4, top_k 9 (--generation-config none does without)" in ended.err
    options = only_document(ended.out, "generate")["options"]
    assert options.items() >= STATED.items() and options["max_new_tokens"] == 2
    ended = outrider(*arguments, "-t", 1.0, "--top-k", 0)  # given, though they are the defaults
    options = only_document(ended.out, "generate")["options"]
    assert (options["temperature"], options["top_k"]) == (1.0, 0) and "sampling as" not in ended.err
    ended = outrider(*arguments, "--generation-config", "none")
    assert only_document(ended.out, "generate")["options"]["temperature"] == 1.0 and "sampling as" not in ended.err
    assert "generation_config = 'x' is invalid" in outrider(*arguments, "--generation-config", "x").error
