"""Reads stored certificates, so that they can be run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from outrider.cli.shared.options import SamplingOptions
from outrider.cli.shared.output import title_of
from outrider.cli.shared.pair_options import PairOptions
from outrider.cli.shared.template_options import TemplateOptions
from outrider.errors import FileError
from outrider.system.files import read_text

INPUTS = ("weights", "prompts_sha256")  # must be unchanged to run a certificate again


class _Constraint(NamedTuple):
    """Constraint as in ``Sampling``: the contents of files."""

    json_schema: dict[str, Any] | None
    regex: str | None
    grammar: str | None
    bad_words: list[str]


class OwnOptions(NamedTuple):
    """Options of ``certify`` outside the shared groups."""

    prompts: Path | None
    num_draft_tokens: int | str
    max_new_tokens: int
    significance: float
    detect_tv: float | None
    num_tokens: int
    batch_size: int
    seed: int


def read_certificate(
    path: Path,
) -> tuple[PairOptions, SamplingOptions, TemplateOptions, dict[str, Any], OwnOptions, dict[str, Any]]:
    """Options of a certificate, its constraint as for a decoder, and its INPUTS.

    Raises:
        FileError: it is not a certificate.
    """
    try:
        document = json.loads(read_text(path))
        is_one = isinstance(document, dict) and document.get("schema") == title_of("certify")
        if not is_one:
            raise FileError(f"{path} is not a certificate: give a file written by outrider certify --json")
        options = document["options"]
        groups = PairOptions, SamplingOptions, TemplateOptions, OwnOptions
        pair, sampling, template, own = (_group(kind, options) for kind in groups)
        constraint: _Constraint = _group(_Constraint, options)
        given = {name: value for name, value in constraint._asdict().items() if value != []}  # as the options give them
        return pair, sampling, template, given, own, {name: document[name] for name in INPUTS}
    except json.JSONDecodeError as error:
        raise FileError(f"{path} is not a certificate: not JSON ({error.msg})") from None
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} is not a complete certificate: {error} is missing or has changed") from None


def _group(kind: Any, options: dict[str, Any]) -> Any:
    """Options of one group. Raises KeyError, TypeError."""
    values = {name: options[name] for name in get_type_hints(kind)}
    for name in ("models", "prompts"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    if values.get("corpus"):
        values["corpus"] = [*map(Path, values["corpus"])]
    return kind(**values)
