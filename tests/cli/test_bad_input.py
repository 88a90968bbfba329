"""Bad input: one line with the remedy, exit code 2, and nothing half-written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BloomConfig, BloomForCausalLM

from commands import Outrider, only_document
from pairs import broken_model, random_llama, save, word_tokenizer
from toys import random_model

COMMANDS: list[tuple[str, ...]] = [("generate", "Once"), ("compare",), ("latency",), ("eval", "multiplication")]
COMMAND_IDS = [command[0] for command in COMMANDS]


@pytest.fixture
def refused(outrider: Outrider, tmp_path: Path) -> Callable[..., str]:
    """Run a command that is to be refused: its one line. No document and no output may be left behind."""

    def run(*arguments: object, **more: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        message = outrider(*arguments, "--json", tmp_path / "left-behind.json", **more).error
        assert sorted(tmp_path.rglob("*")) == before
        return message

    return run


Refused = Callable[..., str]


@pytest.mark.parametrize("command", COMMANDS, ids=COMMAND_IDS)
@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_unknown_names(refused: Refused, command: tuple[str, ...], option: str) -> None:
    """The nearest is suggested."""
    assert "no model is called 'fabel': did you mean 'fable'?" in refused(*command, option, "fabel")


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_missing_paths(refused: Refused, option: str) -> None:
    message = refused("generate", "Once", option, "./nowhere")
    assert (
        "there is no folder ./nowhere; a model is a known name, a folder, a GGUF file, or a hub id like org/model"
        in message
    )


def test_a_hub_id_without_network(refused: Refused) -> None:
    message = refused("generate", "Once", "--target", "nobody-here/no-such-model")
    assert "the hub model 'nobody-here/no-such-model' cannot be fetched" in message
    assert "check its name and the network, or give a local folder" in message


def test_folders_that_are_no_causal_language_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there is no config.json in it" in refused("generate", "Once", "--target", tmp_path / "empty")
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    bert = save(tmp_path / "bert", random_model(BertForMaskedLM, config, 0))
    assert "is not a causal language model" in refused("generate", "Once", "--target", bert)
    bloom = random_model(BloomForCausalLM, BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4), 0)
    assert "uses ALiBi" in refused("generate", "Once", "--target", save(tmp_path / "bloom", bloom))


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_corrupt_weights(refused: Refused, tmp_path: Path, option: str) -> None:
    folder = save(tmp_path / "model", random_llama())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"the weights of {folder} cannot be read" in refused("generate", "Once", option, folder)


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_pickled_weights(outrider: Outrider, refused: Refused, tmp_path: Path, option: str) -> None:
    folder = save(tmp_path / "model", random_llama())
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pair = {"--target": save(tmp_path / "other", random_llama()), option: folder, "--draft": folder}
    words = ("generate", "w1", "-n", 2, *(word for item in pair.items() for word in item))
    assert "pytorch_model.bin, a pickle" in refused(*words)
    allowed = outrider(*words, "--allow-pickle", "--json", "-")
    assert only_document(allowed.out, "generate")["options"]["allow_pickle"] is True


@pytest.mark.parametrize("command", COMMANDS, ids=COMMAND_IDS)
def test_mismatched_tokenizers(refused: Refused, tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = save(tmp_path / "model", random_llama())
    message = refused(*command, "--draft", folder)
    assert f"fable and {folder} have different tokenizers" in message and "(id 0 is '<|endoftext|>' / 'w0'" in message
    assert "choose a draft of the same family, or the draft 'ngram'" in message


def test_empty_prompts(refused: Refused) -> None:
    remedy = "the prompt is empty: give at least one token of text to start from"
    for prompt in ("", "  \n"):
        assert remedy in refused("generate", prompt)
        assert remedy in refused("compare", prompt)
        assert remedy in refused("generate", stdin=prompt.encode())


def test_prompts_that_are_too_long(refused: Refused, tmp_path: Path) -> None:
    """Told with both numbers; and with the line, where many come from a file, before any is generated."""
    long = "word " * 2000
    assert "tokens, but fable can take" in refused("generate", long)
    assert "tokens, but fable can take" in refused("compare", long)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"Once\n\n{long}\n")
    arguments = ("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert f"{prompts}, line 3: the prompt has " in refused(*arguments)


OPTIONS = [
    (("-k", "0"), "-k/--num-draft-tokens = '0' is invalid: whole numbers from 1 to 1024"),
    (("-k", "-2"), "-k/--num-draft-tokens"),
    (("-k", "four"), "-k/--num-draft-tokens = 'four'"),
    (("-k", "4-2"), "-k/--num-draft-tokens = '4-2'"),
    (("-k", ""), "-k/--num-draft-tokens"),
    (("-t", "-0.5"), "temperature = -0.5 is invalid: a number >= 0"),
    (("-t", "nan"), "temperature = nan"),
    (("-t", "inf"), "temperature = inf"),
    (("--top-p", "0"), "top_p = 0.0 is invalid: 0 < top_p <= 1"),
    (("--top-p", "1.01"), "top_p = 1.01"),
    (("--top-k", "-1"), "top_k = -1"),
    (("--min-p", "1.5"), "min_p = 1.5"),
    (("--repetition-penalty", "0"), "repetition_penalty = 0.0"),
    (("--presence-penalty", "2.5"), "presence_penalty = 2.5 is invalid: a number from -2 to 2"),
    (("--frequency-penalty", "nan"), "frequency_penalty = nan"),
    (("--min-tokens", "-1"), "min_tokens = -1"),
    (("--logit-bias", "king=1"), "--logit-bias = 'king=1' is invalid: write TOKEN_ID=BIAS"),
    (("--logit-bias", "5"), "--logit-bias = '5'"),
    (("--logit-bias", "-1=2"), "logit_bias = -1"),
    (("--logit-bias", "5=inf"), "logit_bias = inf"),
    (("--logit-bias", "5=nan"), "logit_bias = nan"),
    (("--logit-bias", "99999999=1"), "99999999"),
    (("--acceptance", "typical"), "acceptance = 'typical' is invalid: choose one of rejection, block, gumbel"),
    (("--device", "tpu"), "there is no device 'tpu' here: choose auto, cpu"),
    (("--device", "cuda:99"), "there is no device 'cuda:99' here"),
    (("--dtype", "float13"), "dtype = 'float13' is invalid: choose auto, float64"),
    (("--threads", "0"), "--threads = 0 is invalid: a whole number >= 1"),
    (("--seed", "-1"), "seed = -1 is invalid"),
    (("--seed", str(2**63)), "seed = "),
    (("--models", "nowhere.toml"), "nowhere.toml"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=COMMAND_IDS)
@pytest.mark.parametrize(("option", "message"), OPTIONS, ids=[" ".join(option) for option, _ in OPTIONS])
def test_options_out_of_range(
    refused: Refused, command: tuple[str, ...], option: tuple[str, ...], message: str
) -> None:
    """In every command that has them."""
    assert message in refused(*command, *option)


MORE_OPTIONS: list[tuple[tuple[object, ...], str]] = [
    (("generate", "Once", "-n", 0), "max_new_tokens = 0 is invalid: a whole number >= 1"),
    (("compare", "-n", -3), "max_new_tokens = -3"),
    (("latency", "-n", 0), "max_new_tokens = 0"),
    (("generate", "Once", "--stop", ""), "stop = '' is invalid: stop strings are not empty"),
    (("generate", "Once", "--logprobs", -1), "logprobs = -1"),
    (("generate", "Once", "-k", "1-4"), "-k/--num-draft-tokens = '1-4' is invalid: this command takes one number"),
    (("generate", "Once", "--draft", "ngram", "--draft", "none"), "this command takes one draft"),
    (("generate", "Once", "--chat"), "this model has no chat template: give the prompt as text"),
    (("generate", "Once", "--batch-size", 0), "--batch-size = 0 is invalid: a whole number >= 1"),
    (("generate", "Once", "--batch-size", 2), "needs a file of prompts"),
    (("generate", "Once", "--output", "x.jsonl"), "needs a file of prompts"),
    (("compare", "--num-runs", 0), "--num-runs = 0 is invalid: a whole number >= 1"),
    (("compare", "--draft", "none"), "there is nothing to compare"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MORE_OPTIONS, ids=[" ".join(map(str, option)) for option, _ in MORE_OPTIONS]
)
def test_options_of_single_commands(refused: Refused, arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_a_prompt_and_a_file_of_prompts(refused: Refused, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\n")
    assert "--prompts" in refused("generate", "Once", "--prompts", prompts)
    assert "--show-origin" in refused("generate", "--prompts", prompts, "--show-origin")


FILES: list[tuple[bytes, str]] = [
    (b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2: not JSON (Expecting ',' delimiter at column 15)"),
    (b'{"prompt": "a"}\n\n["b"]\n', "line 3: not a JSON object"),
    (b'{"prompt": "a"}\n{"text": "b"}\n', "line 2: the key 'prompt' has no string"),
    (b'{"prompt": 5}\n', "line 1: the key 'prompt' has no string"),
    (b'{"prompt": "a"}\n{"prompt": ""}\n', "line 2: the prompt is empty"),
    (b'{"prompt": "a"}\n{"prompt": "\\ud83d"}\n', "line 2"),
    ("Once\nGrüße\n".encode("latin-1"), "line 2: not UTF-8 (byte 7): convert it"),
    ("Once\n".encode("utf-16"), "not UTF-8"),
    (b"", "contains no prompts"),
    (b"\n  \n", "contains no prompts"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[str(content) for content, _ in FILES])
def test_files_of_prompts(refused: Refused, tmp_path: Path, content: bytes, message: str) -> None:
    """With file and line; and no output file is left."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(content)
    text = refused("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert str(prompts) in text and message in text


FIELDS: list[tuple[str, str]] = [
    ('"temprature": 0', "a prompt has no field 'temprature': did you mean 'temperature'?"),
    ('"max_tokens": 5', "a prompt has no field 'max_tokens': did you mean 'max_new_tokens'?"),
    ('"min_new_tokens": 5', "a prompt has no field 'min_new_tokens': did you mean 'min_tokens'?"),
    ('"stop_strings": "."', "a prompt has no field 'stop_strings': did you mean 'stop'?"),
    ('"suppress_tokens": [5]', "a prompt has no field 'suppress_tokens': logit_bias forbids a token"),
    ('"assistant_model": "x"', "a prompt has no field 'assistant_model': the draft is chosen with the target"),
    ('"colour": 5', "a prompt has no field 'colour': put your own notes under 'metadata'"),
    ('"temperature": -1', "temperature = -1 is invalid: a number >= 0"),
    ('"temperature": "hot"', "temperature = 'hot' is invalid"),
    ('"temperature": NaN', "temperature = nan is invalid"),
    ('"seed": 1.5', "seed = 1.5 is invalid"),
    ('"top_p": 1' + "0" * 400, "top_p is a number with too many digits"),
    ('"top_k": 1' + "0" * 5000, "a number has too many digits"),
    ('"ignore_eos": "no"', "ignore_eos must be true or false, not 'no'"),
    ('"logprobs": true', "logprobs = True is invalid"),
    ('"stop": [1]', "stop = 1 is invalid"),
    ('"stop": {"a": 1}', "stop = {'a': 1} is invalid"),
    ('"logit_bias": ["5=1"]', "logit_bias must map token ids to numbers"),
    ('"logit_bias": {"the": 1}', "logit_bias must map token ids to numbers"),
    ('"logit_bias": {"5": Infinity}', "logit_bias = inf is invalid"),
    ('"logit_bias": {"99999999": 1}', "logit_bias = 99999999 is invalid: token ids are below"),
]


@pytest.mark.parametrize(("field", "message"), FIELDS, ids=[field[:24] for field, _ in FIELDS])
def test_fields_of_prompts(refused: Refused, tmp_path: Path, field: str, message: str) -> None:
    """With file, line and field, before any prompt is continued; and no output file is left."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", {field}}}\n')
    text = refused("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert f"{prompts}, line 2: {message}" in text


def test_files_of_prompts_that_are_not_there(refused: Refused, tmp_path: Path) -> None:
    assert "cannot read" in refused("generate", "--prompts", tmp_path / "nowhere.txt")
    assert "Is a directory" in refused("generate", "--prompts", tmp_path)


def test_standard_input_that_is_not_utf_8(refused: Refused) -> None:
    assert "standard input is not UTF-8 (byte 2)" in refused("generate", stdin="Grüße".encode("latin-1"))


@pytest.mark.parametrize("command", [*COMMANDS, ("models",)], ids=[*COMMAND_IDS, "models"])
def test_documents_that_cannot_be_written(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Found out before the work."""
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda self: pytest.fail("loaded"))
    path = tmp_path / "no" / "such" / "folder.json"
    assert f"cannot write {path}: No such file or directory" in outrider(*command, "--json", path).error
    assert f"cannot write {tmp_path}: Is a directory" in outrider(*command, "--json", tmp_path).error


