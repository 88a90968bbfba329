"""``outrider export``."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from block_heads import write_block
from commands import Outrider, only_document
from heads import write_eagle3
from outrider.api import load
from outrider.export.engines import ENGINES, RULES
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from pairs import random_llama, save, word_tokenizer, zoo
from toys import as_lm


def test_export_is_one_process(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.commands.export.is_one_of_several", lambda: True)
    ended = outrider("export", "--to", "vllm", "--output", tmp_path / "out")
    assert ended.code == 2 and "leave out torchrun" in ended.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ENGINES)
def test_a_pair(outrider: Outrider, tmp_path: Path, to: str) -> None:
    """Each engine's folder has the files that are named, with its rule and the sampling options."""
    words = "--to", to, "-t", 0.8, "--top-k", 7, "-k", 3
    ended = outrider("export", *words, "--output", tmp_path / "out", "--json", tmp_path / "json")
    assert (ended.code, ended.err) == (0, "")
    document = only_document((tmp_path / "json").read_text(), "export")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(document["files"])
    rule = ENGINES[to].rules[document["setting"] or ""]
    assert (document["k"], document["law"]) == (3, rule)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert RULES[rule] in readme and RULES[rule] in ended.out
    draft = "fable-draft:greedy" if rule == "greedy" else "fable-draft"
    assert f"K = 3. `outrider replay LOG --draft {draft} --acceptance rejection` predicts tau" in readme
    written = (path for path in (tmp_path / "out").iterdir() if path.suffix in (".sh", ".json", ".py"))
    assert "0.8" in "".join(path.read_text() for path in written)


def test_files_are_written_in_their_own_place(outrider: Outrider, tmp_path: Path) -> None:
    """With the K that was asked for, or 4; nothing but links is replaced."""
    ended = outrider("export", "--to", "vllm", "--output", tmp_path, "--json", "-")
    document = only_document(ended.out, "export")
    assert document["k"] == 4 and document["setting"] == "probabilistic"
    assert (tmp_path / "target").resolve() == zoo("fable") and (tmp_path / "draft").resolve() == zoo("fable-draft")
    assert os.access(tmp_path / "serve.sh", os.X_OK)
    assert outrider("export", "--to", "vllm", "--output", tmp_path, "-k", 7, "-t", 0).code == 0  # in its own place
    config = json.loads((tmp_path / "speculative.json").read_text())
    assert (config["num_speculative_tokens"], config["draft_sample_method"]) == (7, "greedy")
    (tmp_path / "draft").unlink()
    (tmp_path / "draft").mkdir()
    assert "already exists" in outrider("export", "--to", "vllm", "--output", tmp_path).error


def _random_pair(folder: Path, **more: Any) -> tuple[Path, Path]:
    """In float64, so that no near tie decides."""
    tokenizer = word_tokenizer()
    target = save(folder / "t", random_llama(seed=1, context_len=256), tokenizer)
    return target, save(folder / "d", random_llama(seed=2, **{"context_len": 256} | more), tokenizer)


def test_transformers_runs_what_is_written(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = _random_pair(tmp_path)
    arguments = "--target", target, "--draft", draft, "-t", 0, "-k", 3, "--output", tmp_path / "out"
    assert outrider("export", "--to", "transformers", *arguments).code == 0
    monkeypatch.chdir(tmp_path)  # and back again: the script goes to its own folder
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "out" / "generate.py"))
    decoder = load(target, dtype="float64")
    [want] = decoder.generate("Once upon a time", max_new_tokens=128, temperature=0.0)
    assert capsys.readouterr().out.strip().endswith(want.text.strip()) and len(want.token_ids) > 5


def test_llama_cpp_gets_its_own_converter(outrider: Outrider, tmp_path: Path) -> None:
    target, draft = _random_pair(tmp_path)
    arguments = "--target", target, "--draft", draft, "--output", tmp_path / "out"
    assert outrider("export", "--to", "llama.cpp", *arguments).code == 0
    lines = (tmp_path / "out" / "convert.sh").read_text().splitlines()
    assert lines[2:] == [
        f"python convert_hf_to_gguf.py {target} --outfile target.gguf",
        f"python convert_hf_to_gguf.py {draft} --outfile draft.gguf",
    ]


@pytest.fixture
def target_and_head(tmp_path: Path) -> tuple[Path, Path]:
    """A head with a reduced vocabulary, in the speculators layout."""
    model = random_llama(num_layers=4)
    write_eagle3(tmp_path / "head", model, token_ids=[3, 5, 8, 13])
    return save(tmp_path / "T", model), tmp_path / "head"


