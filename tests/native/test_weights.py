"""Every form of weights: the native forward is the model of the widened numbers, in each of the three arithmetics."""

import copy
from ctypes import c_float
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from native_cases import CASES, VOCAB
from native_weights import BLOCKS, PLAIN, model_in
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.native.engine import NativeForward
from outrider.native.plan import MatrixPlan, NotPlanned
from outrider.native.weights import Weights
from outrider.runtime.cache import SlotCache
from rounded_rows import rounded

_LENGTH = 140  # more tokens than go through the layers together


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (2, _LENGTH), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def _logits(native: NativeForward) -> Tensor:
    cache = SlotCache.empty(native.layer_shapes, 2, _LENGTH)
    return native(_tokens(), torch.arange(_LENGTH).expand(2, _LENGTH), cache, _LENGTH).logits


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
    logits: Tensor = wide(input_ids=_tokens(), use_cache=False).logits
    return logits


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest and root mean square difference, relative to the spread."""
    difference = (got - want) / want.std()
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@pytest.mark.parametrize(("form", "is_tied"), [(form, i % 2 == 0) for i, form in enumerate([*PLAIN, *BLOCKS])])
def test_the_widened_model(form: str, is_tied: bool) -> None:
    """Random blocks with offsets make a head look at one token alone, where a last bit of a score counts: the largest
    error may be larger than in test_families.py, though Transformers' own is as large."""
    model = model_in(form, tie_word_embeddings=is_tied)
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize(("num_digits", "low", "high"), [(1, 3e-3, 3e-2), (2, 3e-5, 3e-4)])
def test_rounded_rows(form: str, num_digits: int, low: float, high: float) -> None:
    """The twin rounds the same rows. But sums in another order round a number here and there to the next integer, and
    these differences more numbers in what follows: it is near where integers have 8 bits, and no nearer than the model
    that rounds nothing where they have 15."""
    model = model_in(form, num_digits)
    native = NativeForward(model)
    got = _logits(native)
    _, error = _errors(got, _twin(model, num_digits))
    _, of_rounding = _errors(got, _twin(model))
    assert low < of_rounding < high and error < (0.6 if num_digits == 1 else 1.2) * of_rounding
    with native.without_rounding():
        plain = _logits(native)
    assert torch.equal(plain, _logits(NativeForward(model_in(form)))) and torch.equal(_logits(native), got)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("num_digits", [1, 2])
@torch.inference_mode()
def test_rounded_rows_of_one_product(form: str, num_digits: int) -> None:
    """The head's, from the hidden states that the forward gives: equal but for sums in another order."""
    model = model_in(form, num_digits, tie_word_embeddings=False)
    native, places = NativeForward(model), torch.arange(_LENGTH).expand(2, _LENGTH)
    cache = SlotCache.empty(native.layer_shapes, 2, _LENGTH)
    found = native(_tokens(), places, cache, _LENGTH, features=(2,))
    rows, head = model.model.norm(found.features), model.lm_head.weight.wide()
    of_rounding = (found.logits - rows @ head.T).square().mean().sqrt()
    error = (found.logits - rounded(rows, num_digits) @ head.T).square().mean().sqrt()
    assert error < (0.02 if num_digits == 1 else 0.15) * of_rounding


def test_forms_that_are_mixed() -> None:
    """Files have several forms, and float32 where a row is no whole number of groups (here in the outputs of attention
    and of the MLP, whose widths are 144 and 80)."""
    forms = {"q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "bfloat16", "gate_proj": "Q8_0", "up_proj": "Q5_1"}
    fields = {"head_dim": 36, "intermediate_size": 80, "attention_bias": True, "tie_word_embeddings": False}
    for num_digits, most in ((0, 1e-5), (2, 1e-3)):
        model = model_in(forms | {"embed_tokens": "Q4_0", "lm_head": "int8"}, num_digits, **fields)
        largest, _ = _errors(_logits(NativeForward(model)), _twin(model, num_digits))
        assert largest <= most


_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.parametrize("form", ["float32, kept", "bfloat16", "Q4_K", "Q8_0"])
def test_experts(form: str) -> None:
    model = model_in({"gate_up_proj": form, "down_proj": form}, family="qwen3_moe", **_EXPERTS)
    kept = [one for one in model.parameters() if isinstance(one, NarrowWeight)]
    assert len(kept) == 4 and all(one.shape[0] == 3 for one in kept)
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


def test_experts_that_alternate() -> None:
    """GPT-OSS's gate and up alternate in transposed matrices, of which their rows are kept part by part."""
    fields = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    model = model_in({"gate_up_proj": "Q4_K", "down_proj": "bfloat16"}, family="gpt_oss", **fields)
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


def test_experts_of_another_width() -> None:
    """Nemotron-H's, whose rows of 64 numbers are narrower than the hidden states."""
    forms = {"fc1_latent_proj": "Q4_K", "fc2_latent_proj": "Q8_0", "experts.up_proj": "Q5_0", "down_proj": "bfloat16"}
    fields = CASES["nemotron_h"]["wide latent experts in groups"] | {
        "moe_latent_size": 64,
        "moe_intermediate_size": 32,
    }
    model = model_in(forms, family="nemotron_h", stated=fields)
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


def test_factors_of_products() -> None:
    """Falcon-H1's, of matrices with and without scales of their own."""
    forms = {"in_proj": "Q4_K", "out_proj": "int8", "o_proj": "bfloat16", "gate_proj": "Q8_0", "down_proj": "int8"}
    model = model_in(forms, family="falcon_h1", stated=CASES["falcon_h1"]["multipliers"])
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model))
    assert largest <= 2e-4 and usual <= 3e-6


def test_whole_factors_are_floats_too() -> None:
    name, weight = "weight", torch.nn.Parameter(torch.ones(4, 8), requires_grad=False)
    weights = Weights({name: weight})  # which keep the scales
    matrix = weights.matrix(MatrixPlan(name, factors=((1, 2), (0, 3))))
    assert [*(c_float * 4).from_address(matrix.scales)] == [2.0, 3.0, 3.0, 3.0]


def test_experts_without_whole_vectors_are_refused() -> None:
    fields = _EXPERTS | {"moe_intermediate_size": 72}
    model = model_in({"gate_up_proj": "Q8_0"}, family="qwen3_moe", **fields)
    with pytest.raises(NotPlanned, match="parts of 72 rows, no multiple of 16"):
        NativeForward(model)


def test_several_arithmetics_are_refused() -> None:
    model, other = model_in("Q4_0", 1), model_in("Q4_0", 2)
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    with pytest.raises(NotPlanned, match="its matrices have several arithmetics"):
        NativeForward(model)
