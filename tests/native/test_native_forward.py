"""The native forward beside the model's own code on the same slot cache; what is refused; and what happens if the two
differ. Every form of weights, in each of the three arithmetics. (Texts: tests/decoding/test_joining.py.)"""

import copy
from collections.abc import Callable
from ctypes import c_float, c_int8
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from native_cases import CASES, CONTEXT, VOCAB, drawn, native_forward, native_lm, native_logits, random_model
from native_weights import BLOCKS, OF_SEVERAL, PLAIN, model_in
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.kernels.blocks import BLOCK_TYPES
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.native.engine import NativeForward
from outrider.native.plan import MatrixPlan, NotPlanned
from outrider.native.weights import Weights
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward
from outrider.sampling.rules import BLOCK
from rounded_rows import rounded
from toys import perturbed, request, run, tokens

_BROKEN = [("qwen3_5_text", "plain", 1e-3), ("lfm2", "biases, untied", 3e-5)]
_KINDS = [
    *(("llama", "llama with biases, tied"), ("gemma2", "low caps"), ("gpt2", "plain")),
    *(("qwen2_moe", "plain"), ("gpt_oss", "plain"), ("gemma4_text", "plain")),
]


def _lm(model: PreTrainedModel, *, is_native: bool = False) -> LM:
    forward = native_forward(model) if is_native else TransformersForward(model)
    return LM(forward, name=model.config.model_type, vocab_size=VOCAB, context_len=CONTEXT)


@pytest.mark.parametrize(("family", "name", "tolerance"), [*((*kind, 1e-5) for kind in _KINDS), *_BROKEN])
@torch.inference_mode()
def test_native_tokens_that_are_not_finite(family: str, name: str, tolerance: float) -> None:
    """Logits are NaN from there on, in that row alone; what replaces the token finds a clean cache."""
    model = random_model(family, CASES[family][name])
    ids, clean = drawn(2, 9), drawn(2, 9)
    ids[0, 6] = 0
    clean[0, 6:] = drawn(1, 3, seed=1)
    model.get_input_embeddings().weight[0, 5] = torch.inf if name == "plain" else torch.nan
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


@torch.inference_mode()
def test_other_vocabularies_and_prefill() -> None:
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
    """Typed errors, before anything is written: else memory of others would be read or written."""
    native = native_forward(random_model("gpt2", {}, max_position_embeddings=30))
    ids, places = drawn(2, 4), torch.arange(4).expand(2, 4).clone()
    cache, longer = (SlotCache.empty(native.layer_shapes, 2, capacity) for capacity in (20, 40))
    for at, bad_id, place, where in ((0, VOCAB, 0, cache), (1, -1, 1, cache), (3, 5, 20, cache), (3, 5, 30, longer)):
        bad_ids, bad_places = ids.clone(), places.clone()
        bad_ids[1, at], bad_places[1, at] = bad_id, place
        with pytest.raises(IndexError, match="a token id or a position is out of range"):
            native(bad_ids, bad_places, where, 20)
        assert not any(store.any() for store in where.storage)
    wider = [replace(shape, key_dim=16) for shape in native.layer_shapes]
    more = torch.zeros(3, 4, dtype=torch.long)
    for wrong in (
        (ids.int(), places, cache),
        (ids, places[:, :2], cache),
        (more, more, cache),
        (ids, places, SlotCache.empty(wider, 2, 20)),
        (ids, places, SlotCache.empty(native.layer_shapes[:1], 2, 20)),
    ):
        with pytest.raises(TypeError, match="the native library takes"):
            native(*wrong, 20)
    with pytest.raises(TypeError, match="states for a head"):
        native(ids, places, cache, 20, states=torch.zeros(2, 4, native.width))
    places[1, 3] = 19
    native(ids, places, cache, 20)
    padded = native(ids, torch.full((2, 4), -1), cache, 20, keeps_finite=True)
    assert not padded.logits.any()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _weight(change: Callable[[Tensor], Tensor]) -> Callable[[PreTrainedModel], None]:
    def changed(model: PreTrainedModel) -> None:
        layer = model.get_submodule(_Q)
        layer.weight = _parameter(change(layer.weight.detach()))

    return changed


def _with_order(model: PreTrainedModel) -> None:
    rows, order = torch.zeros(40, 18, dtype=torch.uint8), torch.arange(32, dtype=torch.int32)
    model.model.layers[1].mlp.down_proj.weight = _parameter(NarrowWeight.of_blocks(rows, BLOCK_TYPES[2], order))


