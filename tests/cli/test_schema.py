"""outrider schema."""

import json

from commands import Outrider
from outrider.schemas.catalogue import SCHEMAS, schema_of


def test_schemas_are_listed_and_printed(outrider: Outrider) -> None:
    assert outrider("schema").out.split() == [*SCHEMAS]
    assert json.loads(outrider("schema", "compare").out) == schema_of("compare")


def test_an_unknown_schema_is_refused(outrider: Outrider) -> None:
    assert outrider("schema", "chat").error.startswith("NAME = 'chat' is invalid: choose one of generate, compare, ")
