"""Java and JavaScript values as BFCL rows have them: source text → a plain value, by the declared
type. What does not read as its type stays text, as a variable's name does."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml

TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
TYPES: dict[str, type] = {
    name: getattr(builtins, kind)
    for kind, names in TABLES["types"].items()
    for name in names.split()
}
LONGEST = 10_000  # characters; a longer value stays text


def read_literal(text: str, language: str, kind: str, inner: str = "") -> Any:
    """`new int[]{1, 2}`, an `Array` of `integer` → [1, 2]."""
    if len(text) > LONGEST:
        return text
    if pattern := TABLES["scalars"][language].get(kind):
        return scalar(text, TYPES[kind]) if re.fullmatch(pattern, text) else text
    for number, (pattern, item) in enumerate(TABLES["collections"].get(kind, ())):
        if found := re.search(pattern, text):
            items = re.findall(item, found[1])
            if TYPES[kind] is dict:
                return {key.strip(" '\""): guess(value, language) for key, value in items}
            if kind == "array" and number == 0:
                return [[guess(item) for item in row.split(",")] for row in items]
            quotes = 1 if kind == "ArrayList" and inner in ("char", "String") else 0
            items = [item.strip()[quotes : len(item.strip()) - quotes] for item in items]
            return [read_literal(item, language, inner) for item in items if item]
    return text


def scalar(text: str, kind: type) -> Any:
    if kind is bool:
        return text == "true"
    return text[1:-1] if kind is str else kind(text.rstrip("lLfFn"))


def guess(text: str, language: str = "java") -> Any:
    """A value whose type is not declared."""
    text = text.strip()
    if language == "javascript" and text.startswith("[") and text.endswith("]"):
        return [guess(item) for item in text[1:-1].split(",")]
    text = text.strip("'\"") if language == "javascript" else text
    if text in ("true", "false"):
        return text == "true"
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    for make, number in ((int, re.sub(r"(?<=\d)[lL]$", "", text)), (float, text.rstrip("fF"))):
        try:
            return make(number)
        except ValueError:
            continue
    return text
