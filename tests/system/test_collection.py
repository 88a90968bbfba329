"""Garbage is not collected for a while, and then as before."""

import gc
from typing import Any

import pytest

import outrider
from outrider.models.loading import Checkpoint, load_checkpoint
from outrider.system.collection import gc_paused


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_as_it_was_afterwards(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        with pytest.raises(ValueError), gc_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_models_are_loaded_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def noting(*arguments: Any, **options: Any) -> Checkpoint:
        states.append(gc.isenabled())
        return load_checkpoint(*arguments, **options)

    monkeypatch.setattr("outrider.api.load_checkpoint", noting)
    outrider.load("fable", "fable-draft")
    assert states == [False, False]
    assert gc.isenabled()