def test_a_head(outrider: Outrider, tmp_path: Path, target_and_head: tuple[Path, Path]) -> None:
    """For SGLang it is renamed, with layers counted by their outputs, and nothing else changed."""
    target, head = target_and_head
    pair = "--target", target, "--draft", head
    for to in ("vllm", "sglang", "llama.cpp"):
        ended = outrider("export", "--to", to, *pair, "--output", tmp_path / to, "--json", tmp_path / "json")
        assert (ended.code, ended.err) == (0, "")
        document = only_document((tmp_path / "json").read_text(), "export")
        assert document["law"].startswith("ratio")
        assert {path.name for path in (tmp_path / to).iterdir()} == set(document["files"])
    assert (tmp_path / "vllm" / "draft").resolve() == head.resolve()
    convert = (tmp_path / "llama.cpp" / "convert.sh").read_text()
    assert f"{head.resolve()} --outfile draft.gguf --target-model-dir {target}" in convert
    ended = outrider("export", "--to", "transformers", *pair, "--output", tmp_path / "out")
    assert "takes draft models only" in ended.error
    before, after = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "sglang" / "draft"))
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in before.items()}
    assert after.keys() == renamed.keys() and all(torch.equal(after[name], renamed[name]) for name in after)
    stated = json.loads((tmp_path / "sglang" / "draft" / "config.json").read_text())
    assert stated["architectures"] == ["LlamaForCausalLMEagle3"] and stated["draft_vocab_size"] == 4
    assert stated["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # the inputs of 1, 2 and 3
    assert stated["hidden_size"] == 32 and "transformer_layer_config" not in stated
    changed = json.loads((head / "config.json").read_text()) | {"norm_before_residual": True}
    (head / "config.json").write_text(json.dumps(changed))
    ended = outrider("export", "--to", "sglang", "--target", target, "--draft", head, "--output", tmp_path / "other")
    assert "has norm_before_residual" in ended.error


def test_a_block_head(outrider: Outrider, tmp_path: Path) -> None:
    """Linked for vLLM, in z-lab's layout for SGLang, and refused by name where no engine takes it."""
    model = random_llama(num_layers=4)
    pair = "--target", save(tmp_path / "T", model), "--draft", tmp_path / "head"
    write_block(tmp_path / "head", model, layout="speculators")
    for to in ("vllm", "sglang"):
        assert outrider("export", "--to", to, *pair, "--output", tmp_path / to).code == 0
    assert (tmp_path / "vllm" / "draft").resolve() == (tmp_path / "head").resolve()
    config = json.loads((tmp_path / "vllm" / "speculative.json").read_text())
    assert (config["method"], config["num_speculative_tokens"]) == ("dflash", 4)
    stated = json.loads((tmp_path / "sglang" / "draft" / "config.json").read_text())
    assert stated["architectures"] == ["DFlashDraftModel"] and stated["block_size"] == 5
    assert stated["dflash_config"]["target_layer_ids"] == [0, 1, 2]  # the outputs before layers 1, 2 and 3
    target = as_lm(model)
    heads: list[Any] = [
        load_head(resolve(str(folder)), target).model for folder in (tmp_path / "head", tmp_path / "sglang" / "draft")
    ]
    for name in ("features", "reaches", "mask_id"):
        assert getattr(heads[0], name) == getattr(heads[1], name)
    weights = [head.state_dict() for head in heads]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def error(to: str, *more: object, **head: Any) -> str:
        write_block(tmp_path / "head", model, **{"layout": "speculators"} | head)
        return outrider("export", "--to", to, *pair, "--output", tmp_path / "none", *more).error

    assert "takes eagle3 heads, too" in error("llama.cpp")
    assert "drafts at most 4 tokens" in error("vllm", "-k", 5)
    assert "a reduced vocabulary" in error("sglang", token_ids=[1, 2, 3])
    assert "is a DSpark head" in error("vllm", markov="vanilla")
    assert "is a DFlash 2 head" in error("vllm", layout="zlab", is_second=True)
    assert not (tmp_path / "none").exists()


def test_bad_pairs(outrider: Outrider, tmp_path: Path) -> None:
    target, short = _random_pair(tmp_path, context_len=64)
    pair = "export", "--to", "sglang", "--output", tmp_path / "out", "--target", target, "--draft"
    assert "takes 64 tokens: set --context 64" in outrider(*pair, short).error
    assert outrider(*pair, short, "--context", 64).code == 0
    assert "--context-length 64" in (tmp_path / "out" / "serve.sh").read_text()
    assert "takes 256 tokens" in outrider(*pair, short, "--context", 512).error
    wide = save(tmp_path / "wide", random_llama(100, context_len=256), word_tokenizer())
    assert "vocab_size of 97" in outrider(*pair, wide).error
    other = save(tmp_path / "other", random_llama(context_len=256), word_tokenizer(word="v{}"))
    assert "have different tokenizers" in outrider(*pair, other).error


def test_bad_options(outrider: Outrider, tmp_path: Path) -> None:
    def error(to: str, *more: object) -> str:
        return outrider("export", "--to", to, "--output", tmp_path / "out", *more).error

    assert "choose one of vllm, sglang" in error("mlx")
    assert "one number, or auto" in error("vllm", "-k", "1,2")
    assert "name a draft model" in error("vllm", "--draft", "ngram")
    assert "as stored" in error("vllm", "--target", "fable:int8", "--draft", "fable-draft")
    assert "vLLM 0.33.0 cannot do this exactly" in error("vllm", "--min-p", 0.1)
    assert "SGLang 0.5.23 cannot do this exactly" in error("sglang", "--repetition-penalty", 1.1)
    assert not (tmp_path / "out").exists()
