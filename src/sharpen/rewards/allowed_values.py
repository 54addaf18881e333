"""Compare an argument with a list of allowed values, as BFCL's AST checker does.

`rewards/calls.py` uses it for gold whose arguments are lists of allowed values.
`tests/test_bfcl_oracle.py` compares the verdicts with the checker's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sharpen.rewards.literals import TYPES, read_literal
from sharpen.types import Json

_IGNORED_IN_TEXT = re.compile(r"[ ,./\-_*^]")


def value_is_allowed(value: Any, allowed: Sequence[Any], field: Json, language: str) -> bool:
    """Whether a value is among the allowed ones and of the type that the schema field declares.

    Where the allowed values are of another type than declared, they are the name of a variable:
    then the value has to be exactly that name."""
    declared_name = str(field.get("type"))
    is_list = TYPES.get(declared_name) is list
    element_name = str((field.get("items") or {}).get("type")) if is_list else ""
    if language != "python":
        if not isinstance(value, str):
            return False
        value = read_literal(value, language, declared_name, element_name)
    elif TYPES.get(declared_name) is float and type(value) is int:
        value = float(value)
    allowed_type = _type_of_first(allowed)
    expected_type = TYPES.get(declared_name, allowed_type)
    is_variable = allowed_type not in (None, expected_type)
    if type(value) is not expected_type or is_variable:
        return type(value) in (allowed_type, expected_type) and value in allowed
    if expected_type is dict:
        return any(_dict_is_allowed(value, option) for option in allowed)
    if expected_type is list:
        return _list_is_allowed(value, allowed, TYPES.get(element_name))
    return _loosen(value) in [_loosen(option) for option in allowed]


def _list_is_allowed(value: list[Any], allowed: Sequence[Any], element_type: type | None) -> bool:
    """Whether a list equals an allowed one, element by element and in the same order."""
    if element_type and not any(
        _elements_have_type(value, option, element_type) for option in allowed
    ):
        return False
    if element_type is dict:
        return any(_dicts_are_allowed(value, option) for option in allowed)
    loose_value = [_loosen(element) for element in value]
    loose_options = []
    for option in allowed:
        loose_options.append([_loosen(element) for element in option])
    return loose_value in loose_options


def _elements_have_type(value: list[Any], option: Any, element_type: type) -> bool:
    """Whether all elements are of the declared type or of the type that the option has."""
    if option == "":  # the argument may be left out: says nothing about its elements
        return True
    return all(type(element) in (element_type, _type_of_first(option)) for element in value)


def _dicts_are_allowed(value: list[Any], option: Sequence[Any]) -> bool:
    """Whether each dict of a list fits the one at its place in the option."""
    if len(option) != len(value):
        return False
    return all(_dict_is_allowed(*pair) for pair in zip(value, option, strict=True))


def _dict_is_allowed(value: Any, option: Any) -> bool:
    """Whether every key of the value has one of its allowed values, and no key is missing."""
    if not isinstance(value, dict) or not isinstance(option, dict):
        return False
    is_right = []
    for key, inner in value.items():
        allowed_values = option.get(key, ())
        is_right.append(_loosen(inner) in [_loosen(allowed) for allowed in allowed_values])
    return all(is_right) and all(key in value or "" in allowed for key, allowed in option.items())


def _type_of_first(values: Sequence[Any]) -> type | None:
    """Returns the type of the first value that does not stand for "may be left out"."""
    return next((type(value) for value in values if value != ""), None)


def _loosen(value: Any) -> Any:
    """Text without case, blanks and light punctuation; any other value as it is."""
    if not isinstance(value, str):
        return value
    return _IGNORED_IN_TEXT.sub("", value).lower().replace("'", '"')
