"""Damaged numbers in the files of models: does each file load and generate, or end in one line that is meant for users?

    python benchmarks/fuzz_files.py [--minutes 10] [--seed 0] [--workers 2] [--sanitized] [--only WORDS]

Every number in the keys of every file of gguf_models.py and gguf_heads.py in tests/support, and in the configuration of
every case of native_cases.py, at 0, -1, 1, 3, 2^31 - 1, 2^32 - 1, NaN and infinity; after that, two numbers at
random. Each case is a child process with a limit of memory and of processor time. It is forked from a process that has
imported everything and run nothing in parallel, so a case takes a fraction of a second. The child loads the file,
generates a few tokens, and does so again with a draft: the head, or a look-up.

A finding is a signal, an exception that is none of Outrider's or takes more than a line, memory beyond the limit unless
a DeviceError tells so, or a case that does not end. With ``--sanitized`` the C++ library is compiled with the
sanitizers of addresses and of undefined behaviour, which takes some minutes once. ``--only`` runs the cases of one
change whose description has these words, and shows each outcome. The last line of standard output is one JSON document;
the exit code is 1 after a finding.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before PyTorch is imported: no threads, for which a forked process would wait for ever
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if "--sanitized" in sys.argv and "ASAN_OPTIONS" not in os.environ:
        command = ("g++", "-print-file-name=libasan.so", "-print-file-name=libubsan.so")
        os.environ |= {
            "CXX": "g++ -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined",
            "LD_PRELOAD": subprocess.check_output(command, text=True).replace("\n", " "),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
        }
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ.pop("LD_PRELOAD", None)  # which would slow the compiler

import gguf
import torch
import transformers

import outrider
from outrider.errors import DeviceError, OutriderError
from outrider.kernels import library as kernel_library

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import gguf_heads
import gguf_models
import native_cases
from pairs import word_tokenizer

_VALUES = (0, -1, 1, 3, 2**31 - 1, 2**32 - 1, math.nan, math.inf)
_MOST_BYTES = 4 * 2**30  # beside those of the parent
_MOST_CPU_S, _MOST_S = 30, 300  # of a case
_OF_MEMORY = ("allocate", "enough memory", "MemoryError", "bad_alloc")
_TELLING = ("ERROR: AddressSanitizer", "runtime error", "terminate called", "free()", "malloc", "corrupt")
_PROMPTS = [[5, 6, 5, 6]]  # ids, since a tokenizer by the name of a family may not read the words of the tests
_Place = tuple[str | int, ...]  # of a number in a document


@dataclass(frozen=True)
class Subject:
    """Files whose numbers are changed.

    Attributes:
        name: the family of the model, and what is unusual about the model.
        document: what states the numbers.
        write: writes a changed document to a folder, and returns the names of target and draft.
    """

    name: str
    document: dict[str, Any]
    write: Callable[[dict[str, Any], Path], tuple[str, str]]

    @property
    def family(self) -> str:
        return self.name.split(",")[0]


@dataclass(frozen=True)
class Case:
    subject: Subject
    changes: tuple[tuple[_Place, Any], ...]

    def __str__(self) -> str:
        changes = (f"{'.'.join(map(str, place))} = {value}" for place, value in self.changes)
        return f"{self.subject.name}: {', '.join(changes)}"

    @property
    def document(self) -> dict[str, Any]:
        changed = copy.deepcopy(self.subject.document)
        for (*before, last), value in self.changes:
            at: Any = changed
            for part in before:
                at = at[part]
            at[last] = value
        return changed


def _places(document: Any, at: _Place = ()) -> Iterator[_Place]:
    """Places of numbers, and of lists with numbers, of which the first entry is changed, or the whole list."""
    for key, value in document.items() if isinstance(document, dict) else [*enumerate(document)][:1]:
        if isinstance(value, int | float):
            yield (*at, key)
        elif isinstance(value, dict | list):
            inner = [*_places(value, (*at, key))]
            yield from (*inner, (*at, key)) if isinstance(value, list) and inner else inner


# Files


def _gguf_subject(name: str, file: Path, others: tuple[str, str]) -> Subject:
    """
    Args:
        others: names of target and draft; one of them is empty: that of the file.
    """
    reader = gguf.GGUFReader(file)
    fields = {key: one for key, one in reader.fields.items() if not key.startswith("GGUF.")}
    document = {key: one.contents() for key, one in fields.items() if len(one.data) < 40}  # no vocabulary

    def write(changed: dict[str, Any], folder: Path) -> tuple[str, str]:
        path = folder / "changed.gguf"
        writer = gguf.GGUFWriter(path, document["general.architecture"])
        for key in dict.fromkeys((*fields, *changed)):
            if key == "general.architecture":
                continue
            value = changed[key] if key in changed else fields[key].contents()
            types = fields[key].types if key in fields and value == document.get(key, value) else _types(value)
            writer.add_key_value(key, value, *types)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        target, draft = (one or str(path) for one in others)
        return target, draft

    return Subject(f"GGUF {name}", document, write)


def _types(value: Any) -> list[Any]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        large = (one for one in value if not 0 <= one < 2**31)
        return [kinds.ARRAY, *_types(next(chain((one for one in value if isinstance(one, float)), large), value[0]))]
    if isinstance(value, bool | str | float):
        return [{bool: kinds.BOOL, str: kinds.STRING, float: kinds.FLOAT32}[type(value)]]
    return [kinds.INT32 if -(2**31) <= value < 0 else kinds.UINT32 if 0 <= value < 2**32 else kinds.INT64]


def _gguf_subjects(root: Path) -> Iterator[Subject]:
    for number, (name, case) in enumerate(gguf_models.CASES.items()):
        file = gguf_models.write_case(root / f"{number}.gguf", case)
        yield _gguf_subject(name, file, ("", "ngram"))
    for kind in ("llama", "qwen3moe", "qwen35"):
        file = gguf_models.write_in_blocks(root / f"{kind}.gguf", kind, lambda _: "Q4_K")
        yield _gguf_subject(f"{kind}, in blocks", file, ("", "ngram"))
    for name in gguf_heads.MTP:
        (root / name).mkdir()
        yield _gguf_subject(name, gguf_heads.write_mtp_case(name, root / name), ("", "mtp"))
    for name in (*gguf_heads.HEADS, gguf_heads.ASSISTANT):
        folder = root / name
        folder.mkdir()
        is_assistant = name == gguf_heads.ASSISTANT
        write: Any = gguf_heads.write_assistant_pair if is_assistant else partial(gguf_heads.write_pair, name)
        target, head, *_ = write(folder)
        yield _gguf_subject(f"head {name}", head, (str(target), ""))
        yield _folder_subject(f"head {name}", folder / "head", str(target))


def _folder_subject(name: str, source: Path, target: str) -> Subject:
    """
    Args:
        target: of a head; empty for a model.
    """

    def write(changed: dict[str, Any], folder: Path) -> tuple[str, str]:
        folder = folder / "changed"
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(changed))
        return (target, str(folder)) if target else (str(folder), "ngram")

    return Subject(f"folder {name}", json.loads((source / "config.json").read_text()), write)


def _folder_subjects(root: Path) -> Iterator[Subject]:
    for number, (family, name) in enumerate(native_cases.ALL):
        source = root / str(number)
        native_cases.random_model(family, native_cases.CASES[family][name]).save_pretrained(source)
        word_tokenizer(native_cases.VOCAB).save_pretrained(source)
        yield _folder_subject(f"{family}, {name}", source, "")


# Children


def _outcome(case: Case, folder: Path) -> str:
    """What becomes of a case: "generates", or an error."""
    target, draft = case.subject.write(case.document, folder)
    try:
        for drafter in (None, draft):
            decoder = outrider.load(target, drafter, device="cpu", num_draft_tokens=3)
            decoder.generate(_PROMPTS, max_new_tokens=4, temperature=0.0)
    except OutriderError as error:
        line = f"{type(error).__name__}: {error}"
        tells = isinstance(error, DeviceError) or not any(one in line for one in _OF_MEMORY)
        if len(line.splitlines()) == 1 and tells:
            return line
        raise
    return "generates"


def _finding(error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/outrider/" in one.filename]
    at = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "no file"
    return f"FINDING {type(error).__name__} in {at}: {' '.join(str(error).split())}"


def _run_child(case: Case, folder: Path, pipe: int) -> None:
    """Run a case, and tell what becomes of it."""
    for stream in (1, 2):
        os.dup2(os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "ASAN_OPTIONS" not in os.environ:  # whose memory is mostly reserved, and which has a limit of its own
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + _MOST_BYTES, own + _MOST_BYTES))
    try:
        outcome = _outcome(case, folder)
    except BaseException as error:
        outcome = _finding(error)
    os.write(pipe, outcome.encode()[:4000])


class Child:
    """A process that runs a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.begin_s = case, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.pipe, pipe = os.pipe()
        self._id = os.fork()
        if self._id == 0:
            try:
                _run_child(case, self._folder, pipe)
            finally:
                os._exit(0)
        os.close(pipe)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.begin_s > _MOST_S

    def end(self) -> str:
        """The outcome of a case that has ended, or is late."""
        is_late = self.is_late
        if is_late:
            os.kill(self._id, signal.SIGKILL)
        with open(self.pipe, "rb") as pipe:
            outcome = pipe.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(os.waitpid(self._id, 0)[1])
        if is_late:
            outcome = f"FINDING no end in {_MOST_S} s"
        elif not outcome:
            lines = (self._folder / "log").read_text(errors="replace").splitlines()
            told = next((line for line in lines if any(word in line for word in _TELLING)), *lines[-1:] or [""])
            outcome = f"FINDING {signal.Signals(-code).name if code < 0 else f'exit code {code}'}: {told[:300]}"
        shutil.rmtree(self._folder)
        return outcome


