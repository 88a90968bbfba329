"""Arithmetics of products with weights in blocks, on published models: how far from float32 are 8 and 15 bits, and
llama.cpp?

    python benchmarks/arithmetics.py TEXT [--models smollm2 gemma3] [--tokens 20480] [--window 512] [--threads 2]

Feeds windows of TEXT to the published files (real_models.py), with llama-cpp-python beside. Prints, for each arm, the
mean KL divergence from float32's distribution to the arm's, in nats per token, the share of tokens with another most
likely token, and the mean difference of the log-loss of the text, to float32 and to llama.cpp, each with an interval
over the windows (95%, normal). The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from real_models import PUBLISHED, real_file
from torch import Tensor

import outrider
from outrider.system.provenance import provenance
from outrider.text.tokenizer import encode

_ARMS = {"a8": 1, "a15": 2}
_AT_ONCE = 64  # tokens whose distributions are compared at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--models", nargs="+", choices=[*PUBLISHED], default=[*PUBLISHED])
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {}
    for model in arguments.models:
        found[model] = _compare(model, arguments)
        for arm, one in found[model].items():
            print(f"{model:8} {arm:10}", *(f"{key} {value}" for key, value in one.items()), flush=True)
    print(json.dumps({"provenance": provenance("cpu"), "models": found}))


def _compare(model: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    path = real_file(model)
    decoder = outrider.load(f"{path}:a8")
    lm = decoder.target
    assert lm.native is not None
    text = arguments.text.read_text(encoding="utf-8")[: 8 * arguments.tokens]
    ids = torch.tensor(encode(decoder.tokenizer, text)[: arguments.tokens // arguments.window * arguments.window])
    cache = lm.new_cache(1, arguments.window)

    def own(num_digits: int) -> Callable[[Tensor], Tensor]:
        def logits(window: Tensor) -> Tensor:
            lm.native._model.num_digits = num_digits
            return lm.forward(window[None], torch.arange(len(window))[None], cache, len(window))[0]

        return logits

    arms = {name: own(number) for name, number in _ARMS.items()} | {"llama.cpp": _llama(path, arguments)}
    sums: dict[str, list[list[float]]] = {name: [] for name in arms}
    for number, window in enumerate(ids.view(-1, arguments.window)):
        with torch.inference_mode():
            exact = own(0)(window).log_softmax(-1)
            for name, arm in arms.items():
                sums[name].append(_differences(exact, arm(window), window))
        print(f"{model} window {number}", end="\r", flush=True)
    return {name: _summary(windows, sums["llama.cpp"], arguments.window) for name, windows in sums.items()}


def _llama(path: Path, arguments: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    from llama_cpp import Llama

    threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
    llama = Llama(str(path), n_ctx=arguments.window, logits_all=True, verbose=False, **threads)

    def logits(window: Tensor) -> Tensor:
        llama.reset()
        llama.eval(window.tolist())
        return torch.from_numpy(llama.scores[: len(window)])

    return logits


def _differences(exact: Tensor, logits: Tensor, window: Tensor) -> list[float]:
    """Sums over a window: of KL divergences, of other most likely tokens, and of log-losses more than the exact ones.
    [N, V] each"""
    total = [0.0, 0.0, 0.0]
    for begin in range(0, len(window), _AT_ONCE):
        these, others = exact[begin : begin + _AT_ONCE], logits[begin : begin + _AT_ONCE].log_softmax(-1)
        total[0] += float((these.exp() * (these - others)).sum())
        total[1] += float((these.argmax(-1) != others.argmax(-1)).sum())
        following = window[begin + 1 : begin + 1 + _AT_ONCE][:, None]
        total[2] += float((these - others)[: len(following)].gather(-1, following).double().sum())
    return total


def _summary(windows: list[list[float]], of_llama: list[list[float]], length: int) -> dict[str, Any]:
    kl, flips, losses = torch.tensor(windows, dtype=torch.double).T / length
    return {
        "kl": float(kl.mean()),
        "other_most_likely": float(flips.mean()),
        "loss": _with_interval(losses),
        "loss_to_llama": _with_interval(losses - torch.tensor(of_llama, dtype=torch.double)[:, 2] / length),
    }


def _with_interval(losses: Tensor) -> list[float]:
    """Mean, and its interval."""
    mean, error = float(losses.mean()), 1.96 * float(losses.std()) / sqrt(len(losses))
    return [mean, mean - error, mean + error]


if __name__ == "__main__":
    main()
