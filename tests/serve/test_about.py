"""The log at start, and the fingerprint of a server's texts."""

from dataclasses import replace

import torch

from outrider.api import load
from outrider.certify import divergence
from outrider.decoding.schedule import ConstantSchedule
from outrider.records import MediaPrompt
from outrider.runtime.execution import OF_IMAGES
from outrider.serve.about import fingerprint_of, same_bytes_of, startup_lines
from pairs import embedded, random_llama, word_tokenizer


def test_memory_of_a_slot() -> None:
    """Keys and values of both models, for each place and one more."""
    decoder = embedded("float64")
    first, second, ends, *others = startup_lines(decoder, ConstantSchedule(4), 3, 448)
    bytes_ = sum(
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8 * (448 + 1)
        for config in (lm.model.config for lm in (decoder.target, *decoder.drafter.models))
    )
    assert "3 slots of 448 tokens" in first
    assert f"{bytes_ / 2**20:.1f} MiB each" in first
    assert "K = 4" in second and second.endswith("float64, eager, same bytes: not promised (eager)")
    assert "texts end with 0" in ends and not others


def test_the_fingerprint_changes_with_a_weight() -> None:
    tokenizer = word_tokenizer()
    one, same, other = random_llama(), random_llama(), random_llama()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1e-6
    prints = [fingerprint_of(load(model, "ngram", tokenizer=tokenizer)) for model in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_images_are_promised_nothing() -> None:
    """The model's own code reads them."""
    decoder = embedded()
    assert same_bytes_of(decoder) == "promised"
    assert same_bytes_of(replace(decoder, processor=object())) == "promised, but for images"
    request = decoder.request("The king", {"temperature": 0.0}).request
    assert divergence._promise(decoder.target, [request]) == "promised"
    media = MediaPrompt(torch.zeros(1, 1, 1), None, 0, {}, {})
    assert divergence._promise(decoder.target, [request, replace(request, media=media)]) == OF_IMAGES