# Cases


def _single_changes(subjects: list[Subject], drawn: random.Random) -> list[Case]:
    """Each number of each family at each value, in one of the models of the family that have the number."""
    owners = defaultdict[tuple[str, _Place], list[Subject]](list)
    for one in subjects:
        for place in _places(one.document):
            owners[one.family, place].append(one)
    cases = [Case(drawn.choice(own), ((place, value),)) for (_, place), own in owners.items() for value in _VALUES]
    drawn.shuffle(cases)  # so that the first minutes see all families
    return cases


def _double_changes(subjects: list[Subject], drawn: random.Random) -> Iterator[Case]:
    """At random, also of numbers that only other models state."""
    while True:
        one, other = drawn.choice(subjects), drawn.choice(subjects)
        places = {*_places(one.document), *(place for place in _places(other.document) if len(place) == 1)}
        values = (*_VALUES, 2, 5, drawn.randrange(200), drawn.randrange(2**40), -drawn.random())
        chosen = drawn.sample(sorted(places, key=str), 2)
        changes = [(place, drawn.choice(values)) for place in sorted(chosen, key=len, reverse=True)]
        yield Case(one, tuple(changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--only")
    options = parser.parse_args()
    if options.sanitized:
        kernel_library._installed = lambda level: None  # compiled without
    assert kernel_library.library() is not None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    root = Path(tempfile.mkdtemp(prefix="fuzz-subjects-"))
    with torch.inference_mode():
        subjects = [*_gguf_subjects(root), *_folder_subjects(root)]
    drawn = random.Random(options.seed)
    grid = [one for one in _single_changes(subjects, drawn) if options.only is None or options.only in str(one)]
    print(f"{len(subjects)} models, {len(grid)} cases of one change", flush=True)
    more = () if options.only else _double_changes(subjects, drawn)
    cases, begin_s, told = chain(grid, more), time.monotonic(), 0
    outcomes, families, findings = Counter[str](), set[str](), defaultdict[str, list[str]](list)
    running: list[Child] = []
    while True:
        while len(running) < options.workers and time.monotonic() - begin_s < 60 * options.minutes:
            if (case := next(cases, None)) is None:
                break
            running.append(Child(case))
        if not running:
            break
        ended = select.select([one.pipe for one in running], [], [], 1.0)[0]
        for child in [one for one in running if one.pipe in ended or one.is_late]:
            outcome, name = child.end(), child.case.subject.family
            running.remove(child)
            kind, _, rest = outcome.partition(": ")
            outcomes[kind.split()[0]] += 1
            families.add(name)
            if kind.startswith("FINDING"):
                findings[kind].append(f"{child.case}: {rest}")
            if options.only or len(findings[kind]) == 1:
                print(f"{child.case}: {outcome}", flush=True)
        took_s = time.monotonic() - begin_s
        if took_s // 30 > told:
            told = took_s // 30
            print(f"{took_s:.0f} s, {outcomes.total()} of {len(grid)}: {dict(outcomes)}", flush=True)
    shutil.rmtree(root)
    found = {kind: {"number": len(many), "examples": many[:5]} for kind, many in findings.items() if many}
    num_cases = outcomes.total()
    result = {
        "num_cases": num_cases,
        "num_cases_of_one_change": len(grid),
        "cases_per_hour": round(3600 * num_cases / took_s),
        "seconds": round(took_s),
        "outcomes": dict(outcomes),
        "families": sorted(families),
        "num_families": len(families),
        "findings": found,
        "options": vars(options),
    }
    print(json.dumps(result))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
