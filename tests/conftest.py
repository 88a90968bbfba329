"""What all tests share: property tests that draw the same examples every time; one thread, since there is a worker for
each core (OMP_NUM_THREADS asks for more); and the executions with which tests marked ``each_execution`` run."""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from outrider.runtime.lm import LM


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that "auto" is the CPU everywhere
    if config.getoption("numprocesses") and not hasattr(config, "workerinput"):
        return  # it hands out tests; the workers start when it is ready, so that nothing is imported here
    gc.disable()  # until all tests are found: modules, which stay
    import torch
    from hypothesis import HealthCheck, settings

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    of_load = [HealthCheck.too_slow]
    settings.register_profile("fixed", derandomize=True, deadline=None, database=None, suppress_health_check=of_load)
    settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executions", default="eager", help="of eager,captured")
    parser.addoption("--schedules", type=int, default=1, help="of each model, in tests/decoding/test_joining.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("each_execution"):
        names = metafunc.config.getoption("--executions").split(",")
        metafunc.parametrize("_execution", names, indirect=True, scope="module")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _execution(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the steps of the toys are run. What a session shares, the garbage collector need not go through."""
    import toys

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "execution", toys.EXECUTIONS[getattr(request, "param", "eager")])
        yield


@pytest.fixture(autouse=True, scope="session")
def _probed_once() -> Iterator[None]:
    """Most of the time of a test that generates a few tokens goes to the probe: once for a configuration and types."""
    from outrider.models import executions
    from outrider.models.probe import probe

    found: dict[object, tuple[int, bool]] = {}

    def once(lm: "LM") -> None:
        config = {name: value for name, value in lm.model.config.to_dict().items() if name != "_name_or_path"}
        stored = frozenset((type(weight), weight.dtype) for weight in lm.model.parameters())
        form = type(lm.model), type(lm.backend), lm.model.config._attn_implementation, stored
        key = *form, repr(config), lm.dtype, lm.vocab_size, lm.context_len
        if key not in found:
            probe(lm)
            found[key] = lm.least_columns, lm.is_stepped
        lm.least_columns, lm.is_stepped = found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executions, "probe", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _costs_are_given() -> Iterator[None]:
    """To measure the costs of rounds takes seconds."""
    import toys
    from outrider.distill import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "measure_round_costs", toys.given_costs)
        yield


@pytest.fixture
def each_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users."""
    from outrider.models.probe import probe

    monkeypatch.setattr("outrider.models.executions.probe", probe)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels are kept away from the user's. The workers of a run share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own in it
    folder = folder / "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        from outrider.kernels.library import library

        assert not library.cache_info().currsize, "a module of tests runs a model when imported, with the user's cache"
        library()  # compiled now, so that no test shows the line about it
        yield
