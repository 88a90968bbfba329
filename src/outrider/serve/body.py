"""Reading of the body of a request: known fields under one name each, and refusals that name the field, its value and
what it should be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from outrider.errors import OptionError, UsageError, shown
from outrider.serve.http_errors import Refusal, refusal_of

# What pydantic's messages have beside the remedy.
_PREFIX = re.compile("^(Value error, |Input should be |Input (?=tag))| or instance of .*| found using [^ ]+")

# Names, lists and objects of a body: each takes up to twenty times its bytes, and to read them stops other threads. The
# biases of a vocabulary of 262,144 tokens fit.
_MOST_PARTS = 2**18 + 2**14
_PARTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[:\[{]', re.DOTALL)  # and strings, to pass over them


class Strict(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """Leave one of the unknown fields: there would be an error for each, of a kilobyte."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in given if name not in known] if isinstance(given, dict) else []
        return {name: given[name] for name in (*known.intersection(given), unknown[0])} if unknown[1:] else given


class Body(Strict):
    """Body of a request."""

    PROMPT: ClassVar[str] = "prompt"  # the field with the prompt
    NAMES: ClassVar[Mapping[str, str]] = {}  # this body's fields for options of the library with other names
    ALSO_CALLED: ClassVar[Mapping[str, Sequence[str]]] = {}  # other names of fields
    NOT_SERVED: ClassVar[frozenset[str]] = frozenset()  # known but unsupported fields
    IDLE: ClassVar[Mapping[str, Sequence[Any]]] = {}  # values of unsupported fields that request nothing
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()  # known fields without effect on the output

    model: str | None = None
    _sent: Mapping[str, Any] = PrivateAttr()
    _aliases: Mapping[str, str] = PrivateAttr()

    @classmethod
    def parse(cls, sent: Mapping[str, Any]) -> Self:
        """Raises Refusal."""
        given = {name: value for name, value in sent.items() if value is not None and name not in cls.WITHOUT_EFFECT}
        for name in [name for name in given if name in cls.NOT_SERVED]:
            if (value := given.pop(name)) not in cls.IDLE.get(name, ()):
                raise Refusal(f"{name} = {shown(value, 60)} is not supported: leave it out", param=name)
        aliases = {}
        for name, others in cls.ALSO_CALLED.items():
            found = [one for one in (name, *others) if one in given]
            for other in found[1:]:
                if given[other] != given[found[0]]:
                    raise Refusal(f"{found[0]} and {other} are aliases of one field: give one", param=other)
            for one in found:
                given[name], aliases[name] = given.pop(one), found[0]
        try:
            body = cls.model_validate(given)
        except ValidationError as error:
            raise _refusal_of(error, given, aliases) from None
        body._sent, body._aliases = sent, aliases
        return body

    @property
    def sent(self) -> Mapping[str, Any]:
        """The fields as they were sent."""
        return self._sent

    def name_of(self, option: str) -> str:
        """The field that sets an option of the library, under the name that was sent."""
        name = self.NAMES.get(option, option)
        return self._aliases.get(name, name)

    def refusal_of(self, error: Exception) -> Refusal:
        """Refusal for a library error, with the option under the name that was sent."""
        if isinstance(error, OptionError):
            name = self.name_of(error.name)
            return Refusal(str(OptionError(name, error.value, error.remedy)), param=name)
        refusal = refusal_of(error)
        if isinstance(error, UsageError) and refusal.param is not None:
            refusal.param = self.PROMPT
        return refusal


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises Refusal."""
    if sum(map(body.count, b":[{")) > _MOST_PARTS:  # perhaps in strings
        num_parts = 0
        for found in _PARTS.finditer(body):
            num_parts += body[found.start()] != ord('"')
            if num_parts > _MOST_PARTS:
                raise Refusal(f"the body has more than {_MOST_PARTS} names, lists and objects: send fewer")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("the body is not a JSON object")
    return value


def _refusal_of(error: ValidationError, sent: Mapping[str, Any], aliases: Mapping[str, str]) -> Refusal:
    found = [(_place(one, sent, aliases), one) for one in error.errors(include_url=False)]
    # A union has an error for each of its types: those of the type that fits best lie deepest.
    place, first = max(
        found, key=lambda pair: (pair[0].count(".") + pair[0].count("["), pair[1]["type"] == "literal_error")
    )
    if first["type"] == "extra_forbidden":
        return Refusal(f"unknown field {place!r:.60}: leave it out", param=place)
    if first["type"] == "missing":
        return Refusal(f"{place} is required", param=place)
    texts = [_PREFIX.sub("", one["msg"]) for at, one in found if at == place]
    remedy = ", or ".join(dict.fromkeys(texts))
    return Refusal(f"{place} = {shown(first['input'], 60)} is invalid: {remedy}", param=place)


def _place(error: ErrorDetails, sent: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The field of an error, like ``messages[0].role``. Pydantic has the names of a union's types in between."""
    (first, *others), is_missing = error["loc"], error["type"] == "missing"
    place, value = aliases.get(str(first), str(first)), sent.get(str(first))
    for number, part in enumerate(others, 1):
        if isinstance(value, dict) and part not in value and isinstance(value.get("function"), dict):  # see ``Tool``
            place, value = f"{place}.function", value["function"]
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (is_missing and number == len(others))):
            place, value = f"{place}.{part}", value.get(part)
    return place
