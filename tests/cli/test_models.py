"""``outrider models``: the names, and the memory that they need."""

from pathlib import Path

import pytest
import torch
import transformers

from commands import Outrider, only_document
from gguf_models import CASES, random_case, write_case
from outrider.models.memory import sizes_of
from outrider.models.registry import known_models, resolve
from outrider.models.weights import num_bytes
from pairs import random_llama, save


def test_the_table(outrider: Outrider) -> None:
    """Every known name has a line, with its sizes."""
    ended = outrider("models")
    assert (ended.code, ended.err) == (0, "")
    lines = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    for name in known_models():
        assert name in lines
    assert "embedded target" in lines["fable"] and "MiB" in lines["fable"]
    assert lines["smollm2"].split()[-8:-3] == ["GGUF", "134.5", "M", "8192", "93.8"]
    assert "12.6 GiB" in lines["llama-7b"] and "6.7 B" in lines["llama-7b"]
    assert "models.toml, or --models FILE" in " ".join(ended.out.split())  # wrapped where the path ends


def test_names_are_whole_in_80_columns(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = outrider("models").out.splitlines() + outrider("models", "--target", "gemma-4-26b-a4b-it").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.strip()} >= known_models().keys()
    assert len([line for line in lines if line.startswith(" gemma-4-26b-a4b-assistant ")]) == 2


def test_the_document(outrider: Outrider) -> None:
    arguments = ("models", "--context", 2000, "--batch-size", 3, "--dtype", "float16", "--json", "-")
    document = only_document(outrider(*arguments).out, "models")
    rows = {row["name"]: row for row in document["models"]}
    assert set(rows) == set(known_models())
    sizes = sizes_of(resolve("fable"))
    assert sizes is not None
    assert rows["fable"]["weights_bytes"] == 2 * sizes.num_params == 2 * rows["fable"]["num_params"]
    assert rows["fable"]["cache_bytes"] == sizes.cache_bytes("float16", 1024, 3)
    assert (rows["fable"]["cache_tokens"], rows["qwen3-8b"]["cache_tokens"]) == (3 * 1024, 3 * 2000)  # all of its own
    assert rows["gpt2"]["location"] == "openai-community/gpt2" and rows["gpt2"]["source"] == "built in"
    assert document["options"] == {"models": None, "context": 2000, "batch_size": 3, "dtype": "float16"}


def test_names_of_one_s_own(outrider: Outrider, tmp_path: Path) -> None:
    """From --models, with the dtype of the file; unknown sizes are left open."""
    folder = save(tmp_path / "mine", random_llama())
    models = tmp_path / "models.toml"
    names = {"mine": 'dtype = "float64"', "any": 'dtype = "auto"'}
    tables = [f'[models.{name}]\npath = "{folder}"\n{more}\n' for name, more in names.items()]
    models.write_text("".join([*tables, '[models.far]\nhub = "org/far"\n']))
    ended = outrider("models", "--models", models, "--json", "-")
    rows = {row["name"]: row for row in only_document(ended.out, "models")["models"]}
    assert rows["mine"]["weights_bytes"] == 8 * sum(p.numel() for p in random_llama().parameters())
    assert (rows["mine"]["dtype"], rows["mine"]["source"]) == ("float64", str(models))
    assert 4 * rows["any"]["weights_bytes"] == rows["mine"]["weights_bytes"]
    assert "weights_bytes" not in rows["far"]
    (line,) = [line for line in ended.err.splitlines() if line.split()[:1] == ["far"]]
    assert line.split()[3:] == ["–"] * 4 and "org/far" in line
    assert "fable" in rows


def test_a_pair_is_predicted_in_every_form(outrider: Outrider) -> None:
    arguments = ("models", "--target", "fable", "--draft", "fable-draft", "--devices", "1,2")
    ended = outrider(*arguments, "--json", "-")
    assert "fable-draft" in ended.err and "float32" not in ended.err
    document = only_document(ended.out, "models")
    assert document["options"]["context"] == 1024  # of both models
    rows = {(row["name"], row["quantization"], row["num_devices"]): row for row in document["models"]}
    assert len(rows) == 2 * (6 + 5)  # int4 is for one device
    whole, shared = rows["fable", "none", 1], rows["fable", "none", 2]
    assert 2 * shared["cache_bytes"] == whole["cache_bytes"] and isinstance(whole["fits_here"], bool)
    assert rows["fable", "int8", 1]["weights_bytes"] < whole["weights_bytes"]


