"""Compiles the C++ kernels when the package is installed from its source, if there is a compiler.

OUTRIDER_KERNELS=none leaves them out, so that one wheel fits all machines: then they are compiled when first needed.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Hook of Hatchling."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the library to the wheel."""
        if os.environ.get("OUTRIDER_KERNELS") == "none":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from outrider.kernels import build

        try:
            path = build.install()
        except (build.CompilerError, ImportError, OSError) as error:  # ImportError: of PyTorch (build.py)
            self.app.display_warning(f"the C++ kernels are not compiled now, but when first needed: {error}")
            return
        build_data["artifacts"].append(f"/{path.relative_to(self.root).as_posix()}")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
