"""Compiled programs: the same tokens as eager execution, few programs, kept on disk, sharing the weights.

Everything is in float64, so that the rounding of other loops moves no token, and that an equal seed must give equal
tokens. The laws of the eager loop are tested in test_lossless.py.

Making a program takes ten seconds. So the tests share a folder of programs (see conftest.py), and one of them
(``plain``, which comes first) starts from an empty one.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from compile_services import OnCall
from hybrids import hybrid, hybrid_lm
from outrider.compile import program_cache
from outrider.compile import service as service_module
from outrider.compile.compiled import CompiledExecution
from outrider.compile.compiled_lm import compiled_lm
from outrider.compile.program_cache import CompiledProgram
from outrider.compile.service import CompileService
from outrider.compile.worker import CompileJob
from outrider.drafters.base import NoDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import CompileError
from outrider.kernels import library as kernel_library
from outrider.kernels.inductor_pass import MAX_FEW_ROWS
from outrider.options import Sampling
from outrider.records import Request, Stats
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES
from outrider.system.files import cache_folder
from toys import as_lm, llama_pair, perturbed, run, table_lm, tiny_llama, tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 3]]


def requests(*lengths: int, **options: Any) -> list[Request]:
    return [Request(PROMPTS[i], Sampling(seed=i, max_new_tokens=n, **options)) for i, n in enumerate(lengths or (22,))]


PROCESSORS = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}
PROCESSORS |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 5, "stop_token_ids": (3, 7)}


def pair() -> tuple[LM, ModelDrafter]:
    """A tiny Llama, and the first of its two layers, with perturbed weights, as the draft: less to compile."""
    model = tiny_llama()
    draft = perturbed(model, 0.1)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    return as_lm(model), ModelDrafter(as_lm(draft, "draft"))


class Plain(NamedTuple):
    """A target, what it says by itself, and the cache folder in which the program for that was left."""

    target: LM
    want: list[tuple[int, ...]]
    cache: Path

    def say(self, lm: LM) -> list[tuple[int, ...]]:
        return tokens(lm, NoDrafter(), requests(), RULES["rejection"], 0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A cold start: one program serves plain decoding, and nothing but its file is left. (The kernels for few rows are
    there; test_few_row_matmul.py compiles them.)"""
    target, _ = llama_pair()
    want = tokens(target, NoDrafter(), requests(), RULES["rejection"], 0)
    made = Plain(target, want, tmp_path_factory.mktemp("cold"))
    assert kernel_library.library() is not None
    shutil.copytree(cache_folder("kernels"), made.cache / "outrider" / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made.cache))
        assert made.say(compiled_lm(target)) == made.want
    files = (made.cache / "outrider" / "programs").iterdir()
    assert sorted(file.suffix for file in files) == [".call", ".pt2"]
    shutil.copytree(made.cache, os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)  # others need it, too
    return made


