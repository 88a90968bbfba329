"""Small tasks for the lm-evaluation-harness, from files of their own: offline."""

import json
from pathlib import Path
from typing import Any

import yaml

CHOICES = [
    {"text": "The fox saw the hen", "choices": ["and ran.", "at noon", "."], "label": 0},
    {"text": "Once upon a time an old king had three sons.", "choices": ["The", "So"], "label": 1},
    {"text": "  a   b ", "choices": [" c", "ccc ddd eee fff"], "label": 1},
    {"text": "", "choices": ["A", "B C"], "label": 1},
]
PROMPTS = ["The fox saw the hen", "Once upon a time an old king had three sons. " * 2, " b "]
ENDINGS = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices"}
ANSWERS = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
HOW = {"until": ["e", "ou"], "do_sample": False, "max_gen_toks": 12}
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "endings": (CHOICES, ENDINGS | {"doc_to_target": "label", "metric_list": [{"metric": "acc"}]}),
    "answers": (
        [{"text": text, "answer": "no"} for text in PROMPTS],
        ANSWERS | {"generation_kwargs": HOW, "metric_list": [{"metric": "exact_match"}]},
    ),
}


def write_tasks(folder: Path) -> Path:
    for name, (documents, config) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        more = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(more | config))
    return folder
