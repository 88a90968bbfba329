"""What all tests share: one thread, property tests that draw the same examples every time, and executions.

The tests of the core (marked ``each_execution``) run with every execution of ``--executions``. Compiling takes so long
that it is not among them unless asked for:

    pytest -m each_execution --executions compiled
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import toys

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that "auto" is the CPU everywhere


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executions", default="eager,captured", help=f"of {','.join(toys.EXECUTIONS)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("each_execution"):
        names = metafunc.config.getoption("--executions").split(",")
        metafunc.parametrize("_execution", names, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def _execution(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the steps of the toys are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "execution", toys.EXECUTIONS[getattr(request, "param", "eager")])
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and compiled programs are kept away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
