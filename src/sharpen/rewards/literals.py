"""Java and JavaScript values as BFCL rows have them: source text → a plain value, by the declared
type. What does not read as its type stays text, as a variable's name does. The patterns are
possessive, so that no text makes them slow."""

from __future__ import annotations

import re
from typing import Any

WHOLE, REAL, TRUTH = (r"-?\d++", int), r"-?\d++(?:\.\d++)?", ("true|false", "true".__eq__)
SCALARS = {  # language → type → how it is written, and what it becomes
    "java": {
        **dict.fromkeys(("byte", "short", "integer"), WHOLE),
        "long": (r"-?\d++[lL]", int),
        "float": (REAL + r"(?:[eE][+-]?\d++)?[fF]", float),
        "double": (REAL + r"(?:[eE][+-]?\d++)?", float),
        "boolean": TRUTH,
    },
    "javascript": {
        **{"integer": WHOLE, "float": (REAL, float), "Boolean": TRUTH},
        "Bigint": (r"-?\d++n", int),
        "String": (r"\"[^\0]*\"|'[^\0]*'", lambda text: text[1:-1]),
    },
}
ITEM, ADD, ROW = r"[^,]++", r"add\(([^)]++)\)", r"\[([^\[\]]*+)\]"
LIST, MAP = r"new\s++ArrayList<\w*+>\(", r"new\s++HashMap<[^()]*+\(\)"
COLLECTIONS = {  # type → how it is written, and what stands in it
    "ArrayList": (
        (LIST + r"Arrays\.asList\(([^)]++)\)\)", ITEM),
        (LIST + r"\)\s*+\{\{([^}]++)\}\}", ADD),
        (LIST + r"\)()", ITEM),
    ),
    "Array": ((r"new\s++\w++\[\]\s*+\{([^}\n]*+)\}", ITEM),),
    "HashMap": (
        (MAP + r"\s*+\{\s*+\{?([^}]*+)\}", r'put\("([^"\n]*+)",\s*+([^)\n]*+)'),
        (MAP + "()", ITEM),
    ),
    "array": (
        (r"^\s*+(?:\[|new\s++Array\()(\s*+\[[^\n]*+)", ROW),
        (r"^\s*+(?:\[|new\s++Array\()([^\])\n]*+)[\])]", ITEM),
    ),
    "dict": ((r"^\s*+\{([^}\n]*+)\}", r",?([^:]++):\s*+((?:[^,]|,(?!\s*+[^,:]++:))*+)"),),
}
LONGEST = 10_000  # characters; a longer value stays text


def read_literal(text: str, language: str, kind: str, inner: str = "") -> Any:
    """`new int[]{1, 2}`, an `Array` of `integer` → [1, 2]."""
    if len(text) > LONGEST:
        return text
    if kind in SCALARS[language]:
        pattern, make = SCALARS[language][kind]
        return make(text.rstrip("lLfFn")) if re.fullmatch(pattern, text) else text
    for pattern, item in COLLECTIONS.get(kind, ()):
        if found := re.search(pattern, text):
            items = re.findall(item, found[1])
            if kind in ("HashMap", "dict"):
                return {key.strip(" '\""): guess(value, language) for key, value in items}
            if item == ROW:
                return [[guess(i) for i in re.findall(ITEM, row)] for row in items]
            quotes = 1 if kind == "ArrayList" and inner in ("char", "String") else 0
            items = [item.strip()[quotes : len(item.strip()) - quotes] for item in items]
            return [read_literal(item, language, inner) for item in items if item]
    return text


def guess(text: str, language: str = "java") -> Any:
    """A value whose type is not declared."""
    text = text.strip()
    if language == "javascript" and text.startswith("[") and text.endswith("]"):
        return [guess(item) for item in re.findall(ITEM, text[1:-1])]
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