@pytest.fixture
def from_disk(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program for plain decoding; a copy, which may be spoilt."""
    shutil.copytree(plain.cache, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "programs"


def test_the_disk(plain: Plain, from_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start compiles nothing; a damaged file is made anew; and where no file can be kept, it goes without."""
    (file,), (call,) = from_disk.glob("*.pt2"), from_disk.glob("*.call")
    kept = file.read_bytes()
    made = program_cache.find(call.stem)
    assert made is not None

    class Remembers:
        """What the compiler would make, without its ten seconds."""

        num_made = 0

        def make(self, job: CompileJob) -> CompiledProgram:
            Remembers.num_made += 1
            program_cache.keep_package(made.name, made.package)
            return made

        def close(self) -> None:
            pass

    def say_again() -> int:
        """How many programs are made for the same text."""
        Remembers.num_made = 0
        assert plain.say(compiled_lm(plain.target, service=CompileService())) == plain.want
        return Remembers.num_made

    monkeypatch.setattr(service_module, "Process", Remembers)
    assert say_again() == 0
    # By this compiler, and from where nobody else may write.
    with monkeypatch.context() as patch:
        patch.setattr(cpp_builder, "get_compiler_version_info", lambda command: f"another {command}")
        assert say_again() == 1
    for path in (from_disk, file, call):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert say_again() == 1
        path.chmod(mode)
        assert say_again() == 0
    for damaged in (file, call):
        damaged.write_bytes(b"damaged")
        assert say_again() == 1
        assert file.read_bytes() == kept
        assert say_again() == 0
    from_disk.rename(from_disk.with_name("moved"))
    from_disk.write_text("a file where the folder should be")
    assert say_again() == 1


@pytest.mark.usefixtures("from_disk")
def test_nothing_is_left_in_the_temporary_folder(
    plain: Plain, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while the program is in use, since a signal may end the process."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    fast = compiled_lm(plain.target)
    assert plain.say(fast) == plain.want
    assert not list(folder.iterdir())
    assert plain.say(fast) == plain.want
    assert os.environ["TMPDIR"] == str(folder)


@pytest.mark.usefixtures("from_disk")
def test_weights_are_shared_and_followed(plain: Plain) -> None:
    """No copy: a weight that is changed in place is changed in the program."""
    target, _ = llama_pair()
    fast = compiled_lm(target)
    assert plain.say(fast) == plain.want
    (program,) = fast.execution._programs.values()
    parameters = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert parameters <= {tensor.data_ptr() for tensor in program.result()._constants.values()}
    with torch.no_grad():
        target.model.model.norm.weight.mul_(-1.0)
    assert plain.say(fast) == plain.say(target) != plain.want


def test_rows_that_end_one_after_the_other() -> None:
    """There is a program for each number of rows. A second run needs no other. (Nothing is compiled here.)"""
    target, _ = llama_pair()
    fast, asked = compiled_lm(target, service=OnCall()), requests(22, 14)
    want = tokens(target, NoDrafter(), asked, RULES["rejection"], 0)
    for _ in range(2):
        assert tokens(fast, NoDrafter(), asked, RULES["rejection"], 0) == want
        assert _num_programs(fast) == 2


@pytest.mark.parametrize(
    ("rule_name", "num_programs", "lengths", "options"),
    [
        pytest.param("rejection", (2, 1), (22,), {}, marks=pytest.mark.slow),
        ("gumbel", (1, 0), (28,), {"temperature": 0.7}),
        pytest.param("gumbel", (1, 1), (28,), {"temperature": 0.7}, marks=pytest.mark.slow),
        ("block", (1, 1), (24, 21), PROCESSORS),
        pytest.param("block", (2, 2), (24, 14), PROCESSORS, marks=pytest.mark.slow),
    ],
    ids=[
        "rejection",
        "gumbel, eager draft",
        "gumbel",
        "block with processors and two rows",
        "one row longer than the other",
    ],
)
def test_the_same_tokens_as_eager(
    rule_name: str, num_programs: tuple[int, int], lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Ragged rows, and drafts that are cut at their ends: whatever is left to draft, the shapes stay, so that a second
    run makes no further program. The target has one for each number of rows, and under ``rejection`` one for a last
    token without drafts; the draft has one for each. (Each takes so long that under the other rules the last round has
    drafts, and two rows end in it; and under ``gumbel`` the draft, whose noise is the target's, stays eager.)"""
    target, drafter = pair()
    rule = RULES[rule_name]
    asked = requests(*lengths, **options)
    eager = run(target, drafter, asked, rule, 2)
    accepted = sum((output.stats for output in eager), Stats()).to_json()["acceptance_histogram"]
    assert len(accepted) == 3 and min(accepted) > 0  # none, one, both: all that may happen in a round does
    want = [output.token_ids for output in eager]
    fast_target, fast_drafter = compiled_lm(target), drafter.with_models(compiled_lm) if num_programs[1] else drafter
    for _ in range(2):
        assert tokens(fast_target, fast_drafter, asked, rule, 2) == want
        assert (_num_programs(fast_target), _num_programs(fast_drafter.lm)) == num_programs
    if num_programs[1]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            tokens(fast_target, fast_drafter, asked, rule, 2)
        allocated = [event.cpu_memory_usage for event in profiled.events() if event.name == "[memory]"]  # by programs
        num_bytes = len(lengths) * 128 * fast_drafter.lm.layer_shapes[0].bytes_per_token // 2  # of the keys of a layer
        assert 0 < max(allocated) < num_bytes  # no program copies them
    if rule_name == "gumbel":  # eight threads may share them, as they may share a decoder (test_complete.py)
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda _: tokens(fast_target, fast_drafter, asked, rule, 2), range(24)))
        assert texts == [want] * 24
        assert (_num_programs(fast_target), _num_programs(fast_drafter.lm)) == num_programs


@pytest.mark.slow
def test_a_place_behind_a_rejected_token_ends_no_text() -> None:
    """After the token that is always drafted the target gives NaN."""
    target = as_lm(tiny_llama())
    target.model.get_input_embeddings().weight.data[4] = torch.nan
    likes_it = ModelDrafter(table_lm(9.0 * torch.eye(target.vocab_size, dtype=torch.float64)[[4] * target.vocab_size]))
    asked = requests(28, temperature=0.7)
    (want,) = tokens(target, NoDrafter(), asked, RULES["gumbel"], 0)
    assert len(want) == 28 and 4 not in want
    assert tokens(compiled_lm(target), likes_it, asked, RULES["gumbel"], 2) == [want]


def _num_programs(lm: LM) -> int:
    return lm.execution.num_programs if isinstance(lm.execution, CompiledExecution) else 0


THIN = (1, 4, 5, MAX_FEW_ROWS, MAX_FEW_ROWS + 1)  # numbers of rows


def _products(lm: Any, *arguments: Tensor) -> tuple[Tensor, ...]:
    """All that the pass rewrites, made from rows that would be computed again in every sum. For each number of rows."""
    found: list[Tensor] = []
    for rows, weight, bias, keys in zip(*[iter(arguments)] * 4, strict=True):
        normed = rows * rows.square().mean(-1, keepdim=True).rsqrt()
        found.append(functional.linear(normed, weight))
        found.append(functional.linear(normed, weight, bias))
        found.append(torch.bmm(normed.softmax(-1)[None].expand(2, -1, -1), keys))
    return tuple(found)


def test_few_row_matmul() -> None:
    """Sums in float64 and the kernel in float32. In one program, since each takes so long to make."""
    generator = torch.Generator().manual_seed(1)
    arguments = [
        torch.randn(*shape, dtype=dtype, generator=generator)
        for dtype in (torch.float64, torch.float32)
        for num_rows in THIN
        for shape in ((num_rows, 40), (25, 40), (25,), (2, 40, 9))  # an odd number of columns: one part is left over
    ]
    got = compiled_lm(llama_pair()[0]).run(_products, (), *arguments)
    want = _products(None, *(argument.double() for argument in arguments))
    assert [one.shape[-2] for one in got] == [num_rows for num_rows in (*THIN, *THIN) for _ in range(3)]
    for one, other in zip(got, want, strict=True):
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-4}[one.dtype]
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=tolerance)


def test_models_with_recurrent_states_are_refused_at_once() -> None:
    """As target and as draft: nothing is compiled."""
    hybrid_target = hybrid_lm(hybrid("qwen3_5_text"))
    for change in (partial(compiled_lm, hybrid_target), lambda: ModelDrafter(hybrid_target).with_models(compiled_lm)):
        with pytest.raises(CompileError, match="it has recurrent states"):
            change()


@pytest.mark.slow
def test_convolutions_are_compiled() -> None:
    """As target and as draft, with rejections in ragged rows."""
    model = hybrid("lfm2").to(torch.float32)
    target, drafter = hybrid_lm(model), ModelDrafter(hybrid_lm(perturbed(model, 0.03), "draft"))
    requests = [Request(prompt, Sampling(temperature=0.0, max_new_tokens=20)) for prompt in ((5, 9, 11), (7, 8) * 9)]
    expected = tokens(target, NoDrafter(), requests, RULES["block"], 0)
    outputs = run(compiled_lm(target), drafter.with_models(compiled_lm), requests, RULES["block"], 2)
    assert [output.token_ids for output in outputs] == expected
    assert all(0 < output.stats.num_accepted_draft_tokens < output.stats.num_draft_tokens for output in outputs)
