"""Structures of the C++ library for ctypes. Their fields are declared in its headers alone, and read from there.

A field is a number (``int64_t`` or ``double``), a structure declared before, an array of these, or a pointer. Member
functions and enumerations are passed over. The compiled library states where its fields are (``layout_source``).
"""

from __future__ import annotations

import re
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p, sizeof
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_NEEDED = {"functions.h": "Norm", "products.h": "Matrix|RowCopy", "model.h": r"\w+", "token_rows.h": "CandidateBuffers"}
_NUMBERS = {"int64_t": c_int64, "double": c_double}
_BLOCK = re.compile(r"\{[^{}]*\}")  # the innermost ones
_FIELD = re.compile(r"(\w+)(?:\[(\d+)\])?(?:,|$)")


@cache
def native() -> Any:
    known: dict[str, Any] = {}
    texts = {path.name: re.sub("//.*", "", path.read_text(encoding="utf-8")) for path in HEADERS}
    for header, names in _NEEDED.items():
        for name, body in re.findall(rf"^struct ({names}) \{{(.*?)^\}};", texts[header], re.MULTILINE | re.DOTALL):
            known[name] = type(name, (Structure,), {"_fields_": _fields(body, known)})
    return SimpleNamespace(**known)


def layout() -> list[int]:
    """The number of entries that follow; then, for each structure, its size and the offsets of its fields."""
    found = [(sizeof(one), *(getattr(one, name).offset for name, _ in one._fields_)) for one in vars(native()).values()]
    return [sum(map(len, found)), *(number for numbers in found for number in numbers)]


def layout_source() -> str:
    """C++ source of ``outrider_layout``, which the compiler makes of the same names."""
    found = [f"{sum(1 + len(one._fields_) for one in vars(native()).values())}"]
    for kind, one in vars(native()).items():
        found += [f"sizeof({kind})", *(f"offsetof({kind}, {name})" for name, _ in one._fields_)]
    table = f'extern "C" const int64_t outrider_layout[] = {{{", ".join(found)}}};'
    return f'#include <cstddef>\n#include "model.h"\n#include "token_rows.h"\n{table}\n'


def _fields(body: str, known: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and types of the fields of a structure. KeyError: a type is not known here."""
    while (without := _BLOCK.sub(";", body)) != body:
        body = without
    found: list[tuple[str, Any]] = []
    for statement in map(str.strip, body.split(";")):
        if not statement or "(" in statement or statement.startswith("enum "):
            continue
        (kind,) = re.findall(r"^(?:const )?(\w+)", statement)
        for name, length in _FIELD.findall(statement):
            if "*" in statement:
                found.append((name, POINTER(known[kind]) if kind in known else c_void_p))
            else:
                one: Any = _NUMBERS.get(kind) or known[kind]
                found.append((name, one * int(length) if length else one))
    return found
