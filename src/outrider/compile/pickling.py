"""Pickling of calls without weights: bytes for the compile process, and keys of the compiled programs.

A call is packed with the model as it is in memory (modules and configuration), and shapes of weights instead of values.
So no model is read and no weight is stored a second time. Values of very small tensors are packed too, since Inductor
inlines them.

Code is not packed: the other process imports the same. So ``key_of`` covers the source of all traced code and of
what compiles it, and ``code_of`` shows whether the classes in this process still match their files.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.kernels.toolchain import compiler, processor
from outrider.runtime.execution import Call, put_together
from outrider.runtime.tensor_parts import stored_tensors

MAX_INLINED = 64
"""Numbers; far more than the largest tensor that Inductor inlines."""

_UNUSED = ("generation_config", "hf_quantizer")  # parts of a model that no forward reads
_RECORDING = "transformers.utils.output_capturing"  # hooks that are idle in steps
# Our packages with traced code, and with what compiles it.
_HASHED = ("runtime", "sampling", "drafters", "decoding", "kernels", "compile")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in programs. Quantized ones are flattened into several tensors, under the
    names that Inductor gives to the parts."""
    found: dict[str, Tensor] = {}
    for name, tensor in (
        *model.named_parameters("model", remove_duplicate=False),
        *model.named_buffers("model", remove_duplicate=False),
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


def pack(call: Call) -> bytes:
    """Pickle a call: the same bytes in every process.

    Raises:
        Exception: of any kind, if part of the model cannot be pickled.
    """
    # Values of arguments do not matter, and arguments may be views of more than the step sees.
    examples = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in call.tensors]
    arguments = put_together(call.arguments, iter(examples), iter(call.stores))
    with call.lm.lock:  # hooks change the model while it runs
        weights = weights_of(call.lm.model)
        values = {name: weight.tolist() for name, weight in weights.items() if weight.numel() <= MAX_INLINED}
        buffer = io.BytesIO()
        packer = _Packer(buffer, call.lm.model, [*weights.values(), *examples])
        made_of = call.lm.from_parts, call.lm.parts
        packer.dump((torch.get_default_dtype(), call.step, *made_of, call.static, arguments, values))
    return buffer.getvalue()


def unpack(data: bytes) -> Call:
    """Unpickle a call. Its tensors take no memory until they are written to. torch's default dtype becomes the one at
    packing, since traced code may depend on it."""
    default_dtype, step, make_lm, parts, static, arguments, values = _Unpacker(io.BytesIO(data)).load()
    torch.set_default_dtype(default_dtype)
    call = Call(step, make_lm(*parts), static, arguments)
    weights = weights_of(call.lm.model)
    with torch.no_grad():
        for name, value in values.items():
            weights[name].copy_(torch.tensor(value, dtype=weights[name].dtype))
    return call


def key_of(model: nn.Module, packed: bytes, num_threads: int) -> str:
    """Hash of all that the program of a call depends on."""
    machine = platform.python_version(), processor(), compiler(), num_threads
    libraries = torch.__version__, transformers.__version__, _our_source()
    facts = repr((machine, libraries, code_of(model))).encode()
    return hashlib.sha256(hashlib.sha256(packed).digest() + facts).hexdigest()


