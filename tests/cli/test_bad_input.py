"""Bad models, prompts and options of ``generate``: one line with the remedy, exit code 2, and nothing half-written.

(What all commands refuse is in test_all_commands.py, rows of files in test_prompt_files.py.)"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BloomConfig, BloomForCausalLM

from commands import Outrider, only_document
from pairs import broken_model, random_llama, save
from toys import random_model

Refused = Callable[..., str]


@pytest.fixture
def refused(outrider: Outrider, tmp_path: Path) -> Refused:
    """Run a command that is to be refused: its one line. No document and no output may be left behind."""

    def run(*arguments: object, **more: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        message = outrider("generate", *arguments, "--json", tmp_path / "left-behind.json", **more).error
        assert sorted(tmp_path.rglob("*")) == before
        return message

    return run


def test_names_of_models(refused: Refused) -> None:
    message = refused("Once", "--target", "./nowhere")
    assert "there is no folder ./nowhere; a model is a known name, a folder, a GGUF file, or a hub id" in message
    message = refused("Once", "--target", "nobody-here/no-such-model")
    assert "the hub model 'nobody-here/no-such-model' cannot be fetched" in message
    assert "check its name and the network, or give a local folder" in message


def test_folders_that_are_no_causal_language_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there is no config.json in it" in refused("Once", "--target", tmp_path / "empty")
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    bert = save(tmp_path / "bert", random_model(BertForMaskedLM, config, 0))
    assert "is not a causal language model" in refused("Once", "--target", bert)
    bloom = random_model(BloomForCausalLM, BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4), 0)
    assert "uses ALiBi" in refused("Once", "--target", save(tmp_path / "bloom", bloom))


def test_drafts_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", random_llama())
    message = refused("Once", "--draft", folder)
    assert f"fable and {folder} have different tokenizers" in message and "(id 0 is '<|endoftext|>' / 'w0'" in message
    assert "choose a draft of the same family, or the draft 'ngram'" in message
    folder = save(tmp_path / "corrupt", random_llama())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"the weights of {folder} cannot be read" in refused("Once", "--draft", folder)


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_pickled_weights(outrider: Outrider, refused: Refused, tmp_path: Path, option: str) -> None:
    folder = save(tmp_path / "model", random_llama())
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pair = {"--target": save(tmp_path / "other", random_llama()), option: folder, "--draft": folder}
    words = ("w1", "-n", 2, *(word for item in pair.items() for word in item))
    assert "pytorch_model.bin, a pickle" in refused(*words)
    allowed = outrider("generate", *words, "--allow-pickle", "--json", "-")
    assert only_document(allowed.out, "generate")["options"]["allow_pickle"] is True


def test_prompts(outrider: Outrider, refused: Refused, tmp_path: Path) -> None:
    """Of many in a file, the line is told before any is continued."""
    empty, long = "the prompt is empty: give at least one token of text to start from", "word " * 2000
    assert empty in refused("") and empty in refused("  \n") and empty in refused(stdin=b"\n")
    assert empty in outrider("compare", " ").error
    assert "this model has no chat template: give the prompt as text" in refused("Once", "--chat")
    assert "tokens, but fable can take" in refused(long)
    assert "tokens, but fable can take" in outrider("compare", long).error
    assert "standard input is not UTF-8 (byte 2)" in refused(stdin="Grüße".encode("latin-1"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"Once\n\n{long}\n")
    assert f"{prompts}, line 3: the prompt has " in refused("--prompts", prompts, "--output", tmp_path / "out.jsonl")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-k four", "-k/--num-draft-tokens = 'four' is invalid: whole numbers from 1 to 1024"),
        ("-k 4-2", "-k/--num-draft-tokens = '4-2'"),
        ("-k 1-4", "-k/--num-draft-tokens = '1-4' is invalid: this command takes one number"),
        ("--top-p 0", "top_p = 0.0 is invalid: 0 < top_p <= 1"),
        ("--logit-bias king=1", "--logit-bias = 'king=1' is invalid: write TOKEN_ID=BIAS"),
        ("--logit-bias 5", "--logit-bias = '5'"),
        ("--logit-bias 5=nan", "logit_bias = nan"),
        ("--logprobs -1", "logprobs = -1"),
        ("--probs", "needs a file of prompts"),
        ("--draft ngram --draft none", "this command takes one draft"),
        ("--batch-size 2", "needs a file of prompts"),
        ("--output x.jsonl", "needs a file of prompts"),
        ("--ray local", "needs a file of prompts"),
        ("--prompts FILE --ray-workers 2", "--ray-workers = 2 is invalid: it needs a cluster: add --ray ADDRESS"),
        ("--prompts FILE --ray local --ray-workers 0", "Invalid value for '--ray-workers'"),
        ("--prompts FILE --ray local --device cuda:1", "'cuda:1' is invalid: a Ray worker sees only its own GPU"),
        ("--prompts FILE --seed 9223372036854775807", "seed"),  # prompt i has seed + i
        ("--prompts FILE --show-origin", "--show-origin"),
        ("Once --prompts FILE", "leave out the PROMPT"),
        ("--prompts nowhere.txt", "cannot read nowhere.txt: No such file"),
        ("--prompts /", "cannot read /: Is a directory"),
        ("--prompts FILE --output nowhere/x", "cannot write nowhere/x: No such file or directory"),
        ("--prompts FILE --output /", "cannot write /: Is a directory"),
        ("--prompts FILE --output FILE", "another option reads or writes this file: choose another file"),
        ("--prompts FILE --json FILE", "another option reads or writes this file: choose another file"),
    ],
)
def test_options(outrider: Outrider, prompts: Path, words: str, message: str) -> None:
    before = prompts.read_bytes()
    prompt = () if "--prompts" in words else ("Once",)
    assert message in outrider("generate", *prompt, *words.replace("FILE", str(prompts)).split()).error
    assert prompts.read_bytes() == before and [*prompts.parent.iterdir()] == [prompts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n\n["b"]\n', "line 3: not a JSON object"),
        ("Once\nGrüße\n".encode("latin-1"), "line 2: not UTF-8 (byte 7): convert it"),
        ("Once\n".encode("utf-16"), "not UTF-8"),
        (b"\n  \n", "contains no prompts"),
    ],
)
def test_files_of_prompts(refused: Refused, tmp_path: Path, content: bytes, message: str) -> None:
    """With file and line; and no output file is left."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(content)
    text = refused("--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert str(prompts) in text and message in text


def test_logits_that_are_not_numbers(outrider: Outrider, tmp_path: Path) -> None:
    """A target's are an error that names model and position (a file of prompts continues: see test_completions_file);
    those of a draft are a line, and the output is that of no draft."""
    broken, good = broken_model(tmp_path / "broken"), save(tmp_path / "good", random_llama())
    arguments = "generate", "w1 w2 w7", "-n", 4, "-k", 4, "--temperature", 0
    plain = outrider(*arguments, "--target", good, "--draft", "none")
    with_draft = outrider(*arguments, "--target", good, "--draft", broken)
    assert (with_draft.code, with_draft.out) == (plain.code, plain.out) == (0, plain.out)
    assert f"the draft {broken} gave NaN or infinite logits" in with_draft.err
    ended = outrider(*arguments, "--target", broken, "--draft", good)
    assert ended.code == 2
    message = f"the model {broken} gave NaN or infinite logits for position 3 of the text; its weights may be damaged"
    assert message in ended.err and ended.err.count("\n") == 1
