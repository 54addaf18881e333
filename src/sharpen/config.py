"""Strict typed configs: YAML and `key=value` overrides, merged by OmegaConf, checked by pydantic.

Every wrong field is reported at once, on one line, with the nearest right name.
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

C = TypeVar("C", bound="Config")


class ConfigError(SharpenError):
    """A config that cannot be used; lists everything that is wrong with it."""


class ExplainedModel(type(BaseModel)):  # type: ignore[misc]
    """Turns the errors of a direct `SomeConfig(…)` into ours. Nested configs are left to pydantic,
    so that it can report the errors of all of them at once."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {explain(error, cls)}") from None  # type: ignore


class Config(BaseModel, metaclass=ExplainedModel):
    """Base of every config: unknown fields are errors, values do not change, wrong arguments raise
    `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def hash(self) -> str:
        """Names this exact configuration in manifests and caches."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_config(cls: type[C], path: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """YAML file + `key=value` overrides → a checked config."""
    return parse_config(cls, load_yaml(path, overrides), str(path or cls.__name__))


def parse_config(cls: type[C], values: Any, where: str) -> C:
    """Plain values → a checked config; all that is wrong is one line that starts with `where`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(values).__name__}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, cls)}") from None


def load_yaml(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Any:
    """YAML with `${…}` resolved and `key=value` overrides applied (values are YAML: `lora_r=8`,
    `stages.0.model=pico`)."""
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
    """A YAML file's plain values."""
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


def explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """A pydantic error's complaints, one clause each; an unknown field with the nearest name."""
    clauses = []
    for problem in error.errors(include_url=False):
        place, text = problem["loc"], problem["msg"]
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(place[-1]), field_names(cls, place[:-1]), n=1)
            text = "unknown field" + (f", did you mean {near[0]!r}?" if near else "")
        elif problem["type"] == "missing":
            text = "missing"
        else:
            shown = repr(problem["input"])
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            text = f"{text[0].lower()}{text[1:]} (found {shown})"
        clauses.append(f"{'.'.join(map(str, place)) or 'value'}: {text}")
    return "; ".join(clauses)


def field_names(cls: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Fields of every model that `cls` may hold at `path`; a union's tag or an index is skipped."""
    models: list[type[BaseModel]] = [cls]
    for part in path:
        fields = [model.model_fields.get(str(part)) for model in models]
        models = [m for field in fields if field for m in models_in(field.annotation)] or models
    return sorted({name for model in models for name in model.model_fields})


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that an annotation mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in getattr(annotation, "__args__", ()) for m in models_in(inner)]


def one_line(error: object) -> str:
    """An exception's text without its line breaks."""
    return " ".join(str(error).split())


def raised(error: BaseException) -> str:
    """What a user's code raised, and where; our own errors say so themselves."""
    if isinstance(error, SharpenError):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)[:200]}{where}"