def code_of(model: nn.Module) -> str:
    """Hash of the code of a model's modules, and of the functions that it calls by name: both in their files and in
    memory."""
    modules = list(model.modules())
    kinds = {type(module) for module in modules}
    words = {repr((kind.__module__, kind.__qualname__, *map(_name, _functions(kind.forward)))) for kind in kinds}
    paths = {inspect.getfile(kind) for kind in kinds}
    found: set[FunctionType] = set()
    new = {function for kind in kinds for function in _functions(kind.forward)}
    # Not the local functions that hooks install while a model runs: they are not packed.
    own = {function for module in modules for function in _functions(vars(module).get("forward"))}
    new |= {function for function in own if "<locals>" not in function.__code__.co_qualname}
    while new:
        function = new.pop()
        found.add(function)
        called = _called_by(function)
        code = [*_words(function.__code__)]
        words.add(repr((_name(function), code, [(name, _name(one)) for name, one in called])))
        paths.add(function.__code__.co_filename)
        new |= {one for _, one in called} - found
    digest = hashlib.sha256(repr(sorted(words)).encode())
    for path in sorted(paths):
        if (file := Path(path)).is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _functions(value: Any) -> list[FunctionType]:
    """A function and those that it wraps."""
    found = []
    while value is not None:
        value = getattr(value, "__func__", getattr(value, "func", value))
        if isinstance(value, FunctionType):
            found.append(value)
        value = getattr(value, "__wrapped__", None)
    return found


def _name(function: FunctionType) -> str:
    return f"{function.__globals__.get('__name__')}.{function.__code__.co_qualname}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _words(code: CodeType) -> Iterator[Any]:
    for one in _codes(code):
        values = [value for value in one.co_consts if not isinstance(value, CodeType)]
        # The order of a set differs between processes.
        yield one.co_code, one.co_names, [sorted(map(repr, v)) if isinstance(v, frozenset) else repr(v) for v in values]


def _called_by(function: FunctionType) -> list[tuple[str, FunctionType]]:
    """Functions that a function may call by a name of its module, or of another module that it names; without those of
    torch and Python, which are covered by their versions."""
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    values = [function.__globals__.get(name) for name in names]
    spaces = [function.__globals__, *(vars(value) for value in values if isinstance(value, ModuleType))]
    named = [(name, value) for space in spaces for name in names if isinstance(value := space.get(name), FunctionType)]
    called = [(name, one) for name, value in named for one in _functions(value)]
    return [(name, one) for name, one in called if not _is_of_library(one)]


def _is_of_library(function: FunctionType) -> bool:
    package = str(function.__globals__.get("__name__")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


@lru_cache
def _our_source() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256((root / "records.py").read_bytes())
    for path in sorted(path for name in _HASHED for path in (root / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Packer(pickle.Pickler):
    """Pickles without the values of weights.

    Args:
        bare: tensors whose values are left out.
    """

    def __init__(self, buffer: io.BytesIO, model: nn.Module, bare: Sequence[Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._unused = [id(value) for name in _UNUSED if (value := getattr(model, name, None)) is not None]
        self._bare = {tensor.untyped_storage().data_ptr() for tensor in bare}
        self._numbers: dict[int, int] = {}  # of storages, in order of appearance

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):  # float8 and newer types; torch.load gives bytes
            value = torch.storage.TypedStorage(wrap_storage=value, dtype=torch.uint8, _internal=True)
        if isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage
            place = storage.data_ptr()
            number = self._numbers.setdefault(place, len(self._numbers))
            content = None if place in self._bare else bytes(storage.tolist())
            return "storage", number, value.dtype, storage.nbytes(), content
        if type(value) in (set, frozenset):  # whose order differs between processes
            return "set", type(value), sorted(value, key=repr)
        return ("unused",) if id(value) in self._unused else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType) and isinstance(value.__func__, partial):  # torchao describes modules so
            return _bound, (value.__func__, value.__self__)
        if isinstance(value, FunctionType) and value.__module__ == _RECORDING and "<locals>" in value.__qualname__:
            return _of_no_effect, ()
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, identity: Any) -> Any:
        match identity:
            case "storage", number, dtype, num_bytes, content:
                if number not in self._storages:
                    storage = torch.UntypedStorage(num_bytes if content is None else list(content))
                    self._storages[number] = storage
                return torch.storage.TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)
            case "set", kind, items:
                return kind(items)
            case _:
                return None


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


def _of_no_effect() -> Any:
    return _record_nothing


def _record_nothing(*_: Any) -> None:
    """A hook in place of those that Transformers leaves in a model once it was asked for hidden states."""
