"""Garbage is not collected for a while, and then as before."""

import gc

import pytest

from outrider.system.collection import uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_as_it_was_afterwards(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        with pytest.raises(ValueError), uncollected():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
