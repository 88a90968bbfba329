"""Compiled: steps as programs for the CPU.

torch.export traces the model's own code, and Inductor compiles the graph ahead of time. Such a program has no guards to
check and no Python inside; it shares the weights of the model in memory; and it is kept on disk under a hash of its
graph, so that it can never be stale.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.runtime.cache import SlotCache
from outrider.runtime.execution import Call, Prepared, Program
from outrider.runtime.layers import LayerShape
from outrider.runtime.stored import stored_tensors
from outrider.runtime.toolchain import compiler, processor
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_LOG = logging.getLogger(__name__)
_MAX_INLINED = 64  # numbers; far more than the largest tensor that Inductor writes into its code
_MOST_BYTES = 4 * 2**30  # of programs on disk
_FEW_NUMBERS = 2**15  # a loop over fewer takes less time than to share it among threads
_BYTES_PER_THREAD = 2 * 2**20  # weights; with less to read, waking another thread costs more than it saves


class Compiled(Prepared):
    """Runs steps as programs compiled ahead of time. Making one takes half a minute, or a second if it is found on
    disk."""

    name = "compiled"
    favoured_k: tuple[int, ...] = (0, 2, 4)  # each is two or three programs
    lookahead = 0

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.allocate(shapes, num_rows, capacity)

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()  # each run makes results of its own

    def _key_of(self, stores: Sequence[Tensor]) -> None:
        return None  # they are inputs of the program

    def _prepare(self, call: Call) -> Program:
        return _Program(call)


class _Traced(nn.Module):
    """A step as a module of tensors alone, which is what torch.export takes. The model is in it for its weights."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.model = call.lm.model
        self._call = call

    def forward(self, tensors: list[Tensor], stores: list[Tensor]) -> tuple[Tensor, ...]:
        return self._call.on(tensors, stores)


class _Program:
    """One compiled step."""

    def __init__(self, call: Call) -> None:
        traced, lm = _Traced(call), call.lm
        num_threads = _num_threads(lm.model)
        options = {
            "aot_inductor.package_constants_in_so": False,
            "cpp.threads": num_threads,
            "cpp.enable_floating_point_contract_flag": "fast",
            **_thin_options(num_threads),
        }
        weights = _plain(traced)
        with lm.lock, _attention(lm, num_threads):
            exported = _trace(traced, call.tensors, call.stores)
        constants = {**weights, **exported.constants}
        name = f"{_digest(exported, constants, options)}.pt2"
        self._module = _load(exported, options, name, f"{call.step.__name__.strip('_')} of {lm.name}")
        names = self._module.get_constant_fqns()
        strange = sorted(set(names) - set(constants))
        if strange:
            raise TypeError(f"the program wants {strange[0]}, which is no weight of the model")
        # The program points to these tensors; they must live as long as it does.
        self._constants = {name: constants[name].detach() for name in names}
        self._module.load_constants(self._constants, check_full_update=True, user_managed=True)

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Beneath the module's own call, which would flatten its arguments again.
        return tuple(self._module.loader.run([*tensors, *stores]))


def _plain(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name. Those that consist of several tensors (quantized ones) are taken apart, under the
    names that Inductor gives to the parts."""
    found: dict[str, Any] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if not is_traceable_wrapper_subclass(tensor):
            if type(tensor) not in (Tensor, nn.Parameter):
                raise TypeError(f"the kernels of {type(tensor).__name__}, the type of its weights, cannot be traced")
            found[name] = tensor
            continue
        owner, _, own = name.rpartition(".")
        for index, inner in enumerate(stored_tensors(tensor)):
            found[f"{owner}.parametrizations.{own}.original{index}"] = inner
    return found


def _thin_options(num_threads: int) -> dict[str, Any]:
    # Brings Inductor, which takes seconds to import.
    from outrider.runtime.thin_attention import ATTENTION, ATTENTION_SHIM
    from outrider.runtime.thin_kernel import SHIM, library
    from outrider.runtime.thin_products import KERNEL, MAX_SUMS, ThinProducts

    has_kernel = library() is not None
    return {
        "post_grad_custom_pre_pass": ThinProducts(num_threads if has_kernel else None),
        "cpp.max_horizontal_fusion_size": MAX_SUMS,
        "cpp.min_chunk_size": max(1, _FEW_NUMBERS // num_threads),
        "aot_inductor.custom_ops_to_c_shims": {KERNEL: [SHIM], ATTENTION: [ATTENTION_SHIM]},
    }


def _num_threads(model: nn.Module) -> int:
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(max(1, min(torch.get_num_threads(), num_bytes // _BYTES_PER_THREAD)))


@contextmanager
def _attention(lm: Any, num_threads: int) -> Iterator[None]:
    """With our kernel in the place of torch's, where it is for the same types. Other attention is written out, and is
    compiled into the loops around it."""
    from outrider.runtime.thin_attention import KEY_DTYPES, register
    from outrider.runtime.thin_kernel import library

    model = lm.model
    before = model.config._attn_implementation
    has_kernel = before == "sdpa" and lm.dtype in KEY_DTYPES and library() is not None
    model.set_attn_implementation(register(num_threads) if has_kernel else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _digest(exported: torch.export.ExportedProgram, constants: dict[str, Any], options: dict[str, Any]) -> str:
    """A hash of all that the compiled code follows from."""
    digest = hashlib.sha256()
    settings = {name: getattr(value, "uuid", lambda value=value: value)() for name, value in options.items()}
    digest.update(repr((torch.__version__, processor(), compiler(), settings)).encode())
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


def _trace(module: nn.Module, *inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    with _as_torch_compiles():
        # Their values do not matter.
        examples = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors] for tensors in inputs)
        return torch.export.export(module, examples, strict=False)


def _load(exported: torch.export.ExportedProgram, options: dict[str, Any], name: str, what: str) -> Any:
    """The compiled graph, from disk if it is there, in order and nobody else's."""
    programs = PrivateFolder(cache_folder("programs"), _MOST_BYTES)
    kept = programs.open(name)
    if kept is not None:
        with kept:
            try:
                return torch._inductor.aoti_load_package(kept)
            except Exception as error:  # a damaged archive fails in as many ways as there are bytes
                _LOG.warning("%s is damaged (%s): compiling it again", programs.path / name, type(error).__name__)
    _LOG.info("compiling %s", what)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "program.pt2"
        _compile(exported, options, package)
        programs.keep(name, package.read_bytes())
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
