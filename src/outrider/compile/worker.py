"""Process that compiles programs: receives calls (``CompileJob``), sends compiled graphs (``CompiledProgram``).

torch.export traces the model's own code, and Inductor compiles the graph ahead of time. The result is cached on disk
under a hash of the graph, so that it is never stale; two processes that need the same program compile it once.

It ends with the process that started it, at once and with all compilers that it runs.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.compile.pickling import MAX_INLINED, code_of, unpack, weights_of
from outrider.compile.program_cache import CompiledProgram, keep_package, package_of
from outrider.compile.rotary import constant_frequencies
from outrider.errors import CompileError
from outrider.kernels.toolchain import compiler, processor
from outrider.runtime.execution import Call
from outrider.system.file_lock import alone
from outrider.system.files import cache_folder

_NICENESS = 10  # generation comes first; on a single core compiling still gets a tenth
_FEW_NUMBERS = 2**15  # numbers; a shorter loop is faster on one thread
_BYTES_PER_THREAD = 2 * 2**20  # of weights; for fewer, waking another thread costs more than it saves


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Program to compile.

    Attributes:
        packed: the call.
        code: ``code_of`` the model where it runs.
        num_threads: of torch where it runs.
    """

    packed: bytes
    code: str
    num_threads: int


def serve(number: int) -> None:
    """Compile one program after the other. Sends a ``CompiledProgram`` for each, or the reason why there is none.

    Args:
        number: file descriptor of a connection.
    """
    os.nice(_NICENESS)
    connection = Connection(number)
    jobs: SimpleQueue[CompileJob] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                jobs.put(connection.recv())
        except (EOFError, OSError):
            # C++ compilers are in this process group too, and delete their unfinished files.
            os.killpg(0, signal.SIGTERM)
            time.sleep(1.0)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        job = jobs.get()
        try:
            answer: CompiledProgram | str = make(job)
        except Exception as error:  # errors of arbitrary models and compilers have no common type
            answer = reason_of(error)
        connection.send(answer)


def reason_of(error: Exception) -> str:
    """Why there is no program, in one line."""
    kind = "" if isinstance(error, CompileError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:300]


def make(job: CompileJob) -> CompiledProgram:
    """Trace and compile a call; or load its program from disk, if it is undamaged and trusted."""
    from outrider.compile.in_place import InPlacePass
    from outrider.kernels.library import check_threads

    check_threads(job.num_threads)
    call = unpack(job.packed)
    if code_of(call.lm.model) != job.code:
        raise TypeError("the code of its modules differs from their files: the files were changed while it ran")
    torch.set_num_threads(job.num_threads)  # traced code may ask for it
    num_threads = _num_threads(call.lm.model)
    options = {
        "aot_inductor.package_constants_in_so": False,
        "cpp.threads": num_threads,
        "cpp.enable_floating_point_contract_flag": "fast",
        "post_grad_custom_post_pass": InPlacePass(),
        **_kernel_options(num_threads),
    }
    weights = weights_of(call.lm.model)
    _set_attention(call.lm, num_threads)
    with constant_frequencies(call.lm.model):
        exported = _trace(_TracedModule(call), call.tensors, call.stores)
    check_constants(exported.constants, weights)
    name = _digest(exported, {**weights, **exported.constants}, options)
    constants = io.BytesIO()
    torch.save({key: value for key, value in exported.constants.items() if key not in weights}, constants)
    with alone(cache_folder("locks") / name):  # other processes wait for this one
        package = package_of(name)
        if package is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "program.pt2"
                _compile(exported, options, path)
                package = path.read_bytes()
            keep_package(name, package)
    return CompiledProgram(name, package, constants.getvalue())


