"""What all tests share: one thread, and property tests that draw the same examples every time."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs and compiled programs are kept away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
