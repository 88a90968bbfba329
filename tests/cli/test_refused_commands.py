"""Mistakes on the command line: one line with the remedy, exit code 2, and nothing half-written, before the work."""

import re
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BloomConfig, BloomForCausalLM

from commands import Outrider, command_of
from outrider.cli.app import EXAMPLES
from pairs import broken_model, random_llama, save
from toys import random_model

COMMANDS: dict[str, str] = {  # with what they need, in a folder that has these files
    "generate": "generate Once",
    "compare": "compare --draft fable-draft",
    "latency": "latency",
    "plan": "plan",
    "certify": "certify",
    "certify-samples": "certify-samples fable samples.jsonl",
    "eval multiplication": "eval multiplication",
    "replay": "replay log.jsonl",
    "export": "export --to vllm --output folder --draft fable-draft",
    "distill": "distill fable --output folder",
    "models": "models --target fable",
    "chat": "chat",
    "serve": "serve --port 0",
}
BAD = [  # in every command that has the option
    ("--temperature", "-1", "temperature = -1.0 is invalid: a number >= 0"),
    ("--max-new-tokens", "0", "'--max-new-tokens': |max_new_tokens = 0"),
    ("--num-draft-tokens", "-2", "num.draft.tokens'? ?=? ?.*-2"),
    ("--batch-size", "0", "'--batch-size': |batch.size = '?0'? is invalid"),
    ("--seed", "-1", "seed = -1 is invalid|'--seed': "),
    ("--detect-tv", "2", "'--detect-tv': "),
    ("--acceptance", "typical", "acceptance = 'typical' is invalid: choose one of rejection"),
    ("--target", "fabel", r"no model is called 'fabel': did you mean 'fable'\?"),
    ("--draft", "fabel", r"no model is called 'fabel': did you mean 'fable'\?"),
    ("--models", "nowhere.toml", "nowhere.toml"),
    ("--device", "tpu", "there is no device 'tpu' here: choose auto, cpu"),
    ("--dtype", "float13", "dtype = 'float13' is invalid: choose"),
    ("--threads", "0", "'--threads': "),
    ("--json", "nowhere/new.json", "No such file or directory|there is no folder nowhere"),
    ("--json", "taken", "cannot write .*taken: Is a directory"),
    ("--html", "new.txt", "the name must end in .html"),
    ("--html", "page.html --json page.html", "another option reads or writes this file: choose another file"),
    ("--json", "models.json --models models.json", "another option reads or writes this file: choose another file"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    for name in ("models.json", "prompts.txt", "story.txt", "shared"):
        (tmp_path / name).write_text("" if name in ("models.json", "shared") else "Once\nTwice\n")
    (tmp_path / "samples.jsonl").write_text('{"prompt_ids": [1], "token_ids": [2]}\n' * 2)
    (tmp_path / "old.json").write_text("old")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_bad_option_values(outrider: Outrider, folder: Path, name: str) -> None:
    """In every command that has the option; and no file is written, changed or removed."""
    if name == "replay":
        assert outrider(*"generate --prompts prompts.txt --output log.jsonl -t 0 -n 2".split()).code == 0
    known = {option for param in command_of(name).params for option in param.opts}
    assert COMMANDS.keys() == EXAMPLES.keys()
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for option, value, message in BAD:
        if {option, *(word for word in value.split() if word.startswith("--"))} <= known:
            document = ("--json", "old.json") if "--json" in known and "json" not in option + value else ()
            ended = outrider(*COMMANDS[name].split(), option, *value.split(), *document)
            *log, error = ended.err.splitlines()
            assert (ended.code, ended.out) == (2, "") and (not log or name == "serve"), (option, ended)
            assert error.startswith("error: ") and re.search(message, error), (option, ended)
            assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before, option


NEVER_READS_A_MODEL = [
    ("generat", "No such command 'generat'. Did you mean 'generate'? (outrider --help)"),
    ("generate Once --tempratur 1", "No such option: --tempratur (Possible options: --temperature) (outrider generate"),
    ("eval multiplication --draft none", "there is nothing to compare"),
    ("eval multiplication --num-prompts 2 --seed 9223372036854775807", "seed"),  # problem i has seed + i
    ("compare --num-runs 0", "--num-runs = 0 is invalid: a whole number >= 1"),
    ("compare fable Hi --target fable", "give it or the argument 'fable', not both"),
    ("chat fable ngram --draft none", "not both"),
    ("chat --chat-template-kwargs [1]", "a JSON object"),
    ("serve --host 0.0.0.0", "without --api-key only loopback is allowed"),
    ("serve --queue-timeout inf", "--queue-timeout = inf is invalid: seconds, at most 1e6"),
    ("serve --port 70000", "choose another address or port"),
    ("serve -k 1,2", "this command takes one number, or auto"),
    ("serve --shared-prompt shared", "--shared-prompt = 'shared' is invalid: the file is empty"),
    ("plan -k 1,auto", "like 1-8"),
    ("plan --draft none", "give the drafts"),
    ("plan --what-if alpha=0.5,c=nan", "numbers for alpha, c, v, c_ops"),
    ("certify --num-tokens 5", ">= 200"),
    ("export --to mlx --output folder", "choose one of vllm, llama.cpp"),
    ("export --to sglang --output folder", "has the flags of SGLang"),
    ("export --to vllm --output folder --draft ngram", "name a draft model"),
    ("export --to vllm --output folder --target fable:int8 --draft fable-draft", "as stored"),
    ("export --to vllm --output folder --min-p 0.1", "vLLM 0.33.0 cannot do this exactly"),
    ("distill fable --output folder --steps 5 --minutes 1", "either --steps or --minutes"),
    ("distill fable --output folder --kind dflash", "eagle3 is the head that is trained here"),
    ("generate Once --logit-bias king=1", "--logit-bias = 'king=1' is invalid: write TOKEN_ID=BIAS"),
    ("generate Once --regex (a", "regex = '(a' is invalid: "),
    ("generate Once --corpus story.txt --draft ngram", "only the draft 'suffix' reads one: add --draft suffix"),
    ("generate Once --output x.jsonl", "needs a file of prompts"),
    ("generate --prompts prompts.txt --ray-workers 2", "--ray-workers = 2 is invalid: it needs a cluster: add --ray"),
    ("generate --prompts prompts.txt --ray local --device cuda:1", "'cuda:1' is invalid: a Ray worker sees only"),
    ("generate --prompts prompts.txt --seed 9223372036854775807", "seed = "),  # prompt i has seed + i
    ("generate --prompts prompts.txt --show-origin", "--show-origin"),
    ("generate --prompts prompts.txt --shard 5/4", "--shard = '5/4' is invalid: give NUMBER/COUNT"),
    ("generate fable Once --prompts prompts.txt", "leave out the PROMPT"),
    ("generate --prompts prompts.txt --output nowhere/x", "cannot write nowhere/x: No such file or directory"),
    ("generate --prompts prompts.txt --output prompts.txt", "another option reads or writes this file: choose another"),
    ("generate Once -t 0 --draft none --verify-bytes", "--verify-bytes = True is invalid: there is no draft"),
    ("generate Once --seed 1 --verify-bytes", "that of plain decoding under --acceptance gumbel with a --seed"),
    ("generate Once --target ./nowhere", "there is no folder ./nowhere; a model is a known name, a folder, a GGUF"),
    ("generate Once --target nobody/none", "the hub model 'nobody/none' cannot be fetched"),
]


@pytest.mark.parametrize(("words", "message"), NEVER_READS_A_MODEL, ids=[words for words, _ in NEVER_READS_A_MODEL])
def test_commands_check_options_before_loading(
    outrider: Outrider, folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    """An empty key is none. Nothing is written."""
    if "no config.json" not in message and "hub model" not in message and "no folder" not in message:
        monkeypatch.setattr("outrider.api.load_checkpoint", lambda *_, **__: pytest.fail("a model was read"))
    monkeypatch.setenv("OUTRIDER_API_KEY", "")
    before = {path: path.is_file() and path.read_bytes() for path in folder.iterdir()}
    error = outrider(*words.split()).error
    assert message in error and ("No such" not in message or "--help)" in error or "cannot" in error)
    assert {path: path.is_file() and path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "the prompt is empty: give at least one token of text to start from"),
        ([], "standard input is not UTF-8 (byte 2)"),
        (["--prompts", "long", "--output", "out.jsonl"], "long, line 3: the prompt has "),
        (["--prompts", "list"], "line 3: not a JSON object"),
        (["--prompts", "latin"], "line 2: not UTF-8 (byte 7): convert it"),
        (["w1", "--target", "bloom"], "uses ALiBi"),
        (["Once", "--draft", "model"], "fable and model have different tokenizers"),
        (["Once", "--draft", "corrupt"], "the weights of corrupt cannot be read"),
        (["w1", "--target", "pickled"], "pytorch_model.bin, a pickle"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_prompts_and_models_that_cannot_be_used(
    outrider: Outrider, models: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """A file of prompts is read to its end before the first is continued."""
    monkeypatch.chdir(models)
    before = sorted(models.rglob("*"))
    assert message in outrider("generate", *words, "--json", "left.json", stdin="Grüße".encode("latin-1")).error
    assert sorted(models.rglob("*")) == before


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and of prompts."""
    folder = tmp_path_factory.mktemp("models")
    bloom = BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    save(folder / "bloom", random_model(BloomForCausalLM, bloom, 0))
    for name in ("model", "corrupt", "pickled"):
        save(folder / name, random_llama())
    weights = folder / "corrupt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    torch.save(load_file(folder / "pickled" / "model.safetensors"), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    broken_model(folder / "broken")
    for name, content in {
        "long": f"Once\n\n{'word ' * 2000}\n".encode(),
        "list": b'{"prompt": "a"}\n\n["b"]\n',
        "latin": "Once\nGrüße\n".encode("latin-1"),
        "none": b"\n  \n",
    }.items():
        (folder / name).write_bytes(content)
    return folder


def test_logits_that_are_not_numbers(outrider: Outrider, models: Path) -> None:
    """Those of a draft are a line, and the output is that of no draft; a target's are an error, with the position."""
    arguments, broken = ("generate", "w1 w2 w7", "-n", 4, "-k", 4, "-t", 0), models / "broken"
    plain, drafted = (outrider(*arguments, "--target", models / "model", "--draft", one) for one in ("none", broken))
    assert drafted.out == plain.out and plain.code == drafted.code == 0
    assert f"the draft {broken} gave NaN or infinite logits" in drafted.err
    ended = outrider(*arguments, "--target", broken, "--draft", "none")
    assert ended.code == 2 and f"the model {broken} gave NaN or infinite logits for position 3 of the text" in ended.err


def test_a_port_that_is_taken(outrider: Outrider) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in outrider("serve", "--port", port).error
