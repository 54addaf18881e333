"""Tables of all training settings, for `sharpen train METHOD --settings` and docs/settings.md.

The page is written by `python -m sharpen.cli.settings_page > docs/settings.md`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sharpen.config import Config
from sharpen.models.load import LINEAR_LAYERS, AdapterConfig, LoRAConfig, ModelConfig
from sharpen.train.config.aliases import second_names
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.config.rl import RLRunConfig
from sharpen.train.config.run import BatchConfig, DataConfig, RunConfig
from sharpen.train.config.sampling import SamplingConfig
from sharpen.train.methods import METHODS
from sharpen.types import Json

# groups in the order of the table; what is in none of these classes is the method's own
_GROUPS: tuple[tuple[str, type[Config]], ...] = (
    ("Model", ModelConfig),
    ("Adapter", AdapterConfig),
    ("Adapter", LoRAConfig),
    ("Learner", LearnerConfig),
    ("Data", DataConfig),
    ("Data", BatchConfig),
    ("Run", RunConfig),
    ("Sampling", SamplingConfig),
    ("Reinforcement learning", RLRunConfig),
)
_TYPE_NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
}
_BOUND_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_FILE_WIDTH = 180  # characters
_PAGE_START = """# Training settings

<!-- written by `python -m sharpen.cli.settings_page > docs/settings.md`; do not edit -->

A setting is a line of a YAML file (`--config`), a `key=value` argument, or a keyword argument of
the config class. `sharpen train METHOD --settings` prints the table of one method.
[Training](training.md) explains the methods.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    group: str
    name: str
    type: str
    default: str
    description: str


def list_settings(method: str) -> list[Setting]:
    """Returns all settings of a training method, ordered by group."""
    config_class = METHODS[method].load_config_class()
    fields_left = dict(config_class.model_fields)
    settings: list[Setting] = []
    for group, group_class in _GROUPS:
        if not issubclass(config_class, group_class):
            continue
        for name in group_class.model_fields:
            if name in fields_left:
                settings += _describe_field(group, name, fields_left.pop(name))
    for name, field in fields_left.items():
        settings += _describe_field(config_class.__name__, name, field)
    return settings


def _describe_field(group: str, name: str, field: FieldInfo) -> list[Setting]:
    """Returns the row of a setting, or the rows of what is in a block of settings."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
        rows: list[Setting] = []
        for inner_name, inner_field in field.annotation.model_fields.items():
            rows += _describe_field(group, f"{name}.{inner_name}", inner_field)
        return rows
    description = field.description or ""
    other_names = second_names(field)
    if other_names:
        description += f" Also called {', '.join(other_names)}."
    return [Setting(group, name, _type_text(field), _default_text(field), description)]


def _type_text(field: FieldInfo) -> str:
    """Returns the type of a setting and its bounds, such as `whole number ≥ 1`."""
    bounds = []
    for constraint in field.metadata:
        for attribute, sign in _BOUND_SIGNS.items():
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                bounds.append(f"{sign} {bound:g}")
    return " ".join([_annotation_text(field.annotation), ", ".join(bounds)]).strip()


def _annotation_text(annotation: Any) -> str:
    """Returns a type in words."""
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return _join_options(list(arguments))
    if origin in (Union, UnionType):
        return _join_options([_annotation_text(option) for option in arguments])
    if origin is dict:
        keys, values = arguments
        return f"mapping of {_annotation_text(keys)} to {_annotation_text(values)}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_annotation_text(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} {_annotation_text(arguments[0])}s"
    if issubclass(annotation, Enum):
        return _join_options([option.value for option in annotation])
    return "block"


def _join_options(options: list[str]) -> str:
    """Returns `a, b or c`."""
    *first, last = options
    return f"{', '.join(first)} or {last}" if first else last


def _default_text(field: FieldInfo) -> str:
    """Returns the default as it is written in YAML."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:  # filled in from other settings, as the description says
        return "by other settings"
    if default == LINEAR_LAYERS:
        return "all linear layers"
    if isinstance(default, float):
        return f"{default:g}"
    return json.dumps(default)


def print_settings(method: str) -> None:
    """Print the table of a method on the terminal."""
    from rich.console import Console
    from rich.table import Table

    # wide lines where the reader is a file or a program, such as grep
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    for group, settings in groupby(list_settings(method), key=attrgetter("group")):
        table = Table(title=group, title_justify="left", box=None, pad_edge=False)
        table.add_column("setting", no_wrap=True)
        for heading in ("type", "default", "description"):
            table.add_column(heading, overflow="fold")
        for setting in settings:
            table.add_row(setting.name, setting.type, setting.default, setting.description)
        console.print(table)
        console.print()


def settings_as_json(method: str) -> Json:
    """Returns the table of a method as plain values."""
    return {"method": method, "settings": [asdict(setting) for setting in list_settings(method)]}


def settings_page() -> str:
    """Returns the page of all methods in Markdown."""
    lines = [_PAGE_START]
    for method, entry in METHODS.items():
        lines += [f"## sharpen train {method}", "", f"{entry.about} Class: `{entry.config_name}`."]
        for group, settings in groupby(list_settings(method), key=attrgetter("group")):
            lines += ["", f"### {group}", ""]
            lines += ["| setting | type | default | description |", "|---|---|---|---|"]
            for setting in settings:
                cells = (f"`{setting.name}`", setting.type, setting.default, setting.description)
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_page(), end="")
