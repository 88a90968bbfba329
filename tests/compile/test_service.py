"""Texts that begin before their programs are there, and the process that makes these.

Compiling is left out here: programs come from a service that delivers when it is told to. Everything is in float64, so
that an eager step and a program give the same tokens. (tests/compile/test_compiled.py compiles.)
"""

import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from compile_services import Fails, OnCall, Refuses
from languages import Remainders
from outrider.compile import service as service_module
from outrider.compile import worker
from outrider.compile.pickling import code_of, key_of, pack, unpack
from outrider.compile.program_cache import CompiledProgram
from outrider.compile.service import CompileService, Process, ProgramOrder
from outrider.compile.worker import CompileJob, check_constants
from outrider.decoder import Decoder
from outrider.decoding.cost_cache import round_costs
from outrider.decoding.verify import verify_step
from outrider.drafters.model import ModelDrafter
from outrider.errors import CompileError
from outrider.options import Sampling
from outrider.records import Request, RowRound
from outrider.runtime.execution import Call
from outrider.sampling.rules import RULES
from toys import as_lm, llama_pair, tiny_llama

LIMIT_S = 120.0
PROMPT = [1, 2, 3]

helpers: Any = None  # a module; see test_code_that_modules_call_is_covered


def pair(service: CompileService) -> tuple[Decoder, Decoder]:
    """Eager, and with programs that texts do not wait for."""
    target, drafter = llama_pair()
    assert isinstance(drafter, ModelDrafter)
    decoder = Decoder(target, None, frozenset(), drafter, num_draft_tokens=2)
    return decoder, decoder.compiled(waits=False, service=service)


def test_a_text_begins_eagerly_and_goes_on_with_programs() -> None:
    service = OnCall()
    eager, mixed = pair(service)
    options = {"max_new_tokens": 24, "temperature": 0}
    (want,) = eager.generate([PROMPT], **options)
    token_ids: list[int] = []
    for chunk in mixed.stream(PROMPT, **options):
        if not token_ids:
            assert service.num_runs == 0 and {order.what for order in service.orders} == {
                "draft_steps of draft",
                "verify_step of target",
            }
            service.deliver()
        token_ids += chunk.token_ids
    assert tuple(token_ids) == want.token_ids
    assert service.num_runs > 2 and service.num_awaited == 0


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_row_with_a_seed_has_one_execution(is_cold: bool) -> None:
    """All of its rounds are programs', whatever was there before."""
    service = OnCall()
    eager, mixed = pair(service)
    if not is_cold:
        mixed.generate([PROMPT], max_new_tokens=24)
        service.deliver()
    before = service.num_runs
    (text,) = mixed.generate([PROMPT], max_new_tokens=24, seed=1)
    (want,) = eager.generate([PROMPT], max_new_tokens=24, seed=1)
    assert text.token_ids == want.token_ids
    num_drafts = sum(num > 0 for num in (chunk for chunk in text.stats.drafted_histogram[1:]))
    assert num_drafts and service.num_runs - before >= 2 * sum(text.stats.drafted_histogram[1:])


def test_one_row_with_a_seed_makes_a_round_wait() -> None:
    service = OnCall()
    _, mixed = pair(service)
    engine = mixed.engine(num_slots=2, capacity=64)
    for seed in (None, 3):
        engine.submit(mixed.request(PROMPT, {"max_new_tokens": 8, "seed": seed}).request)
    engine.step()
    assert service.num_awaited == len(service.orders) > 0


def test_a_program_that_cannot_be_made() -> None:
    """Rows without a seed go on eagerly; others end with the error."""
    service = OnCall()
    eager, mixed = pair(service)
    options = {"max_new_tokens": 24, "temperature": 0}
    stream = mixed.stream(PROMPT, **options)
    token_ids = list(next(stream).token_ids)
    for order in service.orders:
        order.program.set_exception(CompileError("no compiler"))
    token_ids += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(token_ids) == eager.generate([PROMPT], **options)[0].token_ids
    with pytest.raises(CompileError, match="no compiler"):
        mixed.generate([PROMPT], seed=1, **options)


