"""The golden examples of documents, and how documents are held against them."""

import copy
from typing import Any

import pytest

from documents import check, examples
from outrider.cli.shared.output import title_of


@pytest.mark.parametrize("name", examples())
def test_examples_are_of_the_current_version(name: str) -> None:
    assert {one["schema"] for one in examples()[name] if "schema" in one} <= {title_of(name)}


@pytest.mark.parametrize("place", [(), ("options",), ("completions", 0), ("completions", 0, "stats")])
def test_a_key_too_many_or_too_few_is_found(place: tuple[Any, ...]) -> None:
    document = copy.deepcopy(examples()["generate"][0])
    inner: Any = document
    for part in place:
        inner = inner[part]
    check(document, "generate")
    key = {(): "options", ("options",): "target", ("completions", 0): "text"}.get(place, "num_rounds")
    kept, inner[key] = inner[key], {"another": "type"}
    with pytest.raises(AssertionError, match=key):
        check(document, "generate")
    inner |= {key: kept, "unknown": 1}
    with pytest.raises(AssertionError, match="unknown"):
        check(document, "generate")
    del inner["unknown"], inner[key]
    with pytest.raises(AssertionError, match=key):
        check(document, "generate")
