"""A task of the lm-evaluation-harness, plain and speculative: the same score, in other times.

pip install '.[eval]'                                      # in a clone of Outrider
python examples/lm_eval_scores.py [TARGET DRAFT]

The task is a small file written here, so that nothing is downloaded; give ``simple_evaluate`` names of the harness's
own tasks (``gsm8k``, ...) instead.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import outrider
from outrider.evals.harness import OutriderLM

SUMS = [{"question": f"{a} * {b} = ", "answer": str(a * b)} for a in (3, 7, 12) for b in (4, 8)]
TASK = {
    "task": "products",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}

decoder = outrider.load(*(sys.argv[1:] or ("fable", "fable-draft")))
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, SUMS)))
    task = Path(folder) / "products.yaml"  # JSON is YAML
    task.write_text(json.dumps(TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}))
    for name, arm in (("plain", decoder.plain()), ("speculative", decoder)):
        began = time.perf_counter()
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(OutriderLM(arm), tasks=["products"], task_manager=manager, bootstrap_iters=0)
        score = found["results"]["products"]["exact_match,none"]
        print(f"{name}: exact match {score:.2f} in {time.perf_counter() - began:.1f} s")
