"""Importers: one file for each family of foreign formats, found by name or by content.

A record goes in, a `Dialog`, `Task` or `Preference` comes out; a record that does not fit raises
and is kept apart by the driver (`sharpen.data.importing`), which also knows its place.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.data.reading import Reader, read_records
from sharpen.types import Dialog, Preference, SharpenError, Task

Noun = Dialog | Task | Preference
Detect = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Importer:
    """One format. `side` loads what the data set keeps beside its rows (tools, answers) once;
    `convert` gets it with every record, and before it, if `placed`, where the record stands."""

    name: str
    detect: Detect
    convert: Callable[..., Noun]
    read: Reader
    side: Callable[[Path], Any] | None
    placed: bool

    def recognises(self, value: Any) -> bool:
        try:
            return bool(self.detect(value))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return False  # it looked for something that another format does not have


FORMATS: dict[str, Importer] = {}


def importer(
    detect: Detect, read: Reader = read_records, side: Any = None, placed: bool = False
) -> Callable[[Any], Any]:
    """Registers a converter as the format of its name."""

    def register(convert: Any) -> Any:
        name = convert.__name__
        FORMATS[name] = Importer(name, detect, convert, read, side, placed)
        return convert

    return register


def has(fields: str) -> Callable[[Any], bool]:
    """A detector: an object with all these fields, or with those of an alternative behind `|`."""
    wanted = [set(each.split()) for each in fields.split("|")]
    return lambda value: isinstance(value, dict) and any(each <= set(value) for each in wanted)


def load(name: str) -> Importer:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"formats: auto, {', '.join(FORMATS)}"
        raise SharpenError(f"unknown format {name!r}; {hint}")
    return FORMATS[name]


def find(path: Path) -> Importer:
    """The importer whose format most of the first records have; none or several is an error."""

    @cache
    def sample(read: Reader) -> list[Any]:
        return [record.value for record in islice(read(path), 5) if not record.problem]

    hits = {name: sum(map(f.recognises, sample(f.read))) for name, f in FORMATS.items()}
    best = [name for name, count in hits.items() if count and count == max(hits.values())]
    if len(best) == 1:
        return FORMATS[best[0]]
    if best:
        raise SharpenError(f"{path}: could be {' or '.join(best)}; name the format")
    raise SharpenError(f"{path}: no known format; name one of {', '.join(FORMATS)}")


for family in ("chat", "calling", "dialogs", "questions"):  # each registers its formats
    importlib.import_module(f"{__name__}.{family}")
