"""Importers: one small file for each family of foreign formats, found by name or by content.

A record goes in, a `Dialog`, `Task` or `Preference` comes out; a record that does not fit raises
`RowError` and is kept apart by the driver (`sharpen.data.importing`).
"""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.data.reading import Reader, read_records
from sharpen.types import Dialog, Preference, SharpenError, Task

Noun = Dialog | Task | Preference
Convert = Callable[[Any, str, Any], Noun]
Detect = Callable[[Any], object]
Side = Callable[[Path], Any]

FAMILIES = {  # module → its formats
    "chat": "openai sharegpt alpaca hermes glaive",
    "preference": "preference kto themis",
    "dialogs": "apibank sgd star",
    "calling": "bfcl sealtools nestful metatool toolbench toolbench_queries toolalpaca gorilla"
    " livemcp",
    "planning": "worfbench taskbench",
    "tau": "tau_tasks tau_runs tau2_tasks tau2_runs",
    "react": "react",
    "questions": "gsm8k aqua svamp mbpp humaneval intercode_sql dbbench hotpotqa llmcompiler"
    " longeval kv_retrieval in3 when2call",
}
FORMATS = {name: module for module, names in FAMILIES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Importer:
    """One format. `side` loads what the data set keeps beside its rows (tools, answers) once;
    `convert` gets it with every record."""

    name: str
    detect: Detect
    convert: Convert
    read: Reader
    side: Side


def importer(
    detect: Detect, read: Reader = read_records, side: Side = lambda path: None
) -> Callable[[Any], Importer]:
    """Makes the importer of a format out of its converter, a function of the format's name."""
    return lambda convert: Importer(convert.__name__, detect, convert, read, side)


def has(*keys: str) -> Callable[[Any], bool]:
    """A detector: an object with these keys."""
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def load(name: str) -> Importer:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"formats: auto, {', '.join(FORMATS)}"
        raise SharpenError(f"unknown format {name!r}; {hint}")
    return getattr(importlib.import_module(f"{__name__}.{FORMATS[name]}"), name)


def find(path: Path) -> Importer:
    """The importer whose format the first records have; none or several is an error."""
    samples: dict[Any, list[Any]] = {}
    hits: Counter[str] = Counter()
    for name in FORMATS:
        read = load(name).read
        if read not in samples:
            samples[read] = [r.value for r in islice(read(path), 5) if not r.problem]
        hits[name] = sum(recognised(load(name), value) for value in samples[read])
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