def test_a_failure_is_remembered() -> None:
    """Who needs the program again is told at once, and so is who needs the same step for another shape; that one is
    tried meanwhile, and used when it is there."""
    service = Fails(lambda call: call.step is verify_step and call.arguments[0].capacity == 128)
    eager, mixed = pair(service)
    options = {"max_new_tokens": 24, "seed": 1}
    longer = PROMPT * 50
    for prompt in (PROMPT, PROMPT, longer):
        with pytest.raises(CompileError, match="^no compiler$"):
            mixed.generate([prompt], **options)
    verifies = [order for order in service.orders if order.what == "verify_step of target"]
    assert [order.program.done() for order in verifies] == [True, False]  # nobody waited for the second
    service.deliver()
    assert mixed.generate([longer], **options)[0].token_ids == eager.generate([longer], **options)[0].token_ids
    assert mixed.generate([PROMPT], max_new_tokens=4)[0].token_ids  # eagerly


def _second_draft(call: Call) -> bool:
    """Where drafts are made one by one, the first is fed two tokens."""
    return call.step.__name__ == "draft_steps" and call.arguments[1].shape[1] == 1


@pytest.mark.parametrize("fails", [lambda call: call.step is verify_step, _second_draft], ids=["verify", "draft"])
def test_a_round_that_failed_leaves_no_trace(fails: Callable[[Call], bool]) -> None:
    """The row that needs the programs is cancelled; the other has the same rounds as alone."""

    def rounds(is_alone: bool) -> list[RowRound]:
        service = Fails(fails)
        _, mixed = pair(service)
        engine = mixed.engine(num_slots=2, capacity=64)
        plain = mixed.request(PROMPT, {"max_new_tokens": 40, "temperature": 0}).request
        engine.submit(replace(plain, constraint=Remainders(mixed.target.vocab_size)))
        found = []
        while (round_ := engine.step()) is not None:
            found += round_.rows
            if len(found) in (3, 7) and not is_alone:
                index = engine.submit(mixed.request(PROMPT[:2], {"max_new_tokens": 8, "seed": 3}).request)
                with pytest.raises(CompileError, match="no compiler"):
                    engine.step()
                engine.cancel(index)
        return found

    alone = rounds(is_alone=True)
    assert rounds(is_alone=False) == alone and {one.num_accepted for one in alone} > {0, 2}


