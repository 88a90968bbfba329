"""Compiled programs: the same tokens as eager execution, few programs, kept on disk, sharing the weights.

Everything is in float64, so that the rounding of other loops moves no token, and that an equal seed must give equal
tokens. The laws of the eager loop are tested in test_lossless.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch.nn import functional

from outrider.decoding.engine import decode
from outrider.drafters.base import NoDrafter
from outrider.errors import CompileError
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime import compiled as compiled_module
from outrider.runtime.compiled import Compiled
from outrider.runtime.lm import LM
from outrider.runtime.thin_products import MAX_THIN_ROWS
from outrider.sampling.rules import RULES
from toys import as_lm, llama_pair, tiny_llama, tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 3]]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for programs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "programs"


def requests(num_rows: int = 1, **options: Any) -> list[Request]:
    return [Request(PROMPTS[i], Sampling(seed=i, max_new_tokens=(30, 11)[i], **options)) for i in range(num_rows)]


PROCESSORS = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}


@pytest.mark.parametrize(
    ("rule_name", "num_rows", "options"),
    [("rejection", 1, {}), ("gumbel", 1, {"temperature": 0.7}), ("block", 2, PROCESSORS)],
    ids=["rejection", "gumbel", "block with processors and two rows"],
)
def test_the_same_tokens_as_eager(rule_name: str, num_rows: int, options: dict[str, Any]) -> None:
    """Ragged rows that end one after the other, and drafts that are cut at their ends: whatever is left to draft, the
    shapes stay, so that a second run makes no further program."""
    target, drafter = llama_pair()
    rule = RULES[rule_name]
    want = tokens(target, drafter, requests(num_rows, **options), rule, 2)
    fast_target, fast_drafter = target.compiled(), drafter.with_models(LM.compiled)
    assert tokens(fast_target, fast_drafter, requests(num_rows, **options), rule, 2) == want
    assert _num_programs(fast_target) <= num_rows + 1  # one for each batch size, and for a last token without drafts
    assert _num_programs(fast_drafter.lm) <= 2 * num_rows  # with one token owed, and with two
    before = _num_programs(fast_target), _num_programs(fast_drafter.lm)
    assert tokens(fast_target, fast_drafter, requests(num_rows, **options), rule, 2) == want
    assert (_num_programs(fast_target), _num_programs(fast_drafter.lm)) == before


def _num_programs(lm: LM) -> int:
    assert isinstance(lm.execution, Compiled)
    return lm.execution.num_programs


def test_plain_decoding_and_the_disk(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program serves plain decoding; a second start compiles nothing; a damaged file is made anew."""
    target, _ = llama_pair()
    asked, rule = requests(), RULES["rejection"]
    want = tokens(target, NoDrafter(), asked, rule, 0)
    assert tokens(target.compiled(), NoDrafter(), asked, rule, 0) == want
    files = list(programs.glob("*.pt2"))
    assert len(files) == 1 and {path.name for path in programs.iterdir()} == {files[0].name}

    def fail(*args: object) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(compiled_module, "_compile", fail)
        second = target.compiled()
        assert tokens(second, NoDrafter(), asked, rule, 0) == want
        # But by this compiler, and by nobody else.
        with monkeypatch.context() as other, pytest.raises(CompileError, match="compiled again"):
            other.setattr(cpp_builder, "get_compiler_version_info", lambda command: f"another {command}")
            tokens(target.compiled(), NoDrafter(), asked, rule, 0)
        for path in (programs, files[0]):
            mode = path.stat().st_mode
            path.chmod(0o777)
            with pytest.raises(CompileError, match="compiled again"):
                tokens(target.compiled(), NoDrafter(), asked, rule, 0)
            path.chmod(mode)
    files[0].write_bytes(b"damaged")
    assert tokens(target.compiled(), NoDrafter(), asked, rule, 0) == want
    assert files[0].stat().st_size > 1000
    programs.rename(programs.with_name("moved"))
    programs.write_text("a file where the folder should be")
    assert tokens(target.compiled(), NoDrafter(), asked, rule, 0) == want


def test_weights_are_shared_and_followed() -> None:
    """No copy: a weight that is changed in place is changed in the program."""
    target, _ = llama_pair()
    fast = target.compiled()
    list(decode(fast, NoDrafter(), requests(), RULES["rejection"], num_draft_tokens=0))
    (program,) = fast.execution._programs.values()
    parameters = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert parameters <= {tensor.data_ptr() for tensor in program._constants.values()}
    with torch.no_grad():
        target.model.model.norm.weight.mul_(-1.0)
    want = tokens(target, NoDrafter(), requests(), RULES["rejection"], 0)
    assert tokens(fast, NoDrafter(), requests(), RULES["rejection"], 0) == want


def test_small_tensors_are_part_of_the_key() -> None:
    """Inductor writes their values into the code: a model with another rope_theta, whose few frequencies are such, must
    not be given the program of this one."""
    target, _ = llama_pair()
    other = as_lm(tiny_llama())
    other.model.model.rotary_emb.inv_freq.mul_(0.5)
    for lm in (target, other):
        want = tokens(lm, NoDrafter(), requests(), RULES["rejection"], 0)
        assert tokens(lm.compiled(), NoDrafter(), requests(), RULES["rejection"], 0) == want


def test_what_cannot_be_compiled_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = llama_pair()

    def fail(*args: object) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(compiled_module, "_compile", fail)
    with pytest.raises(CompileError, match="target cannot be compiled here: RuntimeError: no compiler at all"):
        list(decode(target.compiled(), NoDrafter(), requests(), RULES["rejection"], num_draft_tokens=0))
    assert target.model.config._attn_implementation == "sdpa"  # as it was


def _products(lm: Any, rows: Tensor, weight: Tensor, bias: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """All that the pass rewrites, made from rows that would be computed again in every sum."""
    normed = rows * rows.square().mean(-1, keepdim=True).rsqrt()
    plain = functional.linear(normed, weight)
    return plain, functional.linear(normed, weight, bias), torch.bmm(normed.softmax(-1)[None].expand(2, -1, -1), keys)


@pytest.mark.parametrize("num_rows", [1, 4, 5, MAX_THIN_ROWS, MAX_THIN_ROWS + 1])
def test_thin_products(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = (num_rows, 40), (25, 40), (25,), (2, 40, 9)  # an odd number of columns, of which one part is left over
    arguments = tuple(torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    got = llama_pair()[0].compiled().run(_products, (), *arguments)
    for one, other in zip(got, _products(None, *arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-13)
