"""Files that survive a crash: JSONL, atomic writes, and the run folder with its manifest.

Every file is written beside its final name, flushed to disk and renamed, so a file that exists is
complete. Used wherever Sharpen reads or writes data, runs and models.
"""

from __future__ import annotations

import contextlib
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
_UTF8_BOM = b"\xef\xbb\xbf"
_PINNED_PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors")
_SHOWN_DIFFERENCES = 3
_RUN_LAYOUT = 2  # of a run folder; raised when settings or checkpoints change their meaning
_BadLineHandler = Callable[[RowError, bytes], None]


# JSONL --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a JSONL file and the place where it was found."""

    where: str  # file:line
    value: Json
    raw: bytes


def read_jsonl(path: str | Path, on_bad: _BadLineHandler | None = None) -> Iterator[Row]:
    """Yields the rows of a JSONL file in constant memory.

    A bad line is passed to `on_bad`; without `on_bad` it raises a RowError.
    """
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
                if number == 1:
                    raw = raw.removeprefix(_UTF8_BOM)
                if raw.strip():
                    yield Row(where, parse_row(raw, where), raw)
            except RowError as error:
                if on_bad is None:
                    raise
                on_bad(error, raw or b"")


def bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yields the lines of a file in bounded memory.

    A line over `MAX_LINE_BYTES` is skipped and yields None, so that line numbers stay right.
    """
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
            continue
        while rest := file.readline(MAX_LINE_BYTES):
            if rest.endswith(b"\n"):
                break
        yield None


def parse_row(raw: bytes, where: str) -> Json:
    """Parse one line into an object.

    NaN, infinities, deep nesting, NUL and bad UTF-8 raise a RowError.
    """
    try:
        value = STRICT_DECODER.decode(raw.decode("utf-8"))
        if b"\\ud" in raw or b"\\uD" in raw:
            # Half of a surrogate pair can be escaped in JSON, but not written as UTF-8.
            dump_row(value).encode("utf-8")
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # `1e999` is valid JSON, but becomes infinity in every reader
        raise ValueError(f"{text[:20]} is out of range")
    return number


STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_finite_float)


def dump_row(value: Any) -> str:
    """Returns one JSONL line. Keys keep their order; NaN is refused, as other readers refuse it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> int:
    """Write rows to a JSONL file, completely or not at all, and return their number."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(dump_row(row).encode("utf-8", "strict") + b"\n")
            count += 1
    return count


# Atomic files and folders -------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file that takes its final name only when it is complete and on disk."""
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
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Create a folder that takes its final name only when it is complete.

    A folder that already has the name is replaced.
    """
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
        _sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write an indented JSON file, completely or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; a missing or broken one raises a SharpenError that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SharpenError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SharpenError(f"{path}: not JSON: {error}") from None


def sync_file(path: Path) -> None:
    """Wait until a file is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    # A rename survives a crash only once the folder that holds the name is on disk too.
    if os.name == "posix":
        sync_file(path)


def sha256_file(path: str | Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_folder(path: str | Path) -> dict[str, str]:
    """Returns the hash of every file below a folder by its relative name, sorted.

    Hidden files are left out: `atomic_write` uses them while it writes.
    """
    root = Path(path)
    files = [file for file in root.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {file.relative_to(root).as_posix(): sha256_file(file) for file in sorted(files)}


# Run folders --------------------------------------------------------------------------------------


class RunFolder:
    """The files of one run: `config.yaml`, `manifest.json`, `metrics.jsonl`, and what the run adds.

    Opening it again with the same config continues the run; another config is an error.
    """

    def __init__(self, path: str | Path, config: Config, inputs: Json | None = None):
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        config_values = config.model_dump(mode="json")
        is_continued = self._check_existing(config_values)
        self.path.mkdir(parents=True, exist_ok=True)
        drop_cut_line(self.metrics_file)
        if not is_continued:
            write_json(self.path / "manifest.json", _build_manifest(config, inputs or {}))
            # Written last: a folder with this file counts as a run.
            config_text = yaml.safe_dump(config_values, allow_unicode=True, sort_keys=False)
            write_text(self.config_file, config_text)

    def _check_existing(self, config_values: Json) -> bool:
        """Returns whether the folder holds this run already; refuses a folder of something else."""
        if self.path.exists() and not self.path.is_dir():
            raise SharpenError(f"{self.path}: exists and is not a folder")
        if self.config_file.exists():
            self._check_layout()
            old_values = read_yaml(self.config_file)
            if old_values != config_values:
                changes = _summarize_differences(old_values, config_values)
                raise SharpenError(
                    f"{self.path}: holds a run with another config ({changes}); "
                    "choose another folder, or remove this one"
                )
            return True
        if self.path.exists() and any(self.path.iterdir()):
            raise SharpenError(
                f"{self.path}: exists, is not empty, and is not a run folder; choose another one"
            )
        return False

    def _check_layout(self) -> None:
        """Refuse to continue a run of an older version: settings and checkpoints have changed."""
        manifest_file = self.path / "manifest.json"
        manifest = read_json(manifest_file) if manifest_file.exists() else {}
        if manifest.get("layout") != _RUN_LAYOUT:
            raise SharpenError(
                f"{self.path}: a run of another version of Sharpen, which cannot be continued; "
                "choose another folder (metrics.jsonl and final/ of this one stay usable)"
            )

    def log(self, row: Json) -> None:
        """Append one metrics row, on disk when this returns. NaN and infinity become null."""
        cleaned = dict(row)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                cleaned[name] = None
        with open(self.metrics_file, "ab") as file:
            file.write(dump_row(cleaned).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[Json]:
        """Returns the metrics rows logged so far."""
        if not self.metrics_file.exists():
            return []
        return [row.value for row in read_jsonl(self.metrics_file)]


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a crash cut short, so that the next row starts on its own line."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _summarize_differences(old: Any, new: Any) -> str:
    """Returns the first few places where two plain values differ, as `key: old → new`."""
    differences = list(_find_differences(old, new, ""))
    summary = ", ".join(differences[:_SHOWN_DIFFERENCES])
    hidden = len(differences) - _SHOWN_DIFFERENCES
    return f"{summary} and {hidden} more" if hidden > 0 else summary


def _find_differences(old: Any, new: Any, place: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        added = [key for key in new if key not in old]
        for key in [*old, *added]:
            inner_place = f"{place}.{key}" if place else str(key)
            yield from _find_differences(old.get(key), new.get(key), inner_place)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _find_differences(old_item, new_item, f"{place}.{index}")
    elif old != new:
        yield f"{place or 'value'}: {old!r} → {new!r}"


def _build_manifest(config: Config, inputs: Json) -> Json:
    """Returns what is needed to trace a result: versions, revision, command, hashes of inputs."""
    return {
        "layout": _RUN_LAYOUT,
        "sharpen": package_version("sharpen"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in _PINNED_PACKAGES},
        "revision": _git_revision(),
        "command": sys.argv,
        "config_hash": config.hash(),
        "seed": getattr(config, "seed", None),
        "inputs": inputs,
    }


def package_version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Returns the revision of the working tree, with `+` if it has changes; None without git."""
    if shutil.which("git") is None:
        return None
    head = _run_git("rev-parse", "HEAD")
    if head.returncode != 0:
        return None
    status = _run_git("status", "--porcelain")
    revision = head.stdout.strip()
    return f"{revision}+" if status.stdout.strip() else revision


def _run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True)


def cache_folder() -> Path:
    """Returns where models and built data are cached: `$SHARPEN_CACHE`, or the user's cache."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHARPEN_CACHE") or Path(user_cache, "sharpen"))