@pytest.mark.usefixtures("costs_are_measured")
def test_costs_of_eager_rounds_do_until_there_are_others(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is kept as a cost of compiled rounds, and nothing waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    service = OnCall()
    _, mixed = pair(service)
    costs = round_costs(mixed.target, mixed.drafter, RULES["block"], 1, 64)
    assert list(costs) == [0, 2, 4] and not service.orders
    waiting = mixed.compiled(service=service)
    assert round_costs(waiting.target, waiting.drafter, RULES["block"], 1, 64).keys() == costs.keys()
    assert service.num_awaited == len(service.orders) > 0


@pytest.fixture
def _refusing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(service_module, "Process", Refuses)
    monkeypatch.setattr(service_module, "_HEAD_START_S", 0.0)


@pytest.mark.usefixtures("_refusing")
def test_an_error_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()  # when all programs are ordered: none would be, after a failure

    class Waits(Refuses):
        def make(self, job: CompileJob) -> CompiledProgram | str:
            may_fail.wait(LIMIT_S)
            return super().make(job)

    monkeypatch.setattr(service_module, "Process", Waits)
    orders: list[ProgramOrder] = []
    service = CompileService(on_order=orders.append)
    _, mixed = pair(service)
    for num_rows in (1, 2):
        mixed.generate([PROMPT] * num_rows, max_new_tokens=8)
    may_fail.set()
    for order in orders:
        with pytest.raises(CompileError):
            order.program.result(LIMIT_S)
    assert {order.what for order in orders} == {"draft_steps of draft", "verify_step of target"}
    assert len(orders) == service.num_orders and service.num_open == 0
    mixed.generate([PROMPT, PROMPT], max_new_tokens=8)
    told = sorted(record.message for record in caplog.records if record.levelname == "WARNING")
    assert told == [
        f"{name} cannot be compiled here: RuntimeError: no compiler at all; it runs eagerly"
        for name in ("draft", "target")
    ]


@pytest.mark.usefixtures("_refusing")
def test_what_cannot_be_compiled_is_an_error_of_one_line() -> None:
    _, mixed = pair(CompileService())
    with pytest.raises(CompileError, match=r"^draft cannot be compiled here: RuntimeError: no compiler at all$"):
        mixed.compiled(service=CompileService()).generate([PROMPT], max_new_tokens=4)


@pytest.mark.usefixtures("_refusing")
def test_a_maker_lets_models_go() -> None:
    """Its threads, which wait for the next order, hold none of the last."""
    service = CompileService()
    eager, mixed = pair(service)
    mixed.generate([PROMPT], max_new_tokens=4)
    model = weakref.ref(mixed.target.model)
    del eager, mixed
    end_s = time.monotonic() + LIMIT_S
    while service.num_open or model() is not None:
        gc.collect()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_step_beside_the_compiler_leaves_one_thread_to_it() -> None:
    """For as long as the step takes: what is repeatable runs on all threads."""
    service = CompileService()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with service.room():
            assert torch.get_num_threads() == 3
        service.num_open = 1
        with service.room():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_begins_beside_the_compiler_has_all_threads() -> None:
    """torch's own setting is for the process, and a thread keeps what it finds there when it first touches torch."""
    service, found = CompileService(), list[int]()
    before = torch.get_num_threads()
    begins, goes_on = threading.Event(), threading.Event()

    def begin() -> None:
        found.append(torch.get_num_threads())
        begins.set()
        assert goes_on.wait(LIMIT_S)
        found.append(torch.get_num_threads())

    try:
        torch.set_num_threads(3)
        service.num_open = 1
        other = threading.Thread(target=begin)
        with service.room():
            other.start()
            assert begins.wait(LIMIT_S) and torch.get_num_threads() == 2
        goes_on.set()
        other.join()
        assert found == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_a_process_imports_nothing_from_the_current_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    process = Process()
    answer = process.make(CompileJob(b"", "", 1))
    assert isinstance(answer, str) and answer.startswith("EOFError")
    process.close()


def test_a_process_that_was_killed() -> None:
    """Who waits for it hears of it, and the next program is made by another one."""
    process = Process()
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        process.make(CompileJob(b"", "", 1))
    assert process.close() == "was killed by signal 9 (the memory may be full)"


@pytest.mark.slow  # two processes load torch
def test_no_process_is_left_behind() -> None:
    """However the one that started it ends."""
    code = "from outrider.compile.service import Process; p = Process(); print(p._process.pid, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        os.kill(number, 0)
        parent.kill()
    end_s = time.monotonic() + LIMIT_S
    while _is_running(number):
        assert time.monotonic() < end_s
        time.sleep(0.1)


def _is_running(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Calls without weights


def _call(lm: Any, length: int = 8) -> Call:
    found: list[Call] = []

    class Looks(OnCall):
        def order(self, call: Call) -> ProgramOrder:
            found.append(call)
            return super().order(call)

    decoder = Decoder(lm, None, frozenset(), ModelDrafter(lm), num_draft_tokens=2)
    decoder.compiled(service=Looks()).generate([list(range(1, length))], max_new_tokens=2)
    return found[0]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    yield _call(as_lm(tiny_llama()))


def test_progress_is_told_to_its_end(
    call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside texts, where nobody sees otherwise when they stop being slow."""
    are_ordered = threading.Event()

    class Makes(Refuses):
        def make(self, job: CompileJob) -> CompiledProgram:  # type: ignore[override]
            assert are_ordered.wait(LIMIT_S)
            return CompiledProgram("name", b"", b"")

    monkeypatch.setattr(service_module, "Process", Makes)
    monkeypatch.setattr(service_module, "LoadedProgram", lambda made, weights: "a program")
    monkeypatch.setattr(service_module.program_cache, "find", lambda key: None)
    monkeypatch.setattr(service_module.program_cache, "keep", lambda key, made: None)
    caplog.set_level("INFO", "outrider.compile.service")
    service = CompileService()
    orders = [service.order(call) for _ in range(2)]
    with service.room():  # for an eager step meanwhile
        are_ordered.set()
    for order in orders:
        assert order.program.result(LIMIT_S) == "a program"
    end_s = time.monotonic() + LIMIT_S
    while "are ready" not in caplog.text:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    *compiling, last = [record.message for record in caplog.records if record.name == "outrider.compile.service"]
    assert last == "all 2 programs are ready"
    assert [message.partition(" (")[0] for message in compiling] == ["compiling draft_steps of target"] * 2


def test_the_same_call_is_the_same_bytes(call: Call) -> None:
    """Whatever tokens it is called on; another model in memory, of the same form, is the same too."""
    assert pack(_call(as_lm(tiny_llama()))) == pack(_call(as_lm(tiny_llama()), length=5)) == pack(call)
    other = as_lm(tiny_llama())
    other.model.model.rotary_emb.inv_freq.mul_(0.5)  # small tensors are part of the code
    assert pack(_call(other)) != pack(call)


def test_small_tensors_are_part_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes their values into the code: a model with another rope_theta, whose few frequencies are such, must
    not be given the program of this one."""
    monkeypatch.setattr(worker, "_compile", lambda exported, options, path: path.write_bytes(b""))
    monkeypatch.setattr(worker, "package_of", lambda name: None)
    monkeypatch.setattr(worker, "keep_package", lambda name, package: None)
    names = []
    for factor in (1.0, 1.0, 0.5):
        lm = as_lm(tiny_llama(num_layers=1))
        lm.model.model.rotary_emb.inv_freq.mul_(factor)
        names.append(worker.make(CompileJob(pack(_call(lm)), code_of(lm.model), 1)).name)
    assert names[0] == names[1] != names[2]


def test_no_weights_are_packed(call: Call) -> None:
    packed = pack(call)
    num_bytes = sum(p.numel() * p.element_size() for p in call.lm.model.parameters())
    assert len(packed) < num_bytes / 2
    other = unpack(packed)
    assert other.form == call.form and other.static == call.static
    for (name, mine), (_, its) in zip(
        call.lm.model.state_dict().items(), other.lm.model.state_dict().items(), strict=True
    ):
        assert mine.shape == its.shape and mine.dtype == its.dtype, name
    torch.testing.assert_close(other.lm.model.model.rotary_emb.inv_freq, call.lm.model.model.rotary_emb.inv_freq)


def test_tensors_of_every_type_are_packed() -> None:
    """float8 has no typed storage."""
    lm = as_lm(tiny_llama())
    for size in (4, 10_000):
        lm.model.register_buffer(f"eights_{size}", torch.full((size,), 1.5).to(torch.float8_e4m3fn))
    packed = pack(_call(lm))
    small, large = (unpack(packed).lm.model.get_buffer(f"eights_{size}") for size in (4, 10_000))
    assert small.dtype == large.dtype == torch.float8_e4m3fn and large.shape == (10_000,)
    assert small.tolist() == [1.5] * 4
    assert len(packed) - len(pack(_call(as_lm(tiny_llama())))) < 5_000


def test_a_program_holds_nothing_but_the_step(call: Call) -> None:
    """Two drafted tokens are two forwards. What else the other process may ask the model is not traced with them."""
    other = unpack(pack(call))
    exported = worker._trace(worker._TracedModule(other), other.tensors, other.stores)
    names = [str(node.target) for node in exported.graph_module.graph.nodes]
    assert names.count("aten.embedding.default") == 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_are_chosen_in_each_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the highest position, on the host: they are traced as those of any model, since a context ends where others
    begin."""
    graphs: list[list[str]] = []

    def compile_(exported: Any, options: Any, path: Path) -> None:
        graphs.append([str(node.target) for node in exported.graph_module.graph.nodes if node.op == "call_function"])
        path.write_bytes(b"")

    monkeypatch.setattr(worker, "_compile", compile_)
    monkeypatch.setattr(worker, "package_of", lambda name: None)
    monkeypatch.setattr(worker, "keep_package", lambda name, package: None)
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    for parameters in ({"rope_type": "default", "rope_theta": 10000.0}, rope):
        lm = as_lm(tiny_llama(rope_parameters=parameters))
        worker.make(CompileJob(pack(_call(lm)), code_of(lm.model), 1))
    plain, chosen = graphs
    assert chosen == plain


def test_what_a_program_depends_on_is_part_of_its_key(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(call)
    key = key_of(call.lm.model, packed, 1)
    assert key_of(call.lm.model, packed, 1) == key
    others = [key_of(call.lm.model, packed, 2), key_of(call.lm.model, packed + b".", 1)]
    code = code_of(call.lm.model)
    mlp = type(call.lm.model.model.layers[0].mlp)
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda self, x: x)
        assert code_of(call.lm.model) != code
        others.append(key_of(call.lm.model, packed, 1))
    for name in ("processor", "compiler"):
        with monkeypatch.context() as patch:
            patch.setattr(f"outrider.compile.pickling.{name}", lambda: "another")
            others.append(key_of(call.lm.model, packed, 1))
    assert len({key, *others}) == 6 and code_of(call.lm.model) == code


class Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _helped(x) if x.shape[0] in {"a", "b"} else [helpers.double(one) for one in (x,)][0]


def _helped(x: torch.Tensor) -> torch.Tensor:
    return 2.5 * x


def _helped_otherwise(x: torch.Tensor) -> torch.Tensor:
    return 3.5 * x


def test_code_that_modules_call_is_covered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is in memory, and in its file."""
    file = tmp_path / "helpers_of_a_test.py"
    file.write_text("def double(x):\n    return 2 * x\n\n\ndef forward(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), "helpers", importlib.import_module("helpers_of_a_test"))
    model = Calls()
    codes = [code_of(model)]
    assert code_of(Calls()) == codes[0]
    for owner, name, other in (
        (sys.modules[__name__], "_helped", _helped_otherwise),
        (_helped, "__code__", _helped_otherwise.__code__.replace(co_name="_helped", co_qualname="_helped")),
        (helpers, "double", functools.wraps(helpers.double)(lambda x: 3 * x)),
        (llama, "apply_rotary_pos_emb", helpers.forward),
    ):
        with monkeypatch.context() as patch:
            one = tiny_llama() if owner is llama else model
            before = code_of(one)
            patch.setattr(owner, name, other)
            assert code_of(one) != before, name
        assert code_of(one) == before
    file.write_text(file.read_text() + "# changed\n")
    codes.append(code_of(model))
    # The forward of a single module.
    lonely = nn.Sequential(nn.Identity())
    lonely[0].forward = helpers.forward
    codes.append(code_of(lonely))
    file.write_text(file.read_text() + "# again\n")
    codes.append(code_of(lonely))
    assert len(set(codes)) == 4


@pytest.mark.slow  # a process loads torch
def test_the_same_code_in_another_process() -> None:
    code = "from outrider.compile.pickling import code_of; from toys import tiny_llama; print(code_of(tiny_llama()))"
    paths = os.pathsep.join(path for path in sys.path if path)
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE)
    assert out.stdout.decode().strip() == code_of(tiny_llama())


def test_the_default_dtype_goes_with_the_call(call: Call) -> None:
    packed, default = pack(call), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert pack(call) != packed
        unpack(packed)
        assert torch.get_default_dtype() is default
    finally:
        torch.set_default_dtype(default)


def test_constants_that_share_memory_with_weights_are_refused() -> None:
    """Where programs are made, weights have no values."""
    weights = {"large": torch.zeros(100), "small": torch.zeros(4)}
    check_constants({**weights, "own": torch.ones(100), "small_too": weights["small"][:2]}, weights)
    with pytest.raises(TypeError, match="the tensor lifted shares memory with a weight"):
        check_constants({"lifted": weights["large"][5:7]}, weights)


def test_a_model_that_cannot_be_sent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = as_lm(tiny_llama())
    lm.model.model.layers[0].mlp.forward = lambda x: x
    request = Request(PROMPT, Sampling(seed=1, max_new_tokens=2))
    decoder = Decoder(lm, None, frozenset(), ModelDrafter(lm)).compiled(service=CompileService())
    with pytest.raises(CompileError, match="cannot be compiled here: .*[Pp]ickle"):
        decoder.generate([request.prompt_ids], max_new_tokens=2)
