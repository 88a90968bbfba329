"""The log at start, and the fingerprint of a server's texts."""

import torch

from outrider.api import load
from outrider.decoding.schedule import ConstantSchedule
from outrider.serve.fingerprint import fingerprint_of
from outrider.serve.startup_log import about
from pairs import embedded, random_llama, word_tokenizer
from toys import adaptive


def test_k_by_load_is_told_with_its_reason() -> None:
    costs = {1: {0: 0.002, 2: 0.003, 4: 0.004}, 8: {0: 0.004, 2: 0.012, 4: 0.04}}
    lines = about(embedded(), adaptive(costs), 8, 512)
    rows = [line.split() for line in lines[-2:]]
    # With one row 1.96 tokens in three milliseconds are more per second than 1 in two, and than 2.3 in four; with eight
    # rows two drafted tokens make at most three of one, at the price of three.
    assert rows == [
        ["1", "2.00", "3.00", "4.00", "2", "0.37"],
        ["8", "4.00", "12.0", "40.0", "0", "never"],
    ]


def test_memory_of_a_slot() -> None:
    """Keys and values of both models, for each place and one more."""
    decoder = embedded("float64")
    first, second, *others = about(decoder, ConstantSchedule(4), 3, 448)
    bytes_ = sum(
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8 * (448 + 1)
        for config in (lm.model.config for lm in (decoder.target, *decoder.drafter.models))
    )
    assert "3 slots of 448 tokens" in first
    assert f"{bytes_ / 2**20:.1f} MiB each" in first
    assert "K = 4" in second and not others


def test_the_fingerprint_changes_with_a_weight() -> None:
    tokenizer = word_tokenizer()
    one, same, other = random_llama(), random_llama(), random_llama()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1e-6
    prints = [fingerprint_of(load(model, "ngram", tokenizer=tokenizer)) for model in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
