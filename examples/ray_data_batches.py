"""Ray Data: a pair in each worker, batches of rows through it.

pip install 'ray[data]'
python examples/ray_data_batches.py [TARGET DRAFT]

For long jobs that resume, ``outrider generate --ray`` does without Ray Data. The seed of a row is its number, so that
neither batches nor workers change its text.
"""

import sys
from typing import Any

import ray

import outrider

PAIR = sys.argv[1:] or ["fable", "fable-draft"]
PROMPTS = ["Once upon a time", "The king said", "The fox and the hen", "Far away by the sea"]


class Continuation:
    """One worker: it loads the pair once."""

    def __init__(self) -> None:
        self.decoder = outrider.load(*PAIR)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        seeds = [int(row) for row in batch["row"]]
        found = self.decoder.generate([str(p) for p in batch["prompt"]], seed=seeds, max_new_tokens=24)
        return batch | {"text": [one.text for one in found], "tau": [one.stats.mean_acceptance_length for one in found]}


ray.init(include_dashboard=False, num_cpus=2)
rows = ray.data.from_items([{"row": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)])
for row in rows.map_batches(Continuation, batch_size=2, concurrency=1).take_all():  # num_gpus=1 for one GPU a worker
    print(f"{row['tau']:.2f} tokens per round: {row['prompt']}{row['text']!r}")
ray.shutdown()
