"""Examples in each command's help: two command lines, without ``outrider``."""

from __future__ import annotations

_PAIR = "--target qwen3-8b --draft qwen3-0.6b"

EXAMPLES: dict[str, tuple[str, str]] = {
    "generate": (
        'generate "Once upon a time" --seed 1',
        "generate --prompts prompts.txt --output out.jsonl --batch-size 8",
    ),
    "chat": ("chat", "chat qwen3-8b qwen3-0.6b"),
    "serve": ("serve --port 8080", f"serve {_PAIR} --slots 16"),
    "compare": ("compare --html race.html", f"compare {_PAIR} -k 2-6"),
    "latency": ("latency -k 1-4", f"latency {_PAIR} --html latency.html"),
    "models": ("models --memory 24GiB", f"models {_PAIR}"),
    "plan": (f"plan {_PAIR} --html plan.html", "plan --what-if alpha=0.8,c=0.05"),
    "alpha": ("alpha -t 0.5,1", f"alpha {_PAIR} --prompts texts.txt"),
    "record": (
        "record --prompts prompts.txt --output log.jsonl --probs 1",
        "record --target qwen3-8b -t 0 --prompts prompts.txt --output q.jsonl",
    ),
    "replay": (
        "replay log.jsonl --draft ngram --draft suffix -k 1-8",
        "replay log.jsonl --draft qwen3-0.6b -k 4 --per-prompt",
    ),
    "distill": (
        "distill fable --output draft --minutes 5",
        "distill qwen3-8b --output head --kind eagle3 --minutes 240",
    ),
    "export": (
        "export --to transformers --output out",
        f"export {_PAIR} --to vllm --output out",
    ),
    "certify": ("certify --html certificate.html", f"certify {_PAIR} --budget 5m"),
    "certify-samples": (
        "certify-samples qwen3-8b samples.jsonl --draft qwen3-0.6b",
        "certify-samples fable samples.jsonl -t 0.8 --html findings.html",
    ),
    "eval multiplication": ("eval multiplication", "eval multiplication --num-prompts 100 --draft ngram"),
}


def example_lines(command: str) -> str:
    """Examples of a command, as Typer shows them below the command's options: each on a line of its own."""
    return "\n\n".join(("Examples:", *(f"outrider {words}" for words in EXAMPLES[command])))
