"""Check wheels and sdists: every file that they should hold, none else, and the version of the tag.

python .ci/check_dist.py FOLDER [TAG]

Run in a clone: the files are those that git tracks. A wheel for one machine holds the kernels for all its processors.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from outrider.kernels.build import BASELINE, LEVELS, installed_path  # noqa: E402

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
    """Compare a wheel with the package, its kernels, its licence and its metadata."""
    found = set(zipfile.ZipFile(path).namelist())
    name, _, platform = path.stem.partition("-py3-none-")
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    expected = {f"{name}.dist-info/{one}" for one in about}
    expected |= {one.removeprefix("src/") for one in files if one.startswith("src/")}
    if platform != "any":
        (levels,) = (LEVELS[one] for one in LEVELS if platform.replace("arm64", "aarch64").endswith(one))
        paths = map(installed_path, (*levels, BASELINE))
        expected |= {path.relative_to(ROOT / "src").as_posix() for path in paths}
    return differences(found, expected)


def sdist_differences(path: Path, files: set[str]) -> list[str]:
    """Compare an sdist with the repository: tests, pages and scripts are in it."""
    top = path.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(path) as archive:
        found = {member.name.removeprefix(top) for member in archive if member.isfile()}
    return differences(found, {"PKG-INFO"} | {name for name in files if not name.startswith(NOT_IN_SDIST)})


def main() -> None:
    folder = Path(sys.argv[1])
    files, wrong = tracked(), []
    paths = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    assert paths, f"nothing is in {folder}"
    for path in paths:
        check = wheel_differences if path.suffix == ".whl" else sdist_differences
        wrong += [f"{path.name}: {line}" for line in check(path, files)]
        version = path.name.removesuffix(".tar.gz").split("-")[1]
        if sys.argv[2:] and sys.argv[2] != f"v{version}":
            wrong.append(f"the tag {sys.argv[2]} is not that of version {version}, {path.name}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
