"""Write the prompts from which a draft for SmolLM2 is trained, and those that are held out.

    python recipes/smollm2/prompts.py DATA FOLDER [PROMPTS]

DATA has spec_bench.jsonl, gsm8k_test.jsonl, humaneval.jsonl, hellaswag_prompts.jsonl and stories.txt, as their projects
publish them. FOLDER gets ``chat-train.jsonl`` and ``chat-held-out.jsonl``, messages of a user, and
``text-train.jsonl`` and ``text-held-out.jsonl``, beginnings of paragraphs. Each prompt has its task as category.

PROMPTS: that many for training, of each kind, all if there are fewer.

A prompt that two files share is one prompt (Spec-Bench took 80 questions from GSM8K). The hash of its text decides
whether it is held out, and its place in the file, so that the first prompts are of all tasks.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path

HELD_OUT = 10  # prompts of each task
NUM_PARAGRAPHS, WORDS = 400, 40  # of the stories, and words of each that are given
LEAST_CHARACTERS = 400  # of such a paragraph
SINGLE = "translation", "summarization", "qa", "math_reasoning", "rag"  # Spec-Bench; the rest of it is MT-bench


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chats(data: Path) -> dict[str, str]:
    """Task of each prompt."""
    found = {row["prompt"]: "hellaswag" for row in rows(data / "hellaswag_prompts.jsonl")}
    found |= {row["prompt"]: "humaneval" for row in rows(data / "humaneval.jsonl")}
    found |= {row["question"].strip(): "gsm8k" for row in rows(data / "gsm8k_test.jsonl")}
    for row in rows(data / "spec_bench.jsonl"):
        task, prompt = row["category"], row["turns"][0].strip()
        found.setdefault(prompt, task if task in SINGLE else "mt_bench")
    return found


def beginnings(data: Path) -> dict[str, str]:
    """Beginnings of paragraphs of the stories."""
    paragraphs = (" ".join(one.split()) for one in (data / "stories.txt").read_text(encoding="utf-8").split("\n\n"))
    long = sorted({one for one in paragraphs if len(one) >= LEAST_CHARACTERS}, key=rank)
    return {" ".join(one.split()[:WORDS]): "stories" for one in long[:NUM_PARAGRAPHS]}


def rank(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=int, nargs="?")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind, found in (("chat", chats(arguments.data)), ("text", beginnings(arguments.data))):
        by_task = defaultdict(list)
        for prompt in sorted(found, key=rank):
            by_task[found[prompt]].append(prompt)
        held_out = {prompt for prompts in by_task.values() for prompt in prompts[:HELD_OUT]}
        for part, prompts in (("train", found.keys() - held_out), ("held-out", held_out)):
            chosen = sorted(prompts, key=rank)[: arguments.prompts if part == "train" else None]
            lines = [json.dumps({"prompt": one, "category": found[one]}) for one in chosen]
            (arguments.folder / f"{kind}-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(kind, {task: len(prompts) for task, prompts in by_task.items()}, "held out:", len(held_out))


if __name__ == "__main__":
    main()