class _TracedModule(nn.Module):
    """A step as a module of tensors alone, as torch.export requires. The model is in it for its weights."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.model = call.lm.model
        self._call = call

    def forward(self, tensors: list[Tensor], stores: list[Tensor]) -> tuple[Tensor, ...]:
        return self._call.on(tensors, stores)


def check_constants(constants: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Check that no constant of the trace shares memory with a weight. Constants (neither parameter nor buffer) are
    stored with the program, with their values.

    Raises:
        TypeError
    """
    bare = {weight.untyped_storage().data_ptr() for weight in weights.values() if weight.numel() > MAX_INLINED}
    for name, value in constants.items():
        if name not in weights and type(value) in (Tensor, nn.Parameter) and value.untyped_storage().data_ptr() in bare:
            raise TypeError(f"the tensor {name} shares memory with a weight, and is neither parameter nor buffer")


def _kernel_options(num_threads: int) -> dict[str, Any]:
    from outrider.kernels.attention import ATTENTION, ATTENTION_SHIM
    from outrider.kernels.inductor_pass import KERNEL, MAX_SUMS, WIDEN, FewRowMatmulPass
    from outrider.kernels.library import SHIM, WIDEN_SHIM, library

    has_kernel = library() is not None
    return {
        "post_grad_custom_pre_pass": FewRowMatmulPass(num_threads if has_kernel else None),
        "cpp.max_horizontal_fusion_size": MAX_SUMS,
        "cpp.min_chunk_size": max(1, _FEW_NUMBERS // num_threads),
        "aot_inductor.custom_ops_to_c_shims": {KERNEL: [SHIM], WIDEN: [WIDEN_SHIM], ATTENTION: [ATTENTION_SHIM]},
    }


def _set_attention(lm: Any, num_threads: int) -> None:
    """Use our attention kernel in place of torch's sdpa, for its types. Other attention is decomposed, and fused into
    the surrounding loops."""
    from outrider.kernels.attention import KEY_DTYPES, register
    from outrider.kernels.library import library

    has_kernel = lm.model.config._attn_implementation == "sdpa" and lm.dtype in KEY_DTYPES and library() is not None
    lm.model.set_attn_implementation(register(num_threads) if has_kernel else "eager")


def _digest(exported: torch.export.ExportedProgram, constants: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of all that the compiled code depends on."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    from outrider.kernels import blocks, narrow_weight

    # In the exported graph, weights that stay in their stored type are tensors of a class that Inductor takes apart.
    digest = hashlib.sha256(get_hash_for_files((narrow_weight.__file__, blocks.__file__)))
    settings = {name: getattr(value, "uuid", lambda value=value: value)() for name, value in options.items()}
    digest.update(repr((torch.__version__, processor(), compiler(), settings)).encode())
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                value = node.meta.get("val")
                kind = _kind(value) if isinstance(value, Tensor) else value
                digest.update(repr((node.name, node.op, str(node.target), node.args, node.kwargs, kind)).encode())
    digest.update(repr(exported.graph_signature).encode())
    # Inductor inlines the values of very small tensors, and treats tensors that share memory as one.
    first_names: dict[Any, str] = {}
    for name, value in constants.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            numbers = value.tolist() if value.numel() <= MAX_INLINED else None
            digest.update(repr((name, first_names.setdefault(place, name), numbers, _kind(value))).encode())
    return digest.hexdigest()


def _kind(value: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its numbers: of a weight that stays in its stored type, its form too."""
    kind = value.shape, value.stride(), value.dtype, value.device
    if not is_traceable_wrapper_subclass(value):
        return kind
    names, form = value.__tensor_flatten__()
    return *kind, type(value).__name__, repr(form), [(name, _kind(getattr(value, name))) for name in names]


def _trace(module: nn.Module, *inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    with _as_torch_compiles():
        return torch.export.export(module, tuple(list(tensors) for tensors in inputs), strict=False)


def _compile(exported: torch.export.ExportedProgram, options: dict[str, Any], path: Path) -> None:
    with _as_torch_compiles():
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


@contextmanager
def _as_torch_compiles() -> Iterator[None]:
    """No gradients, and none of torch's warnings about itself."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _num_threads(model: nn.Module) -> int:
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(max(1, min(torch.get_num_threads(), num_bytes // _BYTES_PER_THREAD)))
