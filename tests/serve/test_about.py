"""The log at start, and the fingerprint of a server's texts."""

from dataclasses import replace

from outrider.api import load
from outrider.serve.about import fingerprint_of, same_bytes_of
from pairs import embedded, random_llama, word_tokenizer


def test_the_fingerprint_changes_with_a_weight() -> None:
    tokenizer = word_tokenizer()
    models = [random_llama() for _ in range(3)]
    models[2].model.layers[0].mlp.up_proj.weight.data += 1e-6
    prints = [fingerprint_of(load(model, "ngram", tokenizer=tokenizer)) for model in models]
    assert prints[0] == prints[1] != prints[2]


def test_images_are_promised_nothing() -> None:
    decoder = embedded()
    assert same_bytes_of(decoder) == "promised"
    assert same_bytes_of(replace(decoder, processor=object())) == "promised, but for images"
