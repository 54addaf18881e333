"""Strict typed configs: YAML files and `key=value` overrides, checked by pydantic.

All settings classes of the project derive from `Config`. Every wrong field is reported at once, on
one line, with the nearest right name.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

from sharpen.types import SharpenError

_MAX_SHOWN_VALUE = 60  # characters of a wrong value in an error message

_ConfigT = TypeVar("_ConfigT", bound="Config")


class ConfigError(SharpenError):
    """A config that cannot be used. Lists everything that is wrong with it."""


class _ExplainedModel(type(BaseModel)):  # type: ignore[misc]
    """Turns pydantic's errors of a direct `SomeConfig(…)` into `ConfigError`.

    Nested configs are left to pydantic, so that it can report the errors of all of them at once.
    """

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            message = _describe_validation_error(error, cls)  # type: ignore[arg-type]
            raise ConfigError(f"{cls.__name__}: {message}") from None


class Config(BaseModel, metaclass=_ExplainedModel):
    """Base class of every config.

    Unknown fields are errors, values cannot be changed later, and wrong arguments raise
    `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def hash(self) -> str:
        """Returns a short hash that identifies this configuration in manifests and caches."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_config(
    cls: type[_ConfigT], path: str | Path | None = None, overrides: Sequence[str] = ()
) -> _ConfigT:
    """Read a YAML file, apply `key=value` overrides and check the result."""
    return parse_config(cls, load_yaml(path, overrides), str(path or cls.__name__))


def parse_config(cls: type[_ConfigT], values: Any, where: str) -> _ConfigT:
    """Check plain values. All errors are reported in one line that starts with `where`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(values).__name__}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_describe_validation_error(error, cls)}") from None


def load_yaml(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Any:
    """Read a YAML file, apply `key=value` overrides and resolve `${…}`.

    The values of overrides are YAML: `lora_r=8`, `stages.0.model=pico`.
    """
    try:
        loaded = OmegaConf.create({}) if path is None else OmegaConf.create(read_yaml(path))
        for override in overrides:
            if "=" not in override or override.startswith("="):
                raise ConfigError(f"override {override!r}: expected key=value")
            key, value = override.split("=", 1)
            OmegaConf.update(loaded, key, yaml.safe_load(value), merge=True)
        return OmegaConf.to_container(loaded, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path or 'overrides'}: {one_line(error)}") from None


def read_yaml(path: str | Path, loader: Any = yaml.SafeLoader) -> Any:
    """Returns the plain values of a YAML file; an empty file gives an empty dict."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    try:
        return yaml.load(text, loader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or one_line(error)
        raise ConfigError(f"{where}: not YAML: {problem}") from None


def _describe_validation_error(error: ValidationError, cls: type[BaseModel]) -> str:
    """Returns all problems in one line; an unknown field is shown with the nearest known name."""
    clauses = []
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        if problem["type"] == "extra_forbidden":
            text = "unknown field"
            known_fields = _field_names(cls, location[:-1])
            nearest = difflib.get_close_matches(str(location[-1]), known_fields, n=1)
            if nearest:
                text += f", did you mean {nearest[0]!r}?"
        elif problem["type"] == "missing":
            text = "missing"
        else:
            value = repr(problem["input"])
            if len(value) > _MAX_SHOWN_VALUE:
                value = value[: _MAX_SHOWN_VALUE - 3] + "..."
            message = problem["msg"]
            text = f"{message[0].lower()}{message[1:]} (found {value})"
        field = ".".join(str(part) for part in location) or "value"
        clauses.append(f"{field}: {text}")
    return "; ".join(clauses)


def _field_names(cls: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Returns the fields of every model that `cls` may hold at `path`.

    A part of the path that is no field, such as a list index or the tag of a union, is skipped.
    """
    models: list[type[BaseModel]] = [cls]
    for part in path:
        nested: list[type[BaseModel]] = []
        for model in models:
            field = model.model_fields.get(str(part))
            if field is not None:
                nested += _models_in(field.annotation)
        models = nested or models
    names: set[str] = set()
    for model in models:
        names |= set(model.model_fields)
    return sorted(names)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the config classes that an annotation mentions, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models: list[type[BaseModel]] = []
    for inner in getattr(annotation, "__args__", ()):
        models += _models_in(inner)
    return models


def one_line(error: object) -> str:
    """Returns the text of an exception with every run of blanks and line breaks as one space."""
    return " ".join(str(error).split())


def format_exception(error: BaseException) -> str:
    """Describe an exception from a user's code: its type, its text, and the file and line.

    The text of our own errors already says where they come from.
    """
    if isinstance(error, SharpenError):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)[:200]}{where}"
