"""Executions: ways to run the same functions of tensors.

A *step* is a pure function (lm, *static, *arguments) -> tensors, where static values are hashable and arguments hold
tensors: a forward with what is drawn from it, or with the verdict on it. ``Eager`` just calls it. ``Compiled`` makes a
program of it once for each static value and shape: torch.export traces the model's own code, and Inductor compiles the
graph ahead of time. Such a program has no guards to check and no Python inside; it shares the weights of the model in
memory; and it is kept on disk under a hash of its graph, so that it can never be stale.

So that few programs are needed, an execution also says to which sizes lengths and rows are rounded up.

This module does not know what the steps do.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from outrider.cache import SlotCache
from outrider.errors import CompileError
from outrider.files import cache_folder, keep_in_cache

_LOG = logging.getLogger(__name__)
_EAGER_STEP = 64  # places; eager shapes are free, but views that change less often make masks of fewer sizes
_SMALLEST_VIEW = 128  # places in the view of a compiled program
_MAX_INLINED = 64  # numbers; far more than the largest tensor that Inductor writes into its code
_BYTES_PER_THREAD = 2 * 2**20  # weights; with less to read, waking another thread costs more than it saves

Step = Callable[..., tuple[Tensor, ...]]


class Execution(Protocol):
    """A way to run steps.

    Attributes:
        name: for tables and messages.
        favoured_k: the K that an adaptive schedule chooses among.
    """

    name: str
    favoured_k: tuple[int, ...]

    def round_length(self, length: int) -> int:
        """The length of view or cache to use for so many tokens."""
        ...

    def round_rows(self, num_rows: int) -> int:
        """The batch size to use for so many unfinished rows."""
        ...

    def round_drafts(self, num_wanted: int, k: int) -> int:
        """How many columns to verify where 0 <= num_wanted <= k tokens are drafted."""
        ...

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """``step(lm, *static, *arguments)``"""
        ...


class Eager:
    """Runs steps as they are written."""

    name = "eager"
    favoured_k: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)

    def round_length(self, length: int) -> int:
        return -(-length // _EAGER_STEP) * _EAGER_STEP

    def round_rows(self, num_rows: int) -> int:
        return num_rows

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return num_wanted

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return step(lm, *static, *arguments)


class Compiled:
    """Runs steps as programs compiled ahead of time, for one model.

    Lengths and rows are rounded up to powers of two. Programs are made when they are first needed, which takes half a
    minute each, or a second if they are found on disk.
    """

    name = "compiled"
    favoured_k: tuple[int, ...] = (0, 2, 4)  # each is two or three programs

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}

    @property
    def num_programs(self) -> int:
        """Programs in use so far."""
        return len(self._programs)

    def round_length(self, length: int) -> int:
        return max(_SMALLEST_VIEW, _power_of_two(length))

    def round_rows(self, num_rows: int) -> int:
        return _power_of_two(num_rows)

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return k if num_wanted else 0

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        tensors: list[Tensor] = []
        form: list[Any] = []
        _take_apart(arguments, tensors, form)
        key = (step, id(lm.model), static, tuple(form))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(step, lm, static, arguments, tensors)
        return program.run(tensors)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@lru_cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def _take_apart(value: Any, tensors: list[Tensor], form: list[Any]) -> None:
    """Append the tensors in ``value``, contiguous, and to ``form`` all else that a program depends on."""
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        form.append((value.shape, value.dtype))
    elif isinstance(value, SlotCache):
        tensors.extend(value.storage)
        form.append((value.capacity, *(store.shape for store in value.storage[:1])))
    elif isinstance(value, tuple):
        form.append(len(value))
        for item in value:
            _take_apart(item, tensors, form)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in _field_names(type(value)):
            _take_apart(getattr(value, name), tensors, form)
    else:
        form.append(value)


def _put_together(value: Any, tensors: Iterator[Tensor]) -> Any:
    """``value`` with other tensors in the place of its own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, SlotCache):
        return SlotCache([next(tensors) for _ in value.storage], value.capacity)
    if isinstance(value, tuple):
        return tuple(_put_together(item, tensors) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {name: _put_together(getattr(value, name), tensors) for name in _field_names(type(value))}
        return type(value)(**parts)
    return value


class _Traced(nn.Module):
    """A step as a module of tensors alone, which is what torch.export takes. The model is in it for its weights."""

    def __init__(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.model = lm.model
        self._call = step, lm, static, arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        step, lm, static, arguments = self._call
        return step(lm, *static, *_put_together(arguments, iter(tensors)))


class _Program:
    """One compiled step.

    Args:
        tensors: those in ``arguments``.

    Raises:
        CompileError: the model or this machine does not allow it.
    """

    def __init__(
        self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...], tensors: Sequence[Tensor]
    ) -> None:
        traced = _Traced(step, lm, static, arguments)
        options = {
            "post_grad_custom_pre_pass": _thin_products(),
            "aot_inductor.package_constants_in_so": False,
            "cpp.threads": _num_threads(lm.model),
            "cpp.enable_floating_point_contract_flag": "fast",
            "cpp.max_horizontal_fusion_size": 32,
        }
        try:
            with _plain_attention(lm.model):
                exported = _trace(traced, tensors)
            constants = {
                **dict(traced.named_parameters(remove_duplicate=False)),
                **dict(traced.named_buffers(remove_duplicate=False)),
                **exported.constants,
            }
            path = cache_folder("programs") / f"{_digest(exported, constants, options)}.pt2"
            self._module = _load(exported, options, path, f"{step.__name__.strip('_')} of {lm.name}")
        except Exception as error:  # what tracing arbitrary models and calling compilers may raise has no common type
            reason = " ".join(str(error).split())[:300]
            raise CompileError(f"{lm.name} cannot be compiled here: {type(error).__name__}: {reason}") from error
        # The program points to these tensors; they must live as long as it does.
        self._constants = {name: constants[name].detach() for name in self._module.get_constant_fqns()}
        self._module.load_constants(self._constants, check_full_update=True, user_managed=True)

    def run(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        # Beneath the module's own call, which would flatten its arguments again.
        return tuple(self._module.loader.run(tensors))


def _thin_products() -> Any:
    from outrider.thin import ThinProducts  # brings Inductor, which takes seconds to import

    return ThinProducts()


def _num_threads(model: nn.Module) -> int:
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(max(1, min(torch.get_num_threads(), num_bytes // _BYTES_PER_THREAD)))


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """With attention written out, which is compiled into the loops around it; the fused kernel stands alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _digest(exported: torch.export.ExportedProgram, constants: dict[str, Any], options: dict[str, Any]) -> str:
    """A hash of all that the compiled code follows from."""
    digest = hashlib.sha256()
    settings = {name: getattr(value, "uuid", lambda value=value: value)() for name, value in options.items()}
    digest.update(repr((torch.__version__, _processor(), settings)).encode())
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                value = node.meta.get("val")
                kind = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
                digest.update(repr((node.name, node.op, str(node.target), node.args, node.kwargs, kind)).encode())
    digest.update(repr(exported.graph_signature).encode())
    # Inductor writes the values of very small tensors into the code, and treats tensors that share memory as one.
    first_names: dict[Any, str] = {}
    for name, value in constants.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            numbers = value.tolist() if value.numel() <= _MAX_INLINED else None
            digest.update(repr((name, first_names.setdefault(place, name), numbers)).encode())
    return digest.hexdigest()


def _processor() -> str:
    """What code may be compiled for here: the compiler is told to use all that this processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def _trace(module: nn.Module, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    with _as_torch_compiles():
        # Their values do not matter.
        examples = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors)
        return torch.export.export(module, examples, strict=False)


def _load(exported: torch.export.ExportedProgram, options: dict[str, Any], path: Path, what: str) -> Any:
    """The compiled graph, from disk if it is there and in order."""
    if path.exists():
        try:
            return torch._inductor.aoti_load_package(str(path))
        except Exception as error:  # a damaged archive fails in as many ways as there are bytes
            _LOG.warning("%s is damaged (%s): compiling it again", path, type(error).__name__)
    _LOG.info("compiling %s", what)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "program.pt2"
        _compile(exported, options, package)
        keep_in_cache(path, package.read_bytes())
        return torch._inductor.aoti_load_package(str(package))


def _compile(exported: torch.export.ExportedProgram, options: dict[str, Any], path: Path) -> None:
    with _as_torch_compiles():
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


@contextmanager
def _as_torch_compiles() -> Iterator[None]:
    """Outside of inference mode, whose tensors cannot be traced, and without torch's warnings about itself."""
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
