"""Scripts outside of the package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, _ROOT / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module