_Q = "model.layers.1.self_attn.q_proj"
_REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "a parameter more": (lambda model: model.model.register_parameter("more", _parameter(torch.ones(3))), "model.more"),
    "a parameter less": (lambda model: setattr(model.config, "attention_bias", True), "it has no .*q_proj.bias"),
    "columns in another order": (_with_order, "down_proj.weight has rows or columns in another order"),
    "float64": (lambda model: model.double(), "torch.float64"),
    "another device": (lambda model: model.to("meta"), "on meta"),
    "transposed": (_weight(lambda one: one.t().contiguous().t()), f"{_Q}.weight is stored as"),
    "fewer rows": (_weight(lambda one: one[:-1]), "queries, keys and values has the size 79, not 80"),
    "fewer columns": (_weight(lambda one: one[:, 1:].contiguous()), f"{_Q}.weight has the size 39, not 40"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_modules_without_a_plan(name: str) -> None:
    change, reason = _REFUSED[name]
    model = random_model("llama", {}, intermediate_size=32)
    native_forward(model)
    change(model)
    with pytest.raises(NotPlanned, match=reason):
        native_forward(model)


def model_of(family: str) -> PreTrainedModel:
    return random_model(family, CASES[family]["a state for each" if family == "qwen3_5_text" else "plain"])


def steps(native: Any, ids: Tensor) -> Tensor:
    """Logits of the tokens fed one by one, each of which stays. [T, V]"""
    cache = SlotCache.empty(native.layer_shapes, 1, CONTEXT)
    fed = ((ids[t].view(1, 1), torch.tensor([[t]])) for t in range(len(ids)))
    return torch.cat([native(one, place, cache, CONTEXT).logits[0] for one, place in fed])


@torch.inference_mode()
def test_a_long_text_that_may_be_rejected() -> None:
    """Of more tokens than the ring keeps, the first cannot be taken back; of a prompt, none."""
    native, ids, places = native_forward(model_of("qwen3_5_text")), drawn(1, 200), torch.arange(200)[None]
    want = steps(native, ids[0])
    for is_prompt in (False, True):
        cache = SlotCache.empty(native.layer_shapes, 1, CONTEXT)
        got = native(ids[:, :199], places[:, :199], cache, CONTEXT, keeps_finite=not is_prompt)
        assert torch.equal(got.logits[0], want[:199])
        first = 199 if is_prompt else 199 - WINDOW + 3
        assert cache.anchors.tolist() == [first]
        assert [cache.take_over(0, number) for number in (first - 1, first)] == [0, first]
        before = [store.clone() for store in cache.storage]
        with pytest.raises(IndexError, match="a position is out of range"):
            native(ids[:, first - 1 :], places[:, first - 1 :], cache, CONTEXT)
        with pytest.raises(IndexError):  # a place is left out
            native(ids[:, :2], torch.tensor([[first, first + 2]]), cache, CONTEXT)
        assert all(map(torch.equal, before, cache.storage))
        assert torch.equal(native(ids[:, first:], places[:, first:], cache, CONTEXT).logits[0], want[first:])


@pytest.mark.parametrize(("family", "most"), [("qwen3_5_text", WINDOW - 3 - STRIDE), ("lfm2", WINDOW - 3)])
def test_how_many_tokens_may_be_drafted(family: str, most: int) -> None:
    """The inputs of all of them must be there together with those that the state lacks."""
    lm = native_lm(model_of(family))
    requests = [request((5, 9) * 40, temperature=0.0, max_new_tokens=130)]
    draft = model_drafter(native_lm(perturbed(lm.model, 0.001), "draft"))
    outputs = run(lm, draft, requests, BLOCK, most)
    assert [one.token_ids for one in outputs] == tokens(lm, NO_DRAFTER, requests, BLOCK, 0)
    assert max(row.num_drafted for one in outputs for row in one.rounds) == most
    with pytest.raises(OptionError, match=f"at most {most}"):
        tokens(lm, ngram_drafter(), requests, BLOCK, most + 1)


_LENGTH = 140  # more tokens than go through the layers together


def _logits(native: NativeForward) -> Tensor:
    return native_logits(native, drawn(2, _LENGTH))


@torch.inference_mode()
def _twin(model: PreTrainedModel, num_digits: int = 0) -> Tensor:
    """Logits of the model of the widened numbers, float32, with the inputs of products with blocks rounded."""
    wide = copy.deepcopy(model)
    for module, original in zip(wide.modules(), model.modules(), strict=True):
        for name, one in list(module.named_parameters(recurse=False)):
            if isinstance(one, NarrowWeight):
                setattr(module, name, nn.Parameter(one.wide(), requires_grad=False))
        weight = getattr(original, "weight", None)
        is_in_blocks = isinstance(weight, NarrowWeight) and weight.blocks is not None
        if isinstance(module, nn.Linear) and is_in_blocks and num_digits:

            def hook(_: Any, given: tuple[Tensor, ...]) -> Tensor:
                return rounded(*given, num_digits)

            module.register_forward_pre_hook(hook)
    logits: Tensor = wide(input_ids=drawn(2, _LENGTH), use_cache=False).logits
    return logits


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest and root mean square difference, relative to the spread."""
    difference = (got - want) / want.std()
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@pytest.mark.parametrize(("form", "is_tied"), [(form, i % 2 == 0) for i, form in enumerate([*PLAIN, *BLOCKS])])
def test_native_logits_equal_the_widened_model(form: str, is_tied: bool) -> None:
    """Random blocks with offsets make a head look at one token alone: the largest error may be larger."""
    model = model_in(form, tie_word_embeddings=is_tied)
    largest, usual = _errors(_logits(native_forward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize(("num_digits", "low", "high"), [(1, 3e-3, 3e-2), (2, 3e-5, 3e-4)])
def test_native_logits_of_rounded_rows(form: str, num_digits: int, low: float, high: float) -> None:
    """Sums in another order round a number here and there to the next integer, which changes what follows: near where
    integers have 8 bits, and no nearer than the model that rounds nothing where they have 15."""
    model = model_in(form, num_digits)
    native = native_forward(model)
    got = _logits(native)
    _, error = _errors(got, _twin(model, num_digits))
    _, of_rounding = _errors(got, _twin(model))
    assert low < of_rounding < high and error < (0.6 if num_digits == 1 else 1.2) * of_rounding
    with native.without_rounding():
        plain = _logits(native)
    assert torch.equal(plain, _logits(native_forward(model_in(form)))) and torch.equal(_logits(native), got)


@pytest.mark.parametrize(("family", "num_digits"), [*((family, 0) for family in OF_SEVERAL), ("llama", 2)])
def test_models_of_several_forms(family: str, num_digits: int) -> None:
    model = model_in(OF_SEVERAL[family][0], num_digits, family, OF_SEVERAL[family][1])
    assert sum(isinstance(one, NarrowWeight) for one in model.parameters()) > 2
    largest, usual = _errors(_logits(native_forward(model)), _twin(model, num_digits))
    assert (largest <= 2e-4 and usual <= 3e-6) or (num_digits and largest <= 1e-3) or family == "qwen3_5_text"
    assert largest <= 1e-3


def test_a_part_has_its_own_rows_scales_and_biases() -> None:
    stored, scales = torch.arange(16, dtype=torch.int8).view(4, 4), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    weight = nn.Parameter(NarrowWeight(stored, torch.float32, scales), requires_grad=False)
    weights = Weights({"weight": weight, "bias": nn.Parameter(torch.tensor([5.0, 6.0, 7.0, 8.0]))})
    for part, (rows, own, biases) in enumerate(
        ((range(8), [1.0, 2.0], [5.0, 6.0]), (range(8, 16), [3.0, 4.0], [7.0, 8.0]))
    ):
        matrix = weights.matrix(MatrixPlan("weight", "bias", part=part, num_parts=2))
        assert [*(c_float * 2).from_address(matrix.scales)] == own
        assert [*(c_float * 2).from_address(matrix.bias)] == biases
        assert [*(c_int8 * 8).from_address(matrix.data)] == [*rows]
    weights = Weights({"weight": nn.Parameter(torch.ones(4, 8), requires_grad=False)})
    matrix = weights.matrix(MatrixPlan("weight", output_scales=((1, 2), (0, 3))))  # whole factors are floats too
    assert [*(c_float * 4).from_address(matrix.scales)] == [2.0, 3.0, 3.0, 3.0]


def test_native_forward_refuses_unknown_storage() -> None:
    model = model_in(
        {"gate_up_proj": "Q8_0"}, family="qwen3_moe", stated=OF_SEVERAL["qwen3_moe"][1] | {"moe_intermediate_size": 72}
    )
    with pytest.raises(NotPlanned, match="parts of 72 rows, no multiple of 16"):
        native_forward(model)
    model, other = model_in("Q4_0", 1), model_in("Q4_0", 2)
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    with pytest.raises(NotPlanned, match="its matrices have several arithmetics"):
        native_forward(model)
