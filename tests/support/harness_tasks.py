"""Small tasks for the lm-evaluation-harness, from files of their own: one for each kind of request, offline."""

import json
from pathlib import Path
from typing import Any

import yaml

CHOICES = [
    {"text": "The fox saw the hen", "choices": ["and ran.", "at noon", "."], "label": 0},
    {"text": "Once upon a time an old king had three sons.", "choices": ["The", "So"], "label": 1},
    {"text": "  a   b ", "choices": [" c", "ccc ddd eee fff"], "label": 1},
    {"text": "<s>The hen", "choices": ["ran", "sat down"], "label": 0},
    {"text": "", "choices": ["A", "B C"], "label": 1},
]
PAGES = ["Short.", "The hen sat on the wall, and the fox sat below. " * 4, "", "x" * 63, "y" * 64, "z" * 65]
PROMPTS = ["The fox saw the hen", "Once upon a time an old king had three sons. " * 2, "<s>A cat", " b "]

TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "endings": (
        CHOICES,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "pages": (
        [{"page": page} for page in PAGES],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    ),
    "answers": (
        [{"text": text, "answer": "no"} for text in PROMPTS],
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["e", "ou"], "do_sample": False, "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
        },
    ),
}


def write_tasks(folder: Path) -> Path:
    """The tasks as a folder of files."""
    for name, (documents, config) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        more = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(more | config))
    return folder