def test_output_that_cannot_be_written(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda self: pytest.fail("loaded"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\n")
    path = tmp_path / "no" / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output")
    assert f"cannot write {path}: No such file or directory" in outrider(*arguments, path).error
    assert f"cannot write {tmp_path}: Is a directory" in outrider(*arguments, tmp_path).error


def test_an_old_document_is_left_alone(outrider: Outrider, tmp_path: Path) -> None:
    """By a run that is refused."""
    path = tmp_path / "old.json"
    path.write_text("old")
    for arguments in (("generate", "Once", "-t", -1), ("generate", "Once", "--target", "fabel"), ("compare", "")):
        assert outrider(*arguments, "--json", path).code == 2
        assert path.read_text() == "old"


@pytest.mark.parametrize(
    "option",
    [("--logit-bias", "99999999=1"), ("--threads", "0"), ("--acceptance", "x"), ("--draft", "fabel"), ("--chat",)],
    ids=lambda option: option[0],
)
def test_no_output_file_is_left_behind(refused: Refused, tmp_path: Path, option: tuple[str, ...]) -> None:
    """Whenever in the course of things it is found out."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\nupon\n")
    refused("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl", *option)


def test_seeds_that_run_out_are_found_out_before_the_work(refused: Refused, tmp_path: Path) -> None:
    """Prompt i has seed + i."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\nupon\n")
    arguments = ("--seed", 2**63 - 1, "-n", 2)
    assert "seed" in refused("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl", *arguments)
    assert "seed" in refused("eval", "multiplication", "--num-prompts", 2, "--seed", 2**63 - 1)


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


def test_tokenizers_are_not_compared_with_ngram_and_none(outrider: Outrider, tmp_path: Path) -> None:
    """The remedy works."""
    folder = save(tmp_path / "model", random_llama(), word_tokenizer())
    for draft in ("ngram", "none"):
        assert outrider("generate", "w1 w2", "-n", 4, "--target", folder, "--draft", draft).code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generat",), "generat"),
        (("generate", "Once", "--tempratur", 1), "--tempratur"),
        (("generate", "Once", "-n", "many"), "--max-new-tokens"),
        (("eval", "division"), "division"),
    ],
)
def test_words_that_typer_does_not_know(outrider: Outrider, arguments: tuple[object, ...], word: str) -> None:
    """Typer's own errors have the same exit code, and go to standard error."""
    ended = outrider(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert word in ended.err
