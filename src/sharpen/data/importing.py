"""`sharpen data import`: a foreign file or folder → JSONL rows by a converter of `importers/`. What
is written can be read back, and nothing is dropped: a record that is not converted is in the
quarantine beside the rows, with its place and the reason."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.data.check import noun_of, structure
from sharpen.data.importers import chat, dialogs, tasks  # noqa: F401 - they fill FORMATS
from sharpen.data.importers.common import FORMATS, Importer
from sharpen.data.reading import Record, read_records
from sharpen.records import atomic_write, dump_row
from sharpen.rows import dialog_to_row, preference_to_row, task_to_row
from sharpen.types import Dialog, Json, Preference, RowError, SharpenError, Task

TO_ROW: dict[type, Callable[[Any], Json]]
TO_ROW = {Dialog: dialog_to_row, Preference: preference_to_row, Task: task_to_row}
SHAPE_ERRORS = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)


def load(name: str) -> Importer:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"formats: auto, {', '.join(FORMATS)}"
        raise SharpenError(f"unknown format {name!r}; {hint}")
    return FORMATS[name]


def find(path: Path) -> Importer:
    """The importer whose format most of the first records have; none or several is an error."""

    @cache
    def sample(names: str, split: Any) -> list[Any]:
        first = islice(read_records(path, names, split), 5)
        return [record.value for record in first if not record.problem]

    hits = {n: sum(map(f.recognises, sample(f.names, f.split))) for n, f in FORMATS.items()}
    best = [name for name, count in hits.items() if count and count == max(hits.values())]
    if len(best) == 1:
        return FORMATS[best[0]]
    if best:
        raise SharpenError(f"{path}: could be {' or '.join(best)}; name the format")
    raise SharpenError(f"{path}: no known format; name one of {', '.join(FORMATS)}")


@dataclass
class ImportReport:
    format: str
    read: int = 0
    kept: int = 0
    quarantined: int = 0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def import_file(
    name: str, path: str | Path, out: str | Path, limit: int | None = None
) -> ImportReport:
    """Convert `path` from the format `name` (`auto` finds it) into the JSONL file `out`."""
    path, out = Path(path), Path(out)
    if out.is_dir() or (out.exists() and path.exists() and out.samefile(path)):
        raise SharpenError(f"{out}: is a folder or the input; name another output file")
    importer = find(path) if name == "auto" else load(name)
    try:
        side = (importer.side(path),) if importer.side else ()
    except SHAPE_ERRORS as error:
        raise SharpenError(f"{path}: a file beside it is not {name}'s: {fault(error)}") from None
    report = ImportReport(importer.name)
    records = read_records(path, importer.names, importer.split)
    with atomic_write(out) as good, atomic_write(quarantine_of(out)) as bad:
        for report.read, record in enumerate(islice(records, limit), 1):
            try:
                good.write(converted(importer, record, side))
            except RowError as error:
                report.reasons[reason_kind(error.reason)] += 1
                bad.write(kept_apart(record, error.reason))
        if not report.read:
            raise SharpenError(f"{path}: no record in it")
    report.quarantined = report.reasons.total()
    report.kept = report.rows = report.read - report.quarantined
    if not report.quarantined:
        quarantine_of(out).unlink()
    return report


def converted(importer: Importer, record: Record, side: tuple[Any, ...]) -> bytes:
    """A record's row as a JSONL line, or a RowError: a wrong shape is the record's fault."""
    if record.problem:
        raise RowError(record.where, record.problem)
    try:
        place = (record.where,) if importer.placed else ()
        noun = importer.convert(record.value, *place, *side)
        if isinstance(noun, Task) and not noun.id:  # it is called after its place
            place = re.sub(r"\W+", "-", record.where.rsplit(":", 1)[-1])
            noun = replace(noun, id=f"{importer.name}-{place}")
        row = TO_ROW[type(noun)](noun)
        if noun_of(Record(record.where, row)) != noun:
            raise RowError(record.where, "a field is of another type than it must be")
        if problems := structure(noun):
            raise RowError(record.where, problems[0])
        return dump_row(row).encode("utf-8") + b"\n"
    except SHAPE_ERRORS as error:
        raise RowError(record.where, fault(error)) from None


def fault(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no field {error}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "holds half of a surrogate pair"
    return f"wrong shape: {error}"


def reason_kind(reason: str) -> str:
    """Reasons that differ only in names and numbers count as one."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:120]


def quarantine_of(path: Path) -> Path:
    """The file beside `path` that holds what was wrong; it is there only when something was."""
    return path.with_suffix(".quarantine.jsonl")


def kept_apart(record: Record, reason: str) -> bytes:
    """A line of the quarantine."""
    raw = record.raw or record.value
    if isinstance(raw, bytes):
        raw = raw.decode("utf-8", "replace")
    try:
        text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
    except RecursionError:
        text = ""  # deeper than anything can write; `where` still finds it
    return json.dumps({"where": record.where, "reason": reason, "raw": text}).encode() + b"\n"
