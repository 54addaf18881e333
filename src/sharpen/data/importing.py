"""Converts a foreign file or folder into JSONL rows with a converter of `importers/`.

`sharpen data import` calls it, and the benchmarks of `evals` convert their files with it. What is
written can be read back, and nothing is dropped: a record that cannot be converted is written to
the quarantine file beside the rows, with its place and the reason.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.data.check import ParsedRow, parse_record, structure_problems
from sharpen.data.importers import (  # noqa: F401 - importing them fills FORMATS
    chat,
    dialogs,
    preferences,
    question_tasks,
    react,
    tool_tasks,
)
from sharpen.data.importers.common import FORMATS, Importer
from sharpen.data.reading import Record, Split, read_records
from sharpen.records import atomic_write, dump_row
from sharpen.rows import dialog_to_row, preference_to_row, task_to_row
from sharpen.types import Dialog, Json, Preference, RowError, SharpenError, Task

# What a converter raises when a record does not have the shape of its format.
SHAPE_ERRORS = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)
_SAMPLE_SIZE = 5  # records by which a format is detected
_MAX_REASON = 120  # characters


def get_importer(name: str) -> Importer:
    """Return the importer of the format `name`; an unknown name is an error with the nearest."""
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, FORMATS, n=1)
    if near:
        raise SharpenError(f"unknown format {name!r}; did you mean {near[0]!r}?")
    formats = ", ".join(sorted(FORMATS))
    raise SharpenError(f"unknown format {name!r}; formats: auto, {formats}")


def detect_format(path: Path) -> Importer:
    """Return the importer that recognises most of the first records; there must be exactly one."""

    @cache
    def sample(names: str, split: Split | None) -> list[Any]:
        records = islice(read_records(path, names, split), _SAMPLE_SIZE)
        return [record.value for record in records if not record.problem]

    recognised: dict[str, int] = {}
    for name, importer in FORMATS.items():
        values = sample(importer.names, importer.split)
        recognised[name] = sum(importer.recognises(value) for value in values)
    highest = max(recognised.values())
    best = sorted(name for name, count in recognised.items() if count == highest)
    if highest == 0:
        formats = ", ".join(sorted(FORMATS))
        raise SharpenError(f"{path}: no known format; name one of {formats}")
    if len(best) > 1:
        raise SharpenError(f"{path}: could be {' or '.join(best)}; name the format")
    return FORMATS[best[0]]


@dataclass
class _ImportReport:
    """How many records were read, kept and quarantined, and why."""

    format: str
    read: int = 0
    kept: int = 0
    quarantined: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def import_file(
    name: str, path: str | Path, out: str | Path, limit: int | None = None
) -> _ImportReport:
    """Convert `path` from the format `name` (`auto` detects it) into the JSONL file `out`."""
    path = Path(path)
    out = Path(out)
    if out.is_dir() or (out.exists() and path.exists() and out.samefile(path)):
        raise SharpenError(f"{out}: is a folder or the input; name another output file")
    importer = detect_format(path) if name == "auto" else get_importer(name)
    side = _load_side(importer, path)
    report = _ImportReport(importer.name)
    records = islice(read_records(path, importer.names, importer.split), limit)
    quarantine = quarantine_path(out)
    with atomic_write(out) as rows_file, atomic_write(quarantine) as quarantine_file:
        for record in records:
            report.read += 1
            try:
                rows_file.write(convert_record(importer, record, side))
            except RowError as error:
                report.reasons[strip_specifics(error.reason)] += 1
                quarantine_file.write(quarantine_line(record, error.reason))
        if not report.read:
            raise SharpenError(f"{path}: no record in it")
    report.quarantined = report.reasons.total()
    report.kept = report.read - report.quarantined
    report.rows = report.kept
    if not report.quarantined:
        quarantine.unlink()
    return report


def _load_side(importer: Importer, path: Path) -> tuple[Any, ...]:
    """Return the extra arguments of the converter: what its `side` loads, or nothing."""
    if not importer.side:
        return ()
    try:
        return (importer.side(path),)
    except SHAPE_ERRORS as error:
        reason = (
            f"a file beside it does not fit the format {importer.name}: {describe_error(error)}"
        )
        raise SharpenError(f"{path}: {reason}") from None


def convert_record(importer: Importer, record: Record, side: tuple[Any, ...]) -> bytes:
    """Return a record's row as a JSONL line. Raises RowError if the record has a wrong shape."""
    if record.problem:
        raise RowError(record.where, record.problem)
    try:
        place = (record.where,) if importer.placed else ()
        item: ParsedRow = importer.convert(record.value, *place, *side)
        if isinstance(item, Task) and not item.id:
            item = replace(item, id=_id_from_place(importer.name, record.where))
        row = _to_row(item)
        if parse_record(Record(record.where, row)) != item:
            raise RowError(record.where, "a field is of another type than it must be")
        problems = structure_problems(item)
        if problems:
            raise RowError(record.where, problems[0])
        return dump_row(row).encode("utf-8") + b"\n"
    except SHAPE_ERRORS as error:
        raise RowError(record.where, describe_error(error)) from None


def _id_from_place(format_name: str, where: str) -> str:
    """A task without an id is named after its format and its line."""
    line = re.sub(r"\W+", "-", where.rsplit(":", 1)[-1])
    return f"{format_name}-{line}"


def _to_row(item: ParsedRow) -> Json:
    if isinstance(item, Dialog):
        return dialog_to_row(item)
    if isinstance(item, Preference):
        return preference_to_row(item)
    return task_to_row(item)


def describe_error(error: Exception) -> str:
    """Return one of `SHAPE_ERRORS` as a reason for a reader of the quarantine."""
    if isinstance(error, KeyError):
        return f"no field {error}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "holds half of a surrogate pair"
    return f"wrong shape: {error}"


def strip_specifics(reason: str) -> str:
    """Return a reason without its names and numbers, so that alike reasons are counted as one."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:_MAX_REASON]


def quarantine_path(path: Path) -> Path:
    """Return the file beside `path` for bad rows; it is only kept if there are any."""
    return path.with_suffix(".quarantine.jsonl")


def quarantine_line(record: Record, reason: str) -> bytes:
    """Return a record's line of the quarantine file: where it is, the reason and its text."""
    raw = record.raw or record.value
    if isinstance(raw, bytes):
        raw = raw.decode("utf-8", "replace")
    try:
        text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
    except RecursionError:
        text = ""  # deeper than anything can write; `where` still finds it
    line = {"where": record.where, "reason": reason, "raw": text}
    return json.dumps(line).encode() + b"\n"
