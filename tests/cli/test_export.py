"""``outrider export``."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from block_heads import write_block
from commands import Outrider, only_document
from heads import write_eagle3
from outrider.export.engines import ENGINES, RULES
from pairs import random_llama, save, word_tokenizer, zoo

LOSSY = ("fly", "synth", "typical", "relaxed", "posterior", "threshold")  # none of these is ever written
FILES = {
    "vllm": {"README.md", "draft", "request.json", "serve.sh", "speculative.json", "target"},
    "llama.cpp": {"README.md", "convert.sh", "request.json", "serve.sh"},
}


def _values(script: Path) -> dict[str, str]:
    words = shlex.split(script.read_text().replace("\\\n", "").splitlines()[-1])
    return {a: b for a, b in zip(words, words[1:], strict=False) if a.startswith("-")}


@pytest.mark.parametrize(("to", "temperature"), [("vllm", 0.8), ("vllm", 0.0), ("llama.cpp", 0.8)])
def test_folders_have_the_rule_and_the_options(outrider: Outrider, tmp_path: Path, to: str, temperature: float) -> None:
    words = "--to", to, "-t", temperature, "--top-k", 7, "--repetition-penalty", 1.25, "-k", 3
    ended = outrider("export", *words, "--output", tmp_path / "out", "--json", tmp_path / "json")
    assert (ended.code, ended.err) == (0, "")
    document = only_document((tmp_path / "json").read_text(), "export")
    found = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert found.keys() == set(document["files"]) == FILES[to]
    setting = "probabilistic" if temperature else "greedy"
    rule = ENGINES[to].rules[setting]
    assert (document["k"], document["law"], document["setting"]) == (3, rule, setting)
    assert RULES[rule] in found["README.md"].read_text() and RULES[rule] in ended.out
    for name, path in found.items():
        text = path.read_text() if path.is_file() else ""
        assert not any(word in text for word in LOSSY), name
        if name.endswith(".sh"):
            assert os.access(path, os.X_OK)
            subprocess.run(["sh", "-n", path], check=True)
    request, values = json.loads(found["request.json"].read_text()), _values(found["serve.sh"])
    if to == "vllm":
        assert values["--max-model-len"] == "1024" and values["--speculative-config"] == "$(cat speculative.json)"
        own = json.loads(found["speculative.json"].read_text())
        assert (own["method"], own["num_speculative_tokens"]) == ("draft_model", 3)
        assert (own["draft_sample_method"], own["rejection_sample_method"]) == (setting, "standard")
        assert [request[key] for key in ("temperature", "top_k", "repetition_penalty")] == [temperature, 7, 1.25]
    else:
        assert values["--spec-draft-n-max"] == "3" and values["--spec-draft-sampling"] == setting
        assert values["--samplers"] == "penalties;temperature;top_k;top_p;min_p"
        names = ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--repeat-last-n", "-c")
        assert [values[name] for name in names] == [f"{temperature:g}", "7", "1", "0", "1.25", "1024", "1024"]


def test_only_links_are_replaced(outrider: Outrider, tmp_path: Path) -> None:
    for _ in range(2):
        assert outrider("export", "--to", "vllm", "--output", tmp_path).code == 0
    assert (tmp_path / "target").resolve() == zoo("fable") and (tmp_path / "draft").resolve() == zoo("fable-draft")
    (tmp_path / "draft").unlink()
    (tmp_path / "draft").mkdir()
    assert "already exists" in outrider("export", "--to", "vllm", "--output", tmp_path).error


def test_heads_are_linked_or_converted_with_their_target(outrider: Outrider, tmp_path: Path) -> None:
    model = random_llama(num_layers=4)
    target = save(tmp_path / "T", model)
    write_eagle3(tmp_path / "eagle3", model, token_ids=[3, 5, 8, 13])
    write_block(tmp_path / "dflash", model, layout="speculators")
    for to, kind in (("vllm", "dflash"), ("llama.cpp", "eagle3")):
        head, output = tmp_path / kind, tmp_path / f"{to} {kind}"
        ended = outrider("export", "--to", to, "--target", target, "--draft", head, "--output", output)
        assert (ended.code, ended.err) == (0, "")
        if to == "llama.cpp":
            assert _values(output / "serve.sh")["--spec-type"] == "draft-eagle3"
            convert = (output / "convert.sh").read_text()
            assert f"{head.resolve()} --outfile draft.gguf --target-model-dir {target}" in convert
        else:
            assert (output / "draft").resolve() == head.resolve()
            config = json.loads((output / "speculative.json").read_text())
            assert (config["method"], config["num_speculative_tokens"]) == (kind, 4)

    pair = "--target", target, "--draft", tmp_path / "dflash", "--output", tmp_path / "none"
    assert "takes eagle3 heads, too" in outrider("export", "--to", "llama.cpp", *pair, "-k", 2).error
    assert "drafts at most 4 tokens" in outrider("export", "--to", "vllm", *pair, "-k", 5).error
    write_block(tmp_path / "dflash", model, layout="zlab", is_second=True)
    assert "is a DFlash 2 head" in outrider("export", "--to", "vllm", *pair).error
    assert not (tmp_path / "none").exists()


def test_pairs_that_an_engine_cannot_serve_are_refused(outrider: Outrider, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    target = save(tmp_path / "t", random_llama(seed=1, context_len=256), tokenizer)
    pair = "export", "--to", "vllm", "--output", tmp_path / "out", "--target", target, "--draft"
    short = save(tmp_path / "short", random_llama(context_len=64), tokenizer)
    assert "takes 64 tokens: set --context 64" in outrider(*pair, short).error
    other = save(tmp_path / "other", random_llama(context_len=256), word_tokenizer(word="v{}"))
    assert "have different tokenizers" in outrider(*pair, other).error
    assert not (tmp_path / "out").exists()
