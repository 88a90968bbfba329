"""The native forward beside the model's own code on the same slot cache: broken tokens, narrow caches, shifted
positions; what is refused; and what happens if the two differ."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from native_cases import CASES, CONTEXT, VOCAB, drawn, random_model
from outrider.errors import OptionError
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.executions import choose_execution
from outrider.native import engine
from outrider.native.engine import NativeForward
from outrider.native.families import plan_of
from outrider.native.plan import NotPlanned, Plan
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_argument

_BROKEN = [("qwen3_5_text", "plain", 1e-3), ("lfm2", "biases, untied", 3e-5)]
_KINDS = [
    *(("llama", "llama with biases, tied"), ("gemma2", "low caps"), ("gpt2", "plain")),
    *(("qwen2_moe", "plain"), ("gpt_oss", "plain"), ("gemma4_text", "plain")),
]


def _lm(model: PreTrainedModel, *, is_native: bool = False) -> LM:
    lm = LM(model, name=model.config.model_type, vocab_size=VOCAB, context_len=CONTEXT)
    if is_native:
        native = NativeForward(model)
        lm.native, lm.layer_shapes = native, native.layer_shapes
    return lm


class _Rounding(DynamicCache):
    """Keys and values that went through bfloat16."""

    def update(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*given, **more)
        return keys.bfloat16().float(), values.bfloat16().float()


@pytest.mark.parametrize(("family", "name"), _KINDS)
@torch.inference_mode()
def test_caches_of_bfloat16(family: str, name: str) -> None:
    """Numbers are rounded to the nearest: the error is that of a few which another order of sums rounds to the next."""
    model, length = random_model(family, CASES[family][name]), 300
    native, ids, places = NativeForward(model), drawn(2, length), torch.arange(length).expand(2, length)
    shapes = tuple(replace(shape, dtype=torch.bfloat16) for shape in native.layer_shapes)
    got = native(ids, places, SlotCache.empty(shapes, 2, length), length).logits
    want, exact = (
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits
        for cache in (_Rounding(), DynamicCache())
    )
    error, of_rounding = ((got - one).square().mean().sqrt() / want.std() for one in (want, exact))
    assert error < of_rounding / 10


@pytest.mark.parametrize(("family", "name", "tolerance"), [*((*kind, 1e-5) for kind in _KINDS), *_BROKEN])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@torch.inference_mode()
def test_broken_tokens(family: str, name: str, tolerance: float, bad: float) -> None:
    """Logits are NaN from there on, as those of the model's own code, in that row alone; what replaces the token finds
    the cache as if nothing had been there."""
    model = random_model(family, CASES[family][name])
    ids, clean = drawn(2, 9), drawn(2, 9)
    ids[0, 6] = 0
    clean[0, 6:] = drawn(1, 3, seed=1)
    model.get_input_embeddings().weight[0, 5] = bad
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        model.get_output_embeddings().weight = nn.Parameter(torch.randn(VOCAB, 40), requires_grad=False)
        model.config.tie_word_embeddings = False
    places = torch.arange(9).expand(2, 9)
    found = []
    for is_native in (False, True):
        lm = _lm(model, is_native=is_native)
        cache = SlotCache.empty(lm.layer_shapes, 2, 20)
        lm.forward(ids[:, :4], places[:, :4], cache, 20)
        broken = lm.forward(ids[:, 4:], places[:, 4:], cache, 20, keeps_finite=True)
        after = lm.forward(clean[:, 6:], places[:, 6:], cache, 20, keeps_finite=True)
        found.append((broken, after))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=tolerance * float(after.std()), equal_nan=True)
    assert all(bool(store.isfinite().all()) for store in cache.storage)
    is_nan = found[1][0].isnan()
    assert is_nan[0, 2:].all() and not is_nan[0, :2].any() and not is_nan[1].any() and not found[1][1].isnan().any()
    lm = _lm(model, is_native=True)
    cache = SlotCache.empty(lm.layer_shapes, 2, 20)
    lm.forward(clean[:, :4], places[:, :4], cache, 20)
    lm.forward(clean[:, 4:6], places[:, 4:6], cache, 20)
    assert torch.equal(lm.forward(clean[:, 6:], places[:, 6:], cache, 20), found[1][1])


@torch.inference_mode()
def test_other_vocabularies_and_prefill() -> None:
    """All that an LM adds to its model."""
    model, ids = random_model("qwen3", CASES["qwen3"]["windows"]), drawn(2, 30) % 50
    starts, ends, places = torch.tensor([0, 3]), torch.tensor([26, 9]), torch.arange(4)
    for change in (
        lambda lm: lm,
        lambda lm: lm.with_vocabulary(VOCAB - 5, ()),
        lambda lm: lm.with_vocabulary(VOCAB + 3, (7, VOCAB, VOCAB + 1, VOCAB + 2)),
        lambda lm: lm.with_tokens((5, -1, 4, 3, *range(6, 60))),
    ):
        found = []
        for is_native in (False, True):
            lm = change(_lm(model, is_native=is_native))
            cache = SlotCache.empty(lm.layer_shapes, 2, 40)
            cache.copy(0, 1, 3)
            states = lm.prefill(ids, starts, ends, cache, latest=26, num_columns=26, features=(1, 3))
            assert states is not None
            given = ids[:, 26:], ends[:, None] + places, cache, 40, (0, 2)
            logits, features = lm.forward_with_features(*given, num_logits=3)
            assert logits.shape == (2, 3, lm.vocab_size) and features is not None
            found.append((logits, features, states[0], states[1, :6]))
        for got, want in zip(*reversed(found), strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=2e-5)


@torch.inference_mode()
def test_positions_that_are_not_places() -> None:
    """As after an image: later tokens of a row are further on, or back."""
    model, ids, places, found = random_model("llama", {}), drawn(2, 20), torch.arange(20).expand(2, 20), []
    for is_native in (False, True):
        lm = _lm(model, is_native=is_native)
        first, *others = lm.layer_shapes
        cache = SlotCache.empty((replace(first, has_offset=True), *others), 2, 20)
        lm.forward(ids[:, :8], places[:, :8], cache, 20)
        cache.shift(0, -5)
        cache.shift(1, 30)
        found.append(lm.forward(ids[:, 8:], places[:, 8:], cache, 20))
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=1e-5 * float(found[0].std()))


@torch.inference_mode()
def test_arguments_that_the_library_would_misread() -> None:
    """Typed errors, before anything is written, also without assertions: before, memory of others was read or written.
    Ids and places may be out of range; and nothing but padding is fed."""
    native = NativeForward(random_model("gpt2", {}, max_position_embeddings=30))
    ids, places = drawn(2, 4), torch.arange(4).expand(2, 4).clone()
    cache, longer = (SlotCache.empty(native.layer_shapes, 2, capacity) for capacity in (20, 40))
    for at, bad_id, place, where in ((0, VOCAB, 0, cache), (1, -1, 1, cache), (3, 5, 20, cache), (3, 5, 30, longer)):
        bad_ids, bad_places = ids.clone(), places.clone()
        bad_ids[1, at], bad_places[1, at] = bad_id, place
        with pytest.raises(IndexError, match="a token id or a position is out of range"):
            native(bad_ids, bad_places, where, 20)
        assert not any(store.any() for store in where.storage)
    halves = [replace(shape, dtype=torch.float16) for shape in native.layer_shapes]
    wider = [replace(shape, key_dim=16) for shape in native.layer_shapes]
    more = torch.zeros(3, 4, dtype=torch.long)
    for wrong in (
        (ids.int(), places, cache),
        (ids, places[:, :2], cache),
        (more, more, cache),
        (ids, places, SlotCache.empty(halves, 2, 20)),
        (ids, places, SlotCache.empty(wider, 2, 20)),
        (ids, places, SlotCache.empty(native.layer_shapes[:1], 2, 20)),
    ):
        with pytest.raises(TypeError, match="the native library takes"):
            native(*wrong, 20)
    with pytest.raises(TypeError, match="states for a head"):
        native(ids, places, cache, 20, states=torch.zeros(2, 4, native.width))
    with pytest.raises(TypeError, match="no more logits than columns"):
        native(ids, places, cache, 20, num_logits=5)
    places[1, 3] = 19
    native(ids, places, cache, 20)
    for family in ("llama", "qwen3_5_text", "lfm2"):
        native = NativeForward(random_model(family, CASES[family]["plain"]))
        cache = SlotCache.empty(native.layer_shapes, 2, 20)
        found = native(drawn(2, 3), torch.full((2, 3), -1), cache, 20, features=(0, 3), keeps_finite=True)
        assert found.features is not None and found.broken is not None
        assert not any(one.any() for one in (found.logits, found.features, found.broken, *cache.storage))


# What is refused


def _with_order(model: PreTrainedModel) -> None:
    rows, order = torch.zeros(40, 18, dtype=torch.uint8), torch.arange(32, dtype=torch.int32)
    model.model.layers[1].mlp.down_proj.weight = _parameter(NarrowWeight.of_blocks(rows, BLOCK_FORMS[2], order))


class _Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


class _Subclass(Tensor):
    pass


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[PreTrainedModel], None]:
    def changed(model: PreTrainedModel) -> None:
        layer = model.get_submodule(_Q)
        layer.weight = _parameter(change(layer.weight.detach()))

    return changed


_Q = "model.layers.1.self_attn.q_proj"
_REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "a parameter more": (lambda model: model.model.register_parameter("more", _parameter(torch.ones(3))), "model.more"),
    "a parameter less": (lambda model: setattr(model.config, "attention_bias", True), "it has no .*q_proj.bias"),
    "columns in another order": (_with_order, "down_proj.weight has rows or columns in another order"),
    "a wrapped layer": (lambda model: model.set_submodule(_Q, _Wrapped(nn.Linear(2, 2))), f"it has no {_Q}.weight"),
    "another kind of tensor": (_with_weight(lambda one: one.as_subclass(_Subclass)), "weight is stored as _Subclass"),
    "float64": (lambda model: model.double(), "torch.float64"),
    "bfloat16": (lambda model: model.bfloat16(), "norm.weight is Parameter .* of torch.bfloat16"),
    "another device": (lambda model: model.to("meta"), "on meta"),
    "transposed": (_with_weight(lambda one: one.t().contiguous().t()), f"{_Q}.weight is stored as"),
    "fewer rows": (_with_weight(lambda one: one[:-1]), "queries, keys and values has the size 79, not 80"),
    "fewer columns": (_with_weight(lambda one: one[:, 1:].contiguous()), f"{_Q}.weight has the size 39, not 40"),
    "a longer norm": (
        lambda model: setattr(model.model.norm, "weight", _parameter(torch.ones(41))),
        "norm.weight is .*41",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_modules_without_a_plan(name: str) -> None:
    change, reason = _REFUSED[name]
    model = random_model("llama", {}, intermediate_size=32)
    NativeForward(model)
    change(model)
    with pytest.raises(NotPlanned, match=reason):
        NativeForward(model)


# What differs


@pytest.mark.usefixtures("each_is_probed")
def test_a_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The model's own code runs in its place, with a warning."""
    model = random_model("llama", {})
    assert choose_execution(_lm(model)).execution.name == "native" and not caplog.records

    def wrong(config: Any) -> Plan:
        plan = plan_of(config)
        return replace(plan, logit_scale=1.1 * plan.logit_scale)

    monkeypatch.setattr(engine, "plan_of", wrong)
    lm = choose_execution(_lm(model))
    assert lm.execution.name == "eager" and lm.native is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the native engine gives other logits than the model's own code: llama" in record.message
    with pytest.raises(OptionError, match="the native engine gives other logits"):
        choose_execution(_lm(model), "native")
    lm.num_shares = 2  # of a model that several processes share
    with pytest.raises(OptionError, match="in 2 shares"):
        choose_execution(lm, "native")
