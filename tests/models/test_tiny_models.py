"""The tiny models of the sweep of architectures: their contexts are several times as long as any window in them."""

import re

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrids import tiny_models

LOOKS_LIKE_A_SPAN = re.compile("window|chunk|block_size|index_topk|local_att")
# Numbers of layers and chunks, switches, rates of dropout; and chunks of work that change no result.
IS_NONE = re.compile("^use_|_layers$|_pattern$|_num_chunks_|_dropout_|^chunk_size_|_kernel$|_blocks$")


@pytest.mark.slow
def test_every_window_is_a_quarter_of_the_context_at_most() -> None:
    """By the names of fields, in all types, so that one that comes with another release of Transformers is seen."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name in ("gemma4_assistant", "musicgen", "musicgen_melody"):  # which have no configuration of their own
            continue
        known = AutoConfig.for_model(name).to_dict()
        spans = tiny_models.spans_of(known)
        fields = {field for field in known if LOOKS_LIKE_A_SPAN.search(field) and not IS_NONE.search(field)}
        assert fields <= spans.keys(), (name, fields - spans.keys())
        assert all(4 * spans[field] <= tiny_models.LENGTH for field in fields)
        assert 4 * spans.get("index_block_size", 0) * spans.get("index_topk_blocks", 0) <= tiny_models.LENGTH


def test_windows_act_where_a_type_has_some() -> None:
    fields = {"mistral": "sliding_window", "phi3": "sliding_window", "gpt_neo": "window_size", "mamba2": "chunk_size"}
    for name, field in fields.items():
        config = tiny_models.tiny(name).config
        assert getattr(config, field) == tiny_models.SPAN < tiny_models.LENGTH / 4
    assert not hasattr(tiny_models.tiny("llama").config, "sliding_window")
