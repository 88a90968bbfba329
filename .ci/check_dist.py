"""Check a wheel and an sdist: every file that they should hold, none else, and the version of the tag.

python .ci/check_dist.py FOLDER [TAG]

Run in a clone: the files are those that git tracks.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_IN_SDIST = (".github/", ".pre-commit-config.yaml", ".gitattributes")


def tracked() -> set[str]:
    """Every file of the commit that is checked out."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\0")) - {""}


def differences(found: set[str], expected: set[str]) -> list[str]:
    """A line for each file that is missing or should not be there."""
    missing, surplus = sorted(expected - found), sorted(found - expected)
    return [f"missing: {name}" for name in missing] + [f"not expected: {name}" for name in surplus]


def wheel_differences(path: Path, files: set[str]) -> list[str]:
    """Compare a wheel with the package, its licence and its metadata."""
    found = set(zipfile.ZipFile(path).namelist())
    about = path.name.removesuffix("-py3-none-any.whl") + ".dist-info/"
    metadata = {about + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    return differences(found, metadata | {n.removeprefix("src/") for n in files if n.startswith("src/")})


def sdist_differences(path: Path, files: set[str]) -> list[str]:
    """Compare an sdist with the repository: tests, pages and scripts are in it."""
    top = path.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(path) as archive:
        found = {member.name.removeprefix(top) for member in archive if member.isfile()}
    return differences(found, {"PKG-INFO"} | {name for name in files if not name.startswith(NOT_IN_SDIST)})


def main() -> None:
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    files = tracked()
    wrong = [f"{wheel.name}: {line}" for line in wheel_differences(wheel, files)]
    wrong += [f"{sdist.name}: {line}" for line in sdist_differences(sdist, files)]
    version = wheel.name.split("-")[1]
    if sys.argv[2:] and sys.argv[2] != f"v{version}":
        wrong.append(f"the tag {sys.argv[2]} is not that of version {version}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
