"""What all tests share: threads, property tests that draw the same examples every time, and executions.

No verdict may depend on the processor, the number of threads or the load. One thread is the default, since there is a
worker for each core; OMP_NUM_THREADS asks for more.

The tests of the core (marked ``each_execution``) run with every execution of ``--executions``. Compiling takes so long
that it is not among them unless asked for:

    pytest -m each_execution --executions compiled
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import toys
from outrider.models import loading
from outrider.models.probe import probe
from outrider.runtime.lm import LM

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # which is of the load
)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that "auto" is the CPU everywhere


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write the pictures of the documentation there")
    parser.addoption("--executions", default="eager,captured", help=f"of {','.join(toys.EXECUTIONS)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "each_execution" in marks and "eager_only" not in marks:
        names = metafunc.config.getoption("--executions").split(",")
        metafunc.parametrize("_execution", names, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def _execution(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the steps of the toys are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "execution", toys.EXECUTIONS[getattr(request, "param", "eager")])
        yield


@pytest.fixture(autouse=True, scope="session")
def _probed_once() -> Iterator[None]:
    """The embedded models are probed when they are first loaded in each type, and not again: that takes most of the
    time of a command that generates a few tokens. (All other models are, each time.)"""
    done: set[object] = set()

    def once(lm: LM, kind: str) -> None:
        key = lm.name, lm.dtype, lm.vocab_size, lm.context_len, lm.model.config._attn_implementation
        if lm.name not in ("fable", "fable-draft") or key not in done:
            probe(lm, kind)
        done.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "probe", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and compiled programs are kept away from the user's. The workers of a run share them: to compile a
    program takes ten seconds, to find it one. (Files appear there whole, whoever is the first to write them.)"""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own in it
    folder = folder / "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        # The compiler spends half of its time on the code that calls the kernels. It gives the same whatever the
        # effort; the kernels are made as for everybody.
        patch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
        yield
