"""The probe of a model: what goes wrong through a slot cache is seen, beyond a sliding window too."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import outrider
from hybrids import V, hybrid, hybrid_lm, tiny_models
from outrider.errors import UnsupportedModel
from outrider.models import probe as module
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.probe import num_tokens_across
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_layers import StateLayer
from outrider.runtime.modules import cache_argument
from pairs import random_llama
from toys import random_model

pytestmark = pytest.mark.usefixtures("each_is_probed")
WINDOW = 20
SHAPE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "sliding_window": WINDOW}


def test_the_probe_finds_a_model_that_forgets_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that works in a single forward, and not block by block: by its logits, not by its name."""
    model: Any = random_llama()
    forward, dropped = model.forward, {cache_argument(model), "attention_mask", "position_ids"}
    without = lambda **given: forward(**{name: one for name, one in given.items() if name not in dropped})  # noqa: E731
    monkeypatch.setattr(model, "forward", without)
    with pytest.raises(UnsupportedModel, match="its cache cannot be rolled back, or it sees later tokens"):
        outrider.load(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt_neo", "its cache cannot be rolled back"),
        ("minimax_m3_vl_text", "has layers of type minimax_m3_sparse"),
        ("moshi", "states a window of 16 tokens that its modelling code does not apply"),
    ],
)
def test_windows_that_do_not_work_here_fail_to_load(name: str, message: str) -> None:
    model = tiny_models.tiny(name)
    with pytest.raises(UnsupportedModel, match=message):
        build_lm(Checkpoint(name, model, tokenizer=None), V)


class OwnWindow(tf.LlamaForCausalLM):
    """A Llama whose own code puts a window into the mask, unless it is given one, as by LM: nothing shows outside."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is None:
            places = torch.arange(input_ids.shape[1])
            distance = places[:, None] - places
            is_hidden = (distance < 0) | (distance >= WINDOW)
            least = torch.finfo(self.dtype).min
            attention_mask = torch.zeros(1, 1, *distance.shape, dtype=self.dtype).masked_fill(is_hidden, least)
        return super().forward(input_ids, attention_mask=attention_mask, **options)


def build(model: Any) -> None:
    build_lm(Checkpoint("odd", model, tokenizer=None), SHAPE["vocab_size"])


def test_a_model_that_is_wrong_only_beyond_its_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a few tokens do not show the mistake."""
    model = random_model(OwnWindow, tf.LlamaConfig(**SHAPE), 0).float()
    with pytest.raises(UnsupportedModel, match=r"odd \(llama\) cannot be used: beyond its window of 20 tokens"):
        build(model)
    monkeypatch.setattr(module, "_MOST_WORK_OF_THREAD", 0)
    build(model)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Llama"])  # a Llama states a window, and does without
def test_a_window_that_is_right_is_right_beyond_it(name: str) -> None:
    for length in (256, num_tokens_across(WINDOW) - 1):
        fields = SHAPE | {"max_position_embeddings": length, "head_dim": 8}
        build(random_model(getattr(tf, f"{name}ForCausalLM"), getattr(tf, f"{name}Config")(**fields), 0).float())


class NoPositions(tf.LlamaForCausalLM):
    def forward(self, *args: Any, position_ids: Tensor | None = None, **options: Any) -> Any:
        return super().forward(*args, **options)


def masked(model_class: type) -> Any:
    """A model of which one token is impossible."""

    def mask(_: Any, __: Any, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([3]), -torch.inf)

    model: Any = random_model(model_class, tf.LlamaConfig(**SHAPE), 0)
    model.lm_head.register_forward_hook(mask)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_improbable_token_hides_nothing(dtype: torch.dtype) -> None:
    build(masked(tf.LlamaForCausalLM).to(dtype))
    with pytest.raises(UnsupportedModel, match="its cache cannot be rolled back"):
        build(masked(NoPositions).to(dtype))


def test_wrong_states_fail_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_5_text")
    hybrid_lm(model)
    settle, update = SlotCache.settle, StateLayer.update_recurrent_state

    mistakes: tuple[tuple[type, str, Any, str], ...] = (
        (SlotCache, "settle", lambda cache, num: settle(cache, num + 99), "do not continue where they were left"),
        (
            *(StateLayer, "update_recurrent_state"),
            lambda layer, new, *args, **options: update(layer, new.flip(0), *args, **options),
            "its states depend on other rows or on padding",
        ),
    )
    for owner, name, change, message in mistakes:
        with monkeypatch.context() as patch, pytest.raises(UnsupportedModel, match=message):
            patch.setattr(owner, name, change)
            hybrid_lm(model)
