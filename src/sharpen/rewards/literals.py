"""Read Java and JavaScript values, given as source text in BFCL rows, into plain values.

The declared type decides how a text is read. A text that does not fit its type stays text, as the
name of a variable does. `rewards/allowed_values.py` compares the values.
"""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml

_TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
_MAX_CHARS = 10_000  # a longer value stays text


def _read_types() -> dict[str, type]:
    types = {}
    for python_name, declared_names in _TABLES["types"].items():
        for declared_name in declared_names.split():
            types[declared_name] = getattr(builtins, python_name)
    return types


TYPES: dict[str, type] = _read_types()  # declared type → Python's


def read_literal(text: str, language: str, kind: str, inner: str = "") -> Any:
    """Read one value of the declared type `kind`; `inner` is the type of its elements.

    `new int[]{1, 2}`, an `Array` of `integer`, becomes [1, 2]."""
    if len(text) > _MAX_CHARS:
        return text
    scalar_pattern = _TABLES["scalars"][language].get(kind)
    if scalar_pattern:
        return _read_scalar(text, TYPES[kind]) if re.fullmatch(scalar_pattern, text) else text
    forms = _TABLES["collections"].get(kind, ())
    for form_number, (pattern, item_pattern) in enumerate(forms):
        match = re.search(pattern, text)
        if not match:
            continue
        items = re.findall(item_pattern, match[1])
        if TYPES[kind] is dict:
            return {key.strip(" '\""): _guess_value(value, language) for key, value in items}
        if kind == "array" and form_number == 0:  # an array of arrays
            return [_read_row(row) for row in items]
        quoted = kind == "ArrayList" and inner in ("char", "String")
        return _read_items(items, language, inner, quoted)
    return text


def _read_scalar(text: str, python_type: type) -> Any:
    if python_type is bool:
        return text == "true"
    if python_type is str:
        return text[1:-1]
    return python_type(text.rstrip("lLfFn"))


def _read_row(row: str) -> list[Any]:
    return [_guess_value(item) for item in row.split(",")]


def _read_items(items: list[str], language: str, inner: str, quoted: bool) -> list[Any]:
    """The elements of a list; empty ones are left out."""
    values = []
    for item in items:
        text = item.strip()
        if quoted:
            text = text[1 : len(text) - 1]
        if text:
            values.append(read_literal(text, language, inner))
    return values


def _guess_value(text: str, language: str = "java") -> Any:
    """Read a value whose type is not declared."""
    text = text.strip()
    if language == "javascript":
        if text.startswith("[") and text.endswith("]"):
            return _read_row(text[1:-1])
        text = text.strip("'\"")
    if text in ("true", "false"):
        return text == "true"
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    try:
        return int(re.sub(r"(?<=\d)[lL]$", "", text))
    except ValueError:
        pass
    try:
        return float(text.rstrip("fF"))
    except ValueError:
        return text
