"""The distribution of sampled sequences of a tiny model against its own, by a chi-square test."""

import itertools
import math
from collections import Counter

import torch

from outrider.drafters.base import Drafter
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule
from toys import request, tokens

LENGTH = 3


def law_z(target: LM, drafter: Drafter, rule: Rule, prompt: tuple[int, ...], *, k: int, num_samples: int) -> float:
    """Standard normal score of Pearson's statistic of all sequences of LENGTH tokens, after Wilson and Hilferty; cells
    that expect fewer than five samples are one. Above 5 once in 3.5 million correct runs."""
    expected = _law(target, prompt)
    requests = [request(prompt, seed=i, max_new_tokens=LENGTH) for i in range(num_samples)]
    counts = Counter(tokens(target, drafter, requests, rule, k))
    pooled_expected = pooled_count = statistic = 0.0
    num_cells = 0
    for sequence, prob in expected.items():
        if prob * num_samples < 5:
            pooled_expected += prob * num_samples
            pooled_count += counts[sequence]
            continue
        statistic += (counts[sequence] - prob * num_samples) ** 2 / (prob * num_samples)
        num_cells += 1
    if pooled_expected:
        statistic += (pooled_count - pooled_expected) ** 2 / pooled_expected
        num_cells += 1
    degrees = num_cells - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def _law(target: LM, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    paths = list(itertools.product(range(target.vocab_size), repeat=LENGTH))
    ids = torch.tensor([[*prompt, *path] for path in paths])
    with torch.inference_mode():
        probs = target.model(input_ids=ids).logits[:, len(prompt) - 1 : -1].softmax(dim=-1)
    chosen = probs.gather(-1, ids[:, len(prompt) :, None]).squeeze(-1).prod(dim=-1)
    return dict(zip(paths, chosen.tolist(), strict=True))
