"""Files → records with their `file:line`, in constant memory: JSONL, JSON arrays and documents,
CSV, text, each also gzipped, and folders of them. What cannot be read is a record with a `problem`,
and reading goes on behind it wherever the format allows."""

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

from sharpen.records import DECODER, MAX_LINE_BYTES, bounded_lines, parse_row
from sharpen.types import RowError, SharpenError

CHUNK = 1 << 20
NEAR_END = 16  # an error so close to the end of what was read may be a value cut in two
MAX_DOCUMENT = 256 << 20  # one JSON document is read whole
DATA_FILE = re.compile(r"(?!\.|.*\.quarantine\.).*\.(json|jsonl|csv|txt|log)(\.gz)?$")
GAP = re.compile(r"[\s,]*")
EXTENT = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)  # takes any number


@dataclass(frozen=True, slots=True)
class Record:
    where: str
    value: Any = None
    raw: str | bytes = ""  # only where the value could not be read
    problem: str = ""


Split = Callable[[Iterator[Record], Path], Iterator[Record]]


def read_records(path: Path, names: str = "", split: Split | None = None) -> Iterator[Record]:
    """Records of a file, or of a folder's files of matching names; `split` makes others of them."""
    for file in data_files(path, names):
        yield from split(read_file(file), file) if split else read_file(file)


def within(parts: Callable[[Any], Iterable[Any]]) -> Split:
    """For formats whose records hold several: `parts` lists them, and fails for other records."""

    def split(records: Iterator[Record], file: Path) -> Iterator[Record]:
        for record in records:
            try:
                inner = list(parts(record.value))
            except (KeyError, TypeError, AttributeError):
                yield record
                continue
            for number, value in enumerate(inner, 1):
                yield Record(f"{record.where}#{number}", value)

    return split


def data_files(path: Path, names: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SharpenError(f"{path}: no such file or folder")
    found = sorted(f for f in path.rglob("*") if DATA_FILE.match(f.name) and f.is_file())
    if not found:
        raise SharpenError(f"{path}: no data file below this folder")
    return [file for file in found if re.search(names, file.name)]


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
            kind = Path(path.name.removesuffix(".gz")).suffix
            head = opened.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if kind in (".txt", ".log"):
                yield text_record(opened, path)
            elif kind == ".csv":
                yield from csv_records(opened, path)
            elif head == b"[" and kind != ".jsonl":
                yield from array_records(opened, path)
            else:
                yield from line_records(opened, path, kind)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Record(str(path), problem=f"damaged gzip, the rest is unread: {error}")


def text_record(file: IO[bytes], path: Path) -> Record:
    raw = file.read(MAX_DOCUMENT)
    try:
        return Record(f"{path}:1", raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Record(f"{path}:1", raw=raw, problem=f"not UTF-8 at byte {error.start}")


def line_records(file: IO[bytes], path: Path, kind: str) -> Iterator[Record]:
    """JSONL; a `.json` file whose first line is not complete is one document over many lines."""
    lines = bounded_lines(file)
    if kind == ".json":
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
    reader = csv.DictReader(decoded(file))
    try:
        for row in reader:
            ragged = None in row or None in row.values()
            problem = "not CSV: another number of cells" if ragged else ""
            yield Record(f"{path}:{reader.line_num}", row, repr(row) if ragged else "", problem)
    except csv.Error as error:
        yield Record(f"{path}:{reader.line_num}", problem=f"not CSV: {error}")


def decoded(file: IO[bytes]) -> IO[str]:
    return io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")


def array_records(file: IO[bytes], path: Path) -> Iterator[Record]:
    """One element at a time; behind a broken one it goes on at the next line that starts alike."""
    text, ended, marker = decoded(file), False, ""
    buffer = text.read(CHUNK)
    at = buffer.index("[") + 1
    line, last, count = 1 + buffer.count("\n", 0, at), 0, 1
    while True:
        start = GAP.match(buffer, at).end()  # type: ignore[union-attr]
        gap = buffer[at:start]
        here = line + gap.count("\n")
        where = f"{path}:{here}" + (f"#{count}" if here == last else "")
        value, end, problem = element(buffer, start)
        if max(start, end) > len(buffer) - NEAR_END and not ended:
            if len(buffer) - at > MAX_LINE_BYTES:
                yield Record(where, problem=f"element over {MAX_LINE_BYTES >> 20} MiB")
                return
            more = text.read(max(CHUNK, len(buffer) - at))
            buffer, at, ended = buffer[at:] + more, 0, not more
            continue
        if buffer.startswith("]", start):
            return
        if here > line:
            marker = gap[gap.rfind("\n") + 1 :] + buffer[start : start + 1]
        if problem:
            end, buffer = next_element(buffer, start, text, marker)
            unread = "; the rest of the array is unread" if end == len(buffer) else ""
            yield Record(where, raw=buffer[start:end], problem=problem + unread)
            if unread:
                return
        elif value is None:  # whatever is wrong with it is wrong with a line, too
            yield line_record(buffer[start:end].encode("utf-8", "surrogateescape"), where)
        else:
            yield Record(where, value)
        last, line, at, count = here, here + buffer.count("\n", start, end), end, count + 1


def element(buffer: str, start: int) -> tuple[Any, int, str]:
    """A value, where it ends, or how far one can read and what is wrong there."""
    try:
        value, end = DECODER.raw_decode(buffer, start)
        buffer[start:end].encode("utf-8")
        return value, end, ""
    except (ValueError, RecursionError):
        pass
    try:
        return None, EXTENT.raw_decode(buffer, start)[1], ""
    except RecursionError:
        return None, start, "nested too deeply"
    except json.JSONDecodeError as error:
        if start == len(buffer):
            return None, start, "truncated: the array is not closed"
        cut = "Unterminated string" in error.msg
        return None, len(buffer) if cut else error.pos, f"not JSON: {error.msg}"


def next_element(buffer: str, at: int, text: IO[str], marker: str) -> tuple[int, str]:
    """Where the element behind a broken one starts: at a line that begins with `marker`."""
    if marker.strip() != "{":  # the elements share one line: no place is safe to go on at
        return len(buffer), buffer
    while (found := buffer.find("\n" + marker, at + 1)) < 0 and (more := text.read(CHUNK)):
        buffer += more
    return (found + len(marker) if found >= 0 else len(buffer)), buffer
