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


def test_every_known_name_has_a_line_with_its_sizes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole in 80 columns, too."""
    ended = outrider("models")
    assert (ended.code, ended.err) == (0, "")
    lines = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    assert lines.keys() >= known_models().keys()
    assert "embedded target" in lines["fable"] and "MiB" in lines["fable"]
    assert lines["smollm2"].split()[-6:-1] == ["GGUF", "134.5", "M", "8192", "93.8"]
    assert "12.6 GiB" in lines["llama-7b"] and "6.7 B" in lines["llama-7b"]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = outrider("models").out.splitlines() + outrider("models", "--target", "gemma-4-26b-a4b-it").out.splitlines()
    assert max(map(len, narrow)) <= 80
    assert {line.split()[0] for line in narrow if line.strip()} >= known_models().keys()


def test_the_document_has_one_s_own_names(outrider: Outrider, tmp_path: Path) -> None:
    """From --models, with the dtype of the file; unknown sizes are left open."""
    folder = save(tmp_path / "mine", random_llama())
    models = tmp_path / "models.toml"
    names = {"mine": 'dtype = "float64"', "any": 'dtype = "auto"'}
    tables = [f'[models.{name}]\npath = "{folder}"\n{more}\n' for name, more in names.items()]
    models.write_text("".join([*tables, '[models.far]\nhub = "org/far"\n']))
    ended = outrider("models", "--models", models, "--dtype", "float16", "--json", "-")
    document = only_document(ended.out, "models")
    assert document["options"] == {"models": str(models), "dtype": "float16"}
    rows = {row["name"]: row for row in document["models"]}
    assert rows.keys() == known_models(models).keys()
    assert rows["mine"]["weights_bytes"] == 8 * sum(p.numel() for p in random_llama().parameters())
    assert (rows["mine"]["dtype"], rows["mine"]["source"]) == ("float64", str(models))
    assert 4 * rows["any"]["weights_bytes"] == rows["mine"]["weights_bytes"]
    assert "weights_bytes" not in rows["far"]
    (line,) = [line for line in ended.err.splitlines() if line.split()[:1] == ["far"]]
    assert line.split()[3:] == ["–"] * 3 and "org/far" in line
    sizes = sizes_of(resolve("fable"))
    assert sizes is not None and rows["fable"]["weights_bytes"] == 2 * sizes.num_params
    assert rows["gpt2"]["location"] == "openai-community/gpt2" and rows["gpt2"]["source"] == "built in"


def test_a_target_is_predicted_in_every_form_with_its_drafts(outrider: Outrider) -> None:
    """Drafts are told even if the model is not here."""
    ended = outrider("models", "--target", "fable", "--devices", "1,2", "--json", "-")
    document = only_document(ended.out, "models")
    rows = {(row["quantization"], row["num_devices"]): row for row in document["models"]}
    assert len(rows) == 5 + 4  # int4 is for one device
    whole, shared = rows["none", 1], rows["none", 2]
    assert isinstance(whole["fits_here"], bool)
    # Norms are on both devices.
    assert whole["weights_bytes"] / 2 <= shared["weights_bytes"] < 0.51 * whole["weights_bytes"]
    assert rows["int8", 1]["weights_bytes"] < whole["weights_bytes"]
    assert document["execution"] == "native" and "\nfable here: native, same bytes: promised\n" in ended.err
    (draft,) = document["drafts"]
    assert (draft["name"], draft["is_here"], draft["kind"]) == ("fable-draft", True, "model")
    ended = outrider("models", "--target", "llama-3.1-8b-instruct")
    assert ended.code == 2 and [line.split()[:4] for line in ended.out.splitlines() if line.startswith(" llama")] == [
        ["llama-3.1-8b-eagle3", "head", "safetensors", "no"],
        ["llama-3.2-1b-instruct", "model", "safetensors", "no"],
    ]


def test_gguf_files_and_models_of_images_are_predicted(outrider: Outrider, tmp_path: Path) -> None:
    """The initialization of Gemma 3's layers for images looks at numbers, of which a prediction has none."""
    model = random_case(CASES["llama"])
    file = write_case(tmp_path / "model.gguf", CASES["llama"], model)
    (row,) = only_document(outrider("models", "--target", file, "--json", "-").out, "models")["models"]
    assert (row["dtype"], row["weights_bytes"]) == ("GGUF", sum(one.nbytes for one in model.parameters()))
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = dict(sizes, vocab_size=97, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, sliding_window=8)
    config = transformers.Gemma3Config(text_config=text, vision_config=dict(sizes, image_size=28, patch_size=14))
    config.save_pretrained(tmp_path / "gemma")
    rows = only_document(outrider("models", "--target", tmp_path / "gemma", "--json", "-").out, "models")["models"]
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert (rows[0]["quantization"], rows[0]["weights_bytes"]) == ("none", num_bytes(whole))


def test_predictions_that_are_not_possible(outrider: Outrider) -> None:
    for arguments, message in (
        (("--target", "fable", "--devices", "3"), "which 3 processes cannot share evenly"),
        (("--target", "fable", "--devices", "0"), "--devices = '0' is invalid: whole numbers from 1 to 64"),
        (("--dtype", "int8"), "--dtype = 'int8' is invalid: choose one of float64, float32"),
        (("--memory", "10GiB"), "No such option: --memory"),
    ):
        ended = outrider("models", *arguments)
        assert ended.code == 2 and message in ended.err
