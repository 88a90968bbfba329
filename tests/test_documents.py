"""The golden examples of documents, and how documents are held against them."""

import copy
from typing import Any

import pytest

from documents import check, examples
from outrider.cli.shared.output import title_of


@pytest.mark.parametrize("name", examples())
def test_examples_are_of_the_current_version(name: str) -> None:
    titles = {one["schema"] for one in examples()[name] if "schema" in one}
    assert titles <= {title_of(name)}


@pytest.mark.parametrize("place", [(), ("options",), ("completions", 0), ("completions", 0, "stats")])
def test_a_key_too_many_or_too_few_is_found(place: tuple[Any, ...]) -> None:
    document = copy.deepcopy(examples()["generate"][0])
    inner: Any = document
    for part in place:
        inner = inner[part]
    check(document, "generate")
    key = next(iter(inner))
    kept, inner[key] = inner[key], {"another": "type"}
    with pytest.raises(AssertionError, match=key):
        check(document, "generate")
    inner[key] = kept
    inner["unknown"] = 1
    with pytest.raises(AssertionError, match="unknown"):
        check(document, "generate")
    del inner["unknown"]
    key = next(iter(set.intersection(*(set(one) for one in _alike(place)))))
    del inner[key]
    with pytest.raises(AssertionError, match=key):
        check(document, "generate")


def _alike(place: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Objects at this place of the examples."""
    found: list[Any] = list(examples()["generate"])
    for part in place:
        found = [item for one in found for item in (one or [])] if part == 0 else [one[part] for one in found]
    return [one for one in found if one is not None]
