"""Reads data files as records with their `file:line`, in constant memory.

JSONL, JSON arrays and documents, CSV and text, each also gzipped, and folders of such files. What
cannot be read becomes a record with a `problem`, and reading goes on after it where the format
allows that. The importers, the checks and the benchmarks call it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sharpen.records import MAX_LINE_BYTES, STRICT_DECODER, bounded_lines, parse_row
from sharpen.types import RowError, SharpenError

_CHUNK = 1 << 20  # characters that are read at a time
_NEAR_END = 16  # an error this close to the end of the buffer may be a value cut in two
_MAX_DOCUMENT = 256 << 20  # bytes; one JSON document is read whole
_OVER_LIMIT = f"over {MAX_LINE_BYTES >> 20} MiB"
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_DATA_FILE = re.compile(r"(?!\.|.*\.quarantine\.).*\.(json|jsonl|csv|txt|log)(\.gz)?$")
_GAP = re.compile(r"[\s,]*")  # what stands between two elements of an array
# Finds where a value ends, even if it holds a number that `DECODER` refuses.
_LENIENT_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)


@dataclass(frozen=True, slots=True)
class Record:
    """One value of a file and where it is, or the problem that kept it from being read."""

    where: str
    value: Any = None
    raw: str | bytes = ""  # only where the value could not be read
    problem: str = ""


Split = Callable[[Iterator[Record], Path], Iterator[Record]]


def read_records(path: Path, names: str = "", split: Split | None = None) -> Iterator[Record]:
    """Yield the records of a file, or of a folder's files whose names match the pattern `names`.

    `split` turns the records of each file into other records.
    """
    for file in _data_files(path, names):
        records = read_file(file)
        if split:
            records = split(records, file)
        yield from records


def within(parts: Callable[[Any], Iterable[Any]]) -> Split:
    """Return a split for formats whose records hold several rows.

    `parts` lists the rows of a record. A record for which it fails is passed on as it is.
    """

    def split(records: Iterator[Record], file: Path) -> Iterator[Record]:
        for record in records:
            try:
                values = list(parts(record.value))
            except (KeyError, TypeError, AttributeError):
                yield record
                continue
            for number, value in enumerate(values, 1):
                yield Record(f"{record.where}#{number}", value)

    return split


def _data_files(path: Path, names: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SharpenError(f"{path}: no such file or folder")
    files = sorted(
        file for file in path.rglob("*") if _DATA_FILE.match(file.name) and file.is_file()
    )
    if not files:
        raise SharpenError(f"{path}: no data file in this folder or below it")
    return [file for file in files if re.search(names, file.name)]


def read_file(path: Path) -> Iterator[Record]:
    """Yield the records of one file; its name and its first character tell the format."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; opened here so that the error is ours
    except OSError as error:
        raise SharpenError(f"{path}: {error.strerror}") from None
    with file:
        stream: Any = file
        if file.peek(2)[:2] == _GZIP_MAGIC:
            stream = io.BufferedReader(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
        try:
            suffix = Path(path.name.removesuffix(".gz")).suffix
            first_character = stream.peek(4096).removeprefix(_UTF8_BOM).lstrip()[:1]
            if suffix in (".txt", ".log"):
                yield _text_record(stream, path)
            elif suffix == ".csv":
                yield from _csv_records(stream, path)
            elif first_character == b"[" and suffix != ".jsonl":
                yield from _array_records(stream, path)
            else:
                yield from _line_records(stream, path, suffix)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Record(str(path), problem=f"damaged gzip, the rest is unread: {error}")


def _text_record(file: IO[bytes], path: Path) -> Record:
    raw = file.read(_MAX_DOCUMENT)
    try:
        return Record(f"{path}:1", raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Record(f"{path}:1", raw=raw, problem=f"not UTF-8 at byte {error.start}")


def _line_records(file: IO[bytes], path: Path, suffix: str) -> Iterator[Record]:
    """JSONL; a `.json` file whose first line is not complete is one document over many lines."""
    lines = bounded_lines(file)
    if suffix == ".json":
        first_line = next(lines, None) or b""
        if _line_record(first_line, "").problem:
            document = first_line + file.read(_MAX_DOCUMENT)
            record = _line_record(document, f"{path}:1")
            if not record.problem:
                yield record
                return
            lines = bounded_lines(io.BytesIO(document))
        else:
            lines = chain([first_line], lines)
    for number, raw in enumerate(lines, 1):
        if raw is None:
            yield Record(f"{path}:{number}", problem=f"line {_OVER_LIMIT}")
        elif raw.strip():
            yield _line_record(raw, f"{path}:{number}")


def _line_record(raw: bytes, where: str) -> Record:
    try:
        return Record(where, parse_row(raw.removeprefix(_UTF8_BOM), where))
    except RowError as error:
        return Record(where, raw=raw, problem=error.reason)


def _csv_records(file: IO[bytes], path: Path) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.DictReader(_text_stream(file))
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():  # how csv marks too many and too few cells
                problem = "not CSV: another number of cells than the header"
                yield Record(where, row, repr(row), problem)
            else:
                yield Record(where, row)
    except csv.Error as error:
        yield Record(f"{path}:{reader.line_num}", problem=f"not CSV: {error}")


def _text_stream(file: IO[bytes]) -> IO[str]:
    return io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")


# JSON arrays -------------------------------------------------------------------------------------


def _array_records(file: IO[bytes], path: Path) -> Iterator[Record]:
    """Read one element at a time, and go on after a broken one at the next line that starts alike.

    `buffer` holds text of the file from somewhere before `position`, which is where the previous
    element ended, on line `line`.
    """
    text = _text_stream(file)
    buffer = text.read(_CHUNK)
    position = buffer.index("[") + 1
    line = 1 + buffer.count("\n", 0, position)
    at_end_of_file = False
    line_start = ""  # indentation and first character of the elements, where each has its own line
    previous_start_line = 0
    number = 1
    while True:
        start = _end_of_gap(buffer, position)
        gap = buffer[position:start]
        start_line = line + gap.count("\n")
        where = f"{path}:{start_line}"
        if start_line == previous_start_line:  # several elements in one line
            where += f"#{number}"
        value, end, problem = _decode_element(buffer, start)
        if max(start, end) > len(buffer) - _NEAR_END and not at_end_of_file:
            unread = len(buffer) - position
            if unread > MAX_LINE_BYTES:
                yield Record(where, problem=f"element {_OVER_LIMIT}")
                return
            more = text.read(max(_CHUNK, unread))
            at_end_of_file = not more
            buffer = buffer[position:] + more
            position = 0
            continue
        if buffer.startswith("]", start):
            return
        if start_line > line:
            line_start = gap[gap.rfind("\n") + 1 :] + buffer[start : start + 1]
        if problem:
            end, buffer = _find_next_element(buffer, start, text, line_start)
            if end == len(buffer):
                problem += "; the rest of the array is unread"
                yield Record(where, raw=buffer[start:end], problem=problem)
                return
            yield Record(where, raw=buffer[start:end], problem=problem)
        elif value is None:  # what `DECODER` refuses here, `parse_row` refuses with a reason
            yield _line_record(buffer[start:end].encode("utf-8", "surrogateescape"), where)
        else:
            yield Record(where, value)
        previous_start_line = start_line
        line = start_line + buffer.count("\n", start, end)
        position = end
        number += 1


def _end_of_gap(buffer: str, position: int) -> int:
    match = _GAP.match(buffer, position)
    assert match  # the pattern matches the empty text too
    return match.end()


def _decode_element(buffer: str, start: int) -> tuple[Any, int, str]:
    """Return a value, where it ends, and the problem.

    The value is None if only its end can be found. With a problem, the second number says how far
    the text could be read.
    """
    try:
        value, end = STRICT_DECODER.raw_decode(buffer, start)
        buffer[start:end].encode("utf-8")
        return value, end, ""
    except (ValueError, RecursionError):
        pass
    try:
        _, end = _LENIENT_DECODER.raw_decode(buffer, start)
        return None, end, ""
    except RecursionError:
        return None, start, "nested too deeply"
    except json.JSONDecodeError as error:
        if start == len(buffer):
            return None, start, "truncated: the array is not closed"
        end = len(buffer) if "Unterminated string" in error.msg else error.pos
        return None, end, f"not JSON: {error.msg}"


def _find_next_element(buffer: str, start: int, text: IO[str], line_start: str) -> tuple[int, str]:
    """Return where the element after a broken one starts, and the buffer with what was read.

    It starts at a line that begins with `line_start`; the end of the buffer means that none does.
    """
    if line_start.strip() != "{":  # the elements share one line: no place is safe to go on at
        return len(buffer), buffer
    while True:
        newline = buffer.find("\n" + line_start, start + 1)
        if newline >= 0:
            return newline + len(line_start), buffer
        more = text.read(_CHUNK)
        if not more:
            return len(buffer), buffer
        buffer += more