def test_the_drafts_of_a_model(outrider: Outrider) -> None:
    """Even if the model is not here."""
    ended = outrider("models", "--target", "llama-3.1-8b-instruct")
    assert ended.code == 2 and [line.split()[:4] for line in ended.out.splitlines() if line.startswith(" llama")] == [
        ["llama-3.1-8b-eagle3", "head", "safetensors", "no"],
        ["llama-3.2-1b-instruct", "model", "safetensors", "no"],
    ]
    ended = outrider("models", "--target", "fable", "--json", "-")
    document = only_document(ended.out, "models")
    assert document["execution"] == "native" and "\nfable here: native, same bytes: promised\n" in ended.err
    (draft,) = document["drafts"]
    assert (draft["name"], draft["is_here"], draft["kind"]) == ("fable-draft", True, "model")


def test_a_gguf_file_is_predicted_as_it_is(outrider: Outrider, tmp_path: Path) -> None:
    model = random_case(CASES["llama"])
    file = write_case(tmp_path / "model.gguf", CASES["llama"], model)
    (row,) = only_document(outrider("models", "--target", file, "--json", "-").out, "models")["models"]
    assert (row["dtype"], row["weights_bytes"]) == ("GGUF", sum(one.nbytes for one in model.parameters()))
    assert row["total_bytes"] == row["weights_bytes"] + row["cache_bytes"]


def test_gemma_3_is_predicted_with_its_images(outrider: Outrider, tmp_path: Path) -> None:
    """The initialization of the layers for images looks at numbers, of which a prediction has none."""
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = dict(sizes, vocab_size=97, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, sliding_window=8)
    images = dict(sizes, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=images)
    config.save_pretrained(tmp_path)
    rows = only_document(outrider("models", "--target", tmp_path, "--json", "-").out, "models")["models"]
    assert rows[0]["quantization"] == "none"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert rows[0]["weights_bytes"] == num_bytes(model)


def test_predictions_that_are_not_possible(outrider: Outrider) -> None:
    for arguments, message in (
        (("--draft", "fable-draft"), "--draft = 'fable-draft' is invalid: give --target too"),
        (("--target", "fable", "--devices", "3"), "which 3 processes cannot share evenly"),
        (("--target", "fable", "--draft", "ngram"), "give a model"),
        (("--target", "fable", "--draft", "fable-draft:min-prob=0.3"), "give a model"),
        (("--target", "fable", "--devices", "0"), "--devices = '0' is invalid: whole numbers from 1 to 64"),
        (("--target", "fable", "--context", 10**6), "this model accepts"),
        (("--context", 0), "--context = 0 is invalid: a whole number >= 1"),
    ):
        ended = outrider("models", *arguments)
        assert ended.code == 2 and message in ended.err


def test_pairs_that_fit_into_a_memory(outrider: Outrider) -> None:
    ended = outrider("models", "--memory", "10GiB", "--json", "-")
    pairs = only_document(ended.out, "models")["pairs"]
    assert {"target": "fable", "form": "bfloat16", "draft": "fable-draft"}.items() <= pairs[0].items()
    assert [pair["draft"] for pair in pairs if pair["target"] == "qwen3-8b"] == ["qwen3-0.6b"]
    ended = outrider("models", "--memory", "10GiB", "--target", "qwen3-8b")
    assert "nf4" in ended.out and "qwen3-0.6b" in ended.out and "fable" not in ended.out
    (alone,) = [pair for pair in pairs if pair["target"] == "smollm2"]
    assert (alone["form"], alone["draft"], alone["size_ratio"]) == ("GGUF", "suffix", None)
    assert "fable-draft" not in {pair["target"] for pair in pairs}
    lines = [line.split() for line in outrider("models", "--memory", "10GiB").out.splitlines()]
    assert ["smollm2", "GGUF", "suffix", "–", "183.8", "MiB"] in lines
    assert not any(pair["target"].endswith("eagle3") for pair in pairs)
    assert "No known pair fits" in outrider("models", "--memory", "1MiB").out
    assert "leave it out" in outrider("models", "--memory", "10GiB", "--target", "fable", "--draft", "fable").error
    assert "leave it out" in outrider("models", "--memory", "10GiB", "--devices", "1,2").error
    assert "sizes are not known" in outrider("models", "--memory", "10GiB", "--target", "org/new").error


def test_a_model_fits_before_its_package_is_installed(outrider: Outrider, tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    sizes = "num_params", "num_embedding_params", "num_layers", "num_kv_heads", "head_dim", "context_len"
    lines = ["[models.far]", 'package = "no_such_package"', 'file = "far.gguf"', *(f"{size} = 8" for size in sizes)]
    models.write_text("\n".join(lines))
    ended = outrider("models", "--memory", "1GiB", "--target", "far", "--models", models)
    assert ended.code == 0 and "suffix" in ended.out
