"""A server whose model says what it is told to say, and a client of it; files with other servers have their own."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from scripted import MARKERS, TEMPLATES, talker
from servers import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Other formats differ in their grammars and parsers alone."""
    with running(talker(TEMPLATES["hermes"], MARKERS["hermes"]), num_slots=2) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.openai() as one:
        yield one
