"""Every form of weights: the native forward is the model of the widened numbers, in each of the three arithmetics."""

import copy
from ctypes import c_float
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from native_cases import CASES, drawn, native_logits
from native_weights import BLOCKS, PLAIN, model_in
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.native.engine import NativeForward
from outrider.native.plan import MatrixPlan, NotPlanned
from outrider.native.weights import Weights
from rounded_rows import rounded

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


# Of several forms, as files have them, and float32 where a row is no whole number of groups (here in the outputs of
# attention and of the MLP, whose widths are 144 and 80).
_MIXED = {"q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "bfloat16", "gate_proj": "Q8_0", "up_proj": "Q5_1"} | {
    "embed_tokens": "Q4_0",
    "lm_head": "int8",
}
_NARROW = {"head_dim": 36, "intermediate_size": 80, "attention_bias": True, "tie_word_embeddings": False}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2}
_ALTERNATING = {"gate_up_proj": "Q4_K", "down_proj": "bfloat16"}  # in transposed matrices, whose rows are kept in parts
_LATENT_FORMS = {
    "fc1_latent_proj": "Q4_K",
    "fc2_latent_proj": "Q8_0",
    "experts.up_proj": "Q5_0",
    "down_proj": "bfloat16",
}
_LATENT = CASES["nemotron_h"]["wide latent experts in groups"] | {"moe_latent_size": 64, "moe_intermediate_size": 32}
_WITH_FACTORS = {"in_proj": "Q4_K", "out_proj": "int8", "o_proj": "bfloat16", "gate_proj": "Q8_0", "down_proj": "int8"}


@pytest.mark.parametrize(
    ("family", "forms", "fields", "num_digits", "most"),
    [
        ("llama", _MIXED, _NARROW, 0, (1e-5, 3e-6)),
        ("llama", _MIXED, _NARROW, 2, (1e-3, 1e-3)),
        *(
            ("qwen3_moe", {"gate_up_proj": form, "down_proj": form}, _EXPERTS, 0, (2e-4, 3e-6))
            for form in ("float32, kept", "bfloat16", "Q4_K", "Q8_0")
        ),
        ("gpt_oss", _ALTERNATING, {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}, 0, (2e-4, 3e-6)),
        ("nemotron_h", _LATENT_FORMS, _LATENT, 0, (2e-4, 3e-6)),
        ("falcon_h1", _WITH_FACTORS, CASES["falcon_h1"]["plain"] | {"mamba_d_ssm": 64}, 0, (2e-4, 3e-6)),
    ],
)
def test_models_of_several_forms(
    family: str, forms: dict[str, str], fields: dict[str, Any], num_digits: int, most: tuple[float, float]
) -> None:
    model = model_in(forms, num_digits, family, fields)
    assert sum(isinstance(one, NarrowWeight) for one in model.parameters()) > 2
    largest, usual = _errors(_logits(NativeForward(model)), _twin(model, num_digits))
    assert largest <= most[0] and usual <= most[1]


def test_whole_factors_are_floats_too() -> None:
    name, weight = "weight", torch.nn.Parameter(torch.ones(4, 8), requires_grad=False)
    weights = Weights({name: weight})  # which keep the scales
    matrix = weights.matrix(MatrixPlan(name, factors=((1, 2), (0, 3))))
    assert [*(c_float * 4).from_address(matrix.scales)] == [2.0, 3.0, 3.0, 3.0]


def test_forms_that_are_refused() -> None:
    model = model_in({"gate_up_proj": "Q8_0"}, family="qwen3_moe", stated=_EXPERTS | {"moe_intermediate_size": 72})
    with pytest.raises(NotPlanned, match="parts of 72 rows, no multiple of 16"):
        NativeForward(model)
    model, other = model_in("Q4_0", 1), model_in("Q4_0", 2)
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    with pytest.raises(NotPlanned, match="its matrices have several arithmetics"):
        NativeForward(model)
