"""``outrider models``: the names, and the memory that they need."""

from pathlib import Path

import pytest

from commands import Outrider, only_document
from gguf_models import CASES, random_case, write_case
from outrider.models.registry import known_models
from pairs import random_llama, save


def test_every_known_name_has_a_line_with_its_sizes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole in 80 columns, too."""
    monkeypatch.setenv("COLUMNS", "80")
    ended = outrider("models")
    assert (ended.code, ended.err) == (0, "") and max(map(len, ended.out.splitlines())) <= 80
    lines = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    assert lines.keys() >= known_models().keys()
    assert "MiB" in lines["fable"] and "12.6 GiB" in lines["llama-7b"] and "6.7 B" in lines["llama-7b"]


def test_models_document_has_the_users_names(outrider: Outrider, tmp_path: Path) -> None:
    """From --models, with the dtype of the file; unknown sizes are left open."""
    folder = save(tmp_path / "mine", random_llama())
    models = tmp_path / "models.toml"
    models.write_text(f'[models.mine]\npath = "{folder}"\ndtype = "float64"\n[models.far]\nhub = "org/far"\n')
    ended = outrider("models", "--models", models, "--dtype", "float16", "--json", "-")
    document = only_document(ended.out, "models")
    assert document["options"] == {"models": str(models), "dtype": "float16"}
    rows = {row["name"]: row for row in document["models"]}
    assert rows.keys() == known_models(models).keys() and "weights_bytes" not in rows["far"]
    assert rows["mine"]["weights_bytes"] == 8 * sum(p.numel() for p in random_llama().parameters())
    assert (rows["mine"]["dtype"], rows["mine"]["source"]) == ("float64", str(models))
    assert rows["gpt2"]["location"] == "openai-community/gpt2" and rows["gpt2"]["source"] == "built in"


def test_a_target_is_predicted_in_every_form_with_its_drafts(outrider: Outrider, tmp_path: Path) -> None:
    """Drafts are told even if the model is not here."""
    ended = outrider("models", "--target", "fable", "--devices", "1,2", "--json", "-")
    document = only_document(ended.out, "models")
    rows = {(row["quantization"], row["num_devices"]): row for row in document["models"]}
    assert len(rows) == 5 + 4  # int4 is for one device
    whole, shared = rows["none", 1], rows["none", 2]
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
    model = random_case(CASES["llama"])
    file = write_case(tmp_path / "model.gguf", CASES["llama"], model)
    (row,) = only_document(outrider("models", "--target", file, "--json", "-").out, "models")["models"]
    assert (row["dtype"], row["weights_bytes"]) == ("GGUF", sum(one.nbytes for one in model.parameters()))
