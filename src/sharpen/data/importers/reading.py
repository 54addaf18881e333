"""Foreign files → records with their `file:line`, in constant memory.

JSONL, a JSON array (streamed element by element), one JSON document, CSV, each also gzipped, and
folders of them. What cannot be read is a record with a `problem`, so that it is counted and kept
apart, and reading goes on behind it wherever the format allows.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sharpen.records import MAX_LINE_BYTES, bounded_lines, parse_row
from sharpen.types import RowError, SharpenError

CHUNK = 1 << 20
MAX_DOCUMENT = 256 << 20  # one JSON document is read whole
SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".log")
GAP = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Record:
    where: str
    value: Any = None
    raw: str | bytes = ""  # only where the value could not be read
    problem: str = ""


Reader = Callable[[Path], Iterator[Record]]


def read_records(path: Path, pattern: str = "") -> Iterator[Record]:
    """Every record of a file, or of all data files below a folder whose names match."""
    for file in data_files(path):
        if path.is_file() or re.search(pattern, file.name):
            yield from read_file(file)


def below(pattern: str) -> Reader:
    """For formats whose folder also holds other files."""
    return partial(read_records, pattern=pattern)


def within(parts: Callable[[Any], Iterable[Any]]) -> Reader:
    """For formats whose records hold several: `parts` lists them, and fails for other records."""

    def read(path: Path) -> Iterator[Record]:
        for record in read_records(path):
            try:
                inner = list(parts(record.value))
            except (KeyError, TypeError, AttributeError):
                yield record
                continue
            for number, value in enumerate(inner, 1):
                yield Record(f"{record.where}#{number}", value)

    return read


def data_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SharpenError(f"{path}: no such file or folder")
    found = [f for f in path.rglob("*") if f.name.removesuffix(".gz").endswith(SUFFIXES)]
    if not found:
        raise SharpenError(f"{path}: no data file below this folder")
    hidden = (f for f in found if f.name.startswith(".") or ".quarantine." in f.name)
    return sorted({f for f in found if f.is_file()} - set(hidden))


def read_file(path: Path) -> Iterator[Record]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; opened here so that the error is ours
    except OSError as error:
        raise SharpenError(f"{path}: {error.strerror}") from None
    with file:
        opened: Any = file
        if file.peek(2)[:2] == b"\x1f\x8b":
            opened = io.BufferedReader(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
        try:
            yield from records_of(opened, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Record(str(path), problem=f"damaged gzip, the rest is unread: {error}")


def records_of(file: Any, path: Path) -> Iterator[Record]:
    name = path.name.removesuffix(".gz")
    head = file.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if name.endswith(".csv"):
        return csv_records(file, path)
    if name.endswith((".txt", ".log")):
        return iter([text_record(file, path)])
    if head == b"[" and not name.endswith(".jsonl"):
        return array_records(file, path)
    return line_records(file, path, name)


def text_record(file: IO[bytes], path: Path) -> Record:
    raw = file.read(MAX_DOCUMENT)
    try:
        return Record(f"{path}:1", raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Record(f"{path}:1", raw=raw, problem=f"not UTF-8 at byte {error.start}")


def line_records(file: IO[bytes], path: Path, name: str) -> Iterator[Record]:
    """JSONL; a `.json` file whose first line is not complete is one document over many lines."""
    lines = bounded_lines(file)
    if name.endswith(".json"):
        first = next(lines, None) or b""
        if line_record(first, "").problem:
            whole = first + file.read(MAX_DOCUMENT)
            record = line_record(whole, f"{path}:1")
            if not record.problem:
                yield record
                return
            lines = bounded_lines(io.BytesIO(whole))
        else:
            lines = chain([first], lines)
    for number, raw in enumerate(lines, 1):
        if raw is None:
            yield Record(f"{path}:{number}", problem=f"line over {MAX_LINE_BYTES >> 20} MiB")
        elif raw.strip():
            yield line_record(raw, f"{path}:{number}")


def line_record(raw: bytes, where: str) -> Record:
    try:
        return Record(where, parse_row(raw.removeprefix(b"\xef\xbb\xbf"), where))
    except RowError as error:
        return Record(where, raw=raw, problem=error.reason)


def csv_records(file: IO[bytes], path: Path) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    reader = csv.DictReader(text)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                yield Record(where, raw=repr(row), problem="not CSV: another number of cells")
            else:
                yield Record(where, row)
    except csv.Error as error:
        yield Record(f"{path}:{reader.line_num}", problem=f"not CSV: {error}")


def array_records(file: IO[bytes], path: Path) -> Iterator[Record]:
    """The elements of a JSON array, one at a time. Behind a broken element, reading goes on at the
    next line that starts like the one before did."""
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    odd: list[str] = []  # numbers that JSON does not have, or that no float holds

    def number(digits: str) -> float:
        odd.extend([digits] if math.isinf(float(digits)) else [])
        return float(digits)

    decoder = json.JSONDecoder(parse_constant=odd.append, parse_float=number)
    buffer = text.read(CHUNK)
    at = buffer.index("[") + 1
    line, last, count, ended, marker = 1 + buffer.count("\n", 0, at), 0, 1, False, ""
    while True:
        start = GAP.match(buffer, at).end()  # type: ignore[union-attr]
        if "\n" in (gap := buffer[at:start]):
            line += gap.count("\n")
            marker = gap[gap.rfind("\n") + 1 :] + buffer[start : start + 1]
        at, where = start, f"{path}:{line}" + (f"#{count}" if line == last else "")
        if buffer[at : at + 1] == "]":
            return
        if ended and at == len(buffer):
            yield Record(where, problem="truncated: the array is not closed")
            return
        odd.clear()
        problem, unread, end, value = "", False, at, None
        try:
            value, end = decoder.raw_decode(buffer, at)
        except json.JSONDecodeError as error:
            cut = "Unterminated string" in error.msg or error.pos >= len(buffer) - 16
            if ended or not cut:
                problem = f"not JSON: {error.msg}"
        except RecursionError:
            problem = "nested too deeply"
        except ValueError as error:
            problem = str(error)
        if not problem and (end == at or end == len(buffer)) and not ended:
            if len(buffer) - at > MAX_LINE_BYTES:
                yield Record(where, problem=f"element over {MAX_LINE_BYTES >> 20} MiB")
                return
            more = text.read(max(CHUNK, len(buffer) - at))
            buffer, at, ended = buffer[at:] + more, 0, not more
            continue
        if problem:
            end, buffer, ended = next_element(buffer, at, text, marker)
            unread = end == len(buffer)
            problem += "; the rest of the array is unread" if unread else ""
        element = buffer[at:end]
        problem = problem or element_problem(element, odd)
        yield Record(where, raw=element, problem=problem) if problem else Record(where, value)
        if unread:
            return
        last, line = line, line + element.count("\n")
        at, count = end, count + 1


def next_element(buffer: str, at: int, text: IO[str], marker: str) -> tuple[int, str, bool]:
    """Where the element behind a broken one starts: at a line that begins with `marker`."""
    ended = False
    if marker.strip() != "{":  # the elements share one line: no place is safe to go on at
        while text.read(CHUNK):
            pass
        return len(buffer), buffer, True
    while (found := buffer.find("\n" + marker, at + 1)) < 0 and not ended:
        more = text.read(CHUNK)
        buffer, ended = buffer + more, not more
    return (found + len(marker) if found >= 0 else len(buffer)), buffer, ended


def element_problem(element: str, odd: list[str]) -> str:
    if odd:
        return f"{odd[0][:20]} is not a number that can be kept"
    try:
        element.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not UTF-8 at character {error.start}"
    return ""
