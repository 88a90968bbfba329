"""Compiles the C++ kernels when the package is installed from its source, if there is a compiler, or a wheel is built.

OUTRIDER_KERNELS=none leaves them out: then they are compiled when first needed. OUTRIDER_KERNELS=all puts libraries for
all processors of the compiler's machine into a wheel, whose tag says on which systems they run.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The oldest systems on which PyTorch's own wheels run: their glibc, and the last symbols of their GCC's C++ library.
_GLIBC, _GLIBCXX = 28, 25


class KernelsHook(BuildHookInterface):
    """Hook of Hatchling."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the library, or libraries, to the wheel."""
        wanted = os.environ.get("OUTRIDER_KERNELS", "")
        if wanted not in ("", "none", "all"):
            self.app.abort(f"OUTRIDER_KERNELS is {wanted!r}: set none, or all, or unset it for this processor alone")
        if wanted == "none":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from outrider.kernels import build

        if wanted == "all" and version != "editable":
            self._folder = TemporaryDirectory()  # until the wheel is made
            try:
                libraries, platform = _compile_all(Path(self._folder.name))
            except build.CompilerError as error:
                self.app.abort(str(error))
            within = build.INSTALLED.relative_to(Path(self.root) / "src")
            build_data["force_include"].update({str(path): str(within / path.name) for path in libraries})
        else:
            try:
                path = build.install()
            except (build.CompilerError, ImportError, OSError) as error:  # ImportError: of PyTorch (build.py)
                self.app.display_warning(f"the C++ kernels are not compiled now, but when first needed: {error}")
                return
            build_data["artifacts"].append(f"/{path.relative_to(self.root).as_posix()}")
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def _compile_all(folder: Path) -> tuple[list[Path], str]:
    """Libraries for all levels of the compiler's machine, and the platform on which they run, as wheels name it."""
    from outrider.kernels import build

    command = build.compiler()
    machine = build.machine(command)
    libraries = []
    for level in (*build.LEVELS[machine], build.BASELINE):
        libraries.append(folder / build.installed_path(level).name)
        build.build(command, level, libraries[-1])
    oldest = re.search(r"MAC_OS_X_VERSION_MIN_REQUIRED__ (\d+)", build.macros(command, build.BASELINE))
    if oldest is not None:
        return libraries, f"macosx_{int(oldest[1]) // 10000}_0_{machine.replace('aarch64', 'arm64')}"
    if _newest(libraries, "GLIBCXX_3.4") > _GLIBCXX:
        raise build.CompilerError(
            f"{command[0]} needs GLIBCXX_3.4.{_newest(libraries, 'GLIBCXX_3.4')}, and a wheel may need 3.4.{_GLIBCXX}: "
            "set CXX to an older GCC, such as 12"
        )
    return libraries, f"manylinux_2_{max(_GLIBC, _newest(libraries, 'GLIBC_2'))}_{machine}"


def _newest(libraries: Sequence[Path], version: str) -> int:
    """Last part of the newest version of the symbols that these libraries need."""
    pattern = re.compile(rb"\0%s\.(\d+)" % re.escape(version.encode()))
    return max(int(last) for path in libraries for last in pattern.findall(path.read_bytes()) or [0])
