"""Files that survive: JSONL in and out, atomic writes, and the run folder with its manifest.

Everything is written beside its final name, flushed to disk and renamed, so that a file which
exists is whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from sharpen.config import Config, read_yaml
from sharpen.types import Json, RowError, SharpenError

MAX_LINE_BYTES = 64 << 20  # a longer line is a damaged file; reading it whole could fill memory
OnBad = Callable[[RowError, bytes], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One JSONL row and where it stands."""

    where: str  # file:line
    value: Json
    raw: bytes


def read_jsonl(path: str | Path, on_bad: OnBad | None = None) -> Iterator[Row]:
    """Rows of a JSONL file in constant memory. A bad line goes to `on_bad`, or raises."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; opened here so that the error is ours
    except OSError as error:
        raise SharpenError(f"{path}: {error.strerror}") from None
    with file:
        for number, raw in enumerate(bounded_lines(file), 1):
            where = f"{path}:{number}"
            try:
                if raw is None:
                    raise RowError(where, f"line over {MAX_LINE_BYTES >> 20} MiB")
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if raw.strip():
                    yield Row(where, parse_row(raw, where), raw)
            except RowError as error:
                if on_bad is None:
                    raise
                on_bad(error, raw or b"")


def bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines in bounded memory; None for one over `MAX_LINE_BYTES`, so that numbering holds."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
            continue
        while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None


def parse_row(raw: bytes, where: str) -> Json:
    """One line → an object. NaN, infinities, deep nesting, NUL and bad UTF-8 are RowErrors."""
    try:
        value = DECODER.decode(raw.decode("utf-8"))
        if b"\\ud" in raw or b"\\uD" in raw:
            dump_row(value).encode("utf-8")  # half a pair can be escaped, but not written
    except UnicodeEncodeError:
        raise RowError(where, "half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise RowError(where, f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RowError(where, f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError(where, "nested too deeply") from None
    except ValueError as error:
        raise RowError(where, str(error)) from None
    if not isinstance(value, dict):
        raise RowError(where, f"expected an object, found {type(value).__name__}")
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def finite_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # `1e999` is JSON, but no reader keeps it
        raise ValueError(f"{text[:20]} is out of range")
    return number


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite_number)


def dump_row(value: Any) -> str:
    """One JSONL line. Keys keep their order; NaN is refused, because no other reader accepts it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> int:
    """Rows → a JSONL file, whole or not at all. Returns the count."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(dump_row(row).encode("utf-8", "strict") + b"\n")
            count += 1
    return count


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its final name only when it is complete and on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder that takes its final name, from an older one too, only when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_file(file)
        old = temporary.with_suffix(".old")
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        if old.exists():
            shutil.rmtree(old)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SharpenError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SharpenError(f"{path}: not JSON: {error}") from None


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    if os.name == "posix":  # a rename is durable only when its folder is
        sync_file(path)


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_folder(path: str | Path) -> dict[str, str]:
    """Relative name → hash of every file below a folder, sorted, without hidden temporary ones."""
    root = Path(path)
    files = sorted(f for f in root.rglob("*") if f.is_file() and not f.name.startswith("."))
    return {f.relative_to(root).as_posix(): sha256_file(f) for f in files}


class RunFolder:
    """One run's files: `config.yaml`, `manifest.json`, `metrics.jsonl`, and whatever the run adds.

    Opened again with the same config it continues the run; with another it is an error."""

    def __init__(self, path: str | Path, config: Config, inputs: Json | None = None):
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        wanted = config.model_dump(mode="json")
        if self.path.exists() and not self.path.is_dir():
            raise SharpenError(f"{self.path}: exists and is not a folder")
        known = self.config_file.exists()
        if known and (found := read_yaml(self.config_file)) != wanted:
            other = f"holds a run with another config ({differences(found, wanted)})"
            raise SharpenError(f"{self.path}: {other}; choose another folder, or remove this one")
        if not known and self.path.exists() and any(self.path.iterdir()):
            other = "exists, is not empty, and is not a run folder"
            raise SharpenError(f"{self.path}: {other}; choose another one")
        self.path.mkdir(parents=True, exist_ok=True)
        drop_cut_line(self.metrics_file)
        if not known:
            write_json(self.path / "manifest.json", manifest(config, inputs or {}))
            text = yaml.safe_dump(wanted, allow_unicode=True, sort_keys=False)
            write_text(self.config_file, text)

    def log(self, row: Json) -> None:
        """Append one metrics row, whole lines only, on disk when this returns."""
        odd = {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        with open(self.metrics_file, "ab") as file:
            file.write(dump_row(row | odd).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[Json]:
        """Metrics rows so far."""
        if not self.metrics_file.exists():
            return []
        return [row.value for row in read_jsonl(self.metrics_file)]


def drop_cut_line(path: Path) -> None:
    """Take away a last line that a crash cut short, so that the next one begins where it should."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def differences(found: Any, wanted: Any) -> str:
    """The first few places where two plain values differ, as `key: old → new`."""
    rows: list[str] = []

    def walk(a: Any, b: Any, at: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in [*a, *(k for k in b if k not in a)]:
                walk(a.get(key), b.get(key), f"{at}.{key}" if at else str(key))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                walk(x, y, f"{at}.{index}")
        elif a != b:
            rows.append(f"{at or 'value'}: {a!r} → {b!r}")

    walk(found, wanted, "")
    return ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def manifest(config: Config, inputs: Json) -> Json:
    """What a result needs to be traced: versions, revision, command, hashes of what went in."""
    packages = ("torch", "transformers", "peft", "accelerate", "safetensors")
    return {
        "sharpen": version("sharpen"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "revision": git_revision(),
        "command": sys.argv,
        "config_hash": config.hash(),
        "seed": getattr(config, "seed", None),
        "inputs": inputs,
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The working tree's revision, with `+` when it has changes; None where git knows none."""
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    if shutil.which("git") is None or (head := run(["git", "rev-parse", "HEAD"])).returncode:
        return None
    dirty = run(["git", "status", "--porcelain"]).stdout.strip()
    return head.stdout.strip() + ("+" if dirty else "")


def cache_folder() -> Path:
    """Where pulled models and built data live: `$SHARPEN_CACHE`, else the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHARPEN_CACHE") or Path(home, "sharpen"))
