"""Environments by name, for configs that name one. Without a name the task's kind decides
(`sharpen.kinds`)."""

from __future__ import annotations

import importlib
from typing import Any

from sharpen.config import ConfigError
from sharpen.tools import load_object
from sharpen.types import MakeEnvironment

# name → its module and class
_ENVIRONMENTS = {
    "one_turn": ("sharpen.envs.one_turn", "OneTurn"),
    "toolworld": ("sharpen.envs.toolworld", "ToolWorld"),
    "python": ("sharpen.envs.python", "PythonTools"),
    "math": ("sharpen.envs.math", "Mathematics"),
    "code": ("sharpen.envs.code", "Programming"),
    "sql": ("sharpen.envs.sql", "SQL"),
}


def find_environment(name: str) -> MakeEnvironment:
    """Returns the class of an environment by name, or a user's own as `file.py:Class`."""
    if name in _ENVIRONMENTS:
        module, attribute = _ENVIRONMENTS[name]
        return getattr(importlib.import_module(module), attribute)
    if ".py:" not in name:
        raise ConfigError(f"env {name!r}: expected {', '.join(_ENVIRONMENTS)} or file.py:Class")
    found: Any = load_object(name)
    if not isinstance(found, type) or not (hasattr(found, "reset") and hasattr(found, "step")):
        raise ConfigError(f"env {name!r}: expected a class with reset(task) and step(message)")
    return found
