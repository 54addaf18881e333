"""Importers: one small file for each family of foreign formats, found by name or by content.

A record goes in, `Dialog`s, `Task`s or `Preference`s come out; a record that does not fit raises
`RowError` and is kept apart by the driver (`sharpen.data.importing`).
"""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.data.importers.reading import Record, read_records
from sharpen.types import Dialog, Preference, SharpenError, Task

Noun = Dialog | Task | Preference

Rows = Iterator[Noun]

FAMILIES = {  # modules that hold more than the format of their name
    "preference": "preference kto",
    "toolbench": "toolbench toolbench_queries",
    "timing": "in3 when2call",
    "tau": "tau_tasks tau_runs tau2_tasks tau2_runs",
    "sql": "intercode_sql dbbench",
    "qa": "hotpotqa llmcompiler",
    "math": "gsm8k aqua svamp",
    "code": "mbpp humaneval",
    "long_context": "longeval kv_retrieval",
}
SINGLES = """openai sharegpt alpaca hermes glaive bfcl apibank sealtools metatool toolalpaca sgd
star worfbench nestful taskbench themis react gorilla livemcp"""
FORMATS = {name: name for name in SINGLES.split()}
FORMATS |= {name: module for module, names in FAMILIES.items() for name in names.split()}


def nothing(path: Path) -> None:
    """Side data of a format that needs none."""


@dataclass(frozen=True, slots=True)
class Importer:
    """One format. `side` loads what the data set keeps beside its rows (tools, answers) once;
    `convert` gets it with every record."""

    name: str
    detect: Callable[[Any], bool]
    convert: Callable[[Any, str, Any], Iterable[Noun]]
    read: Callable[[Path], Iterator[Record]] = read_records
    side: Callable[[Path], Any] = nothing


def load(name: str) -> Importer:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"formats: auto, {', '.join(FORMATS)}"
        raise SharpenError(f"unknown format {name!r}; {hint}")
    module = importlib.import_module(f"{__name__}.{FORMATS[name]}")
    return next(i for i in module.IMPORTERS if i.name == name)


def find(path: Path) -> Importer:
    """The importer whose format the first records have; none or several is an error."""
    samples: dict[Any, list[Any]] = {}
    hits: Counter[str] = Counter()
    for name in FORMATS:
        importer = load(name)
        if importer.read not in samples:
            records = islice(importer.read(path), 5)
            samples[importer.read] = [r.value for r in records if not r.problem]
        hits[name] = sum(recognised(importer, value) for value in samples[importer.read])
    best = [name for name, count in hits.items() if count and count == max(hits.values())]
    if len(best) == 1:
        return load(best[0])
    if best:
        raise SharpenError(f"{path}: could be {' or '.join(best)}; name the format")
    raise SharpenError(f"{path}: no known format; name one of {', '.join(FORMATS)}")


def recognised(importer: Importer, value: Any) -> bool:
    try:
        return bool(importer.detect(value))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return False  # it looked for something that another format does not have


def has(*keys: str) -> Callable[[Any], bool]:
    """A detector: an object with these keys."""
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)
