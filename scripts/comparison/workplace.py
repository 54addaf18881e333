"""Where a comparison's commands run, the registry of its jobs, and how files become figures.

`data_jobs.py` and `model_jobs.py` write jobs with it, `compare_commits.py` runs them. A figure is a
plain value that two equal versions of the code share to the last bit: a number, a list with one
entry per training step, or a SHA-256 hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Figures = dict[str, Any]

VOLATILE = re.compile(r"seconds|per_s$|latency|memory")  # fields that no two runs share

TIMEOUT_S = 600
SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
INHERITED = ("SHARPEN_", "PYTHON", "WORLD_SIZE", "RANK", "LOCAL_RANK", "HF_", "TRANSFORMERS_")


class CommandFailed(Exception):
    """A command ended with an error; the text is the last line that it printed."""


@dataclass(frozen=True)
class Workplace:
    """A tree's `src` folder, and an empty folder in which its commands run."""

    source: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        """Returns the variables of a command: one thread, no network, no GPU, own caches."""
        values = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED)}
        values |= dict.fromkeys(SINGLE_THREAD, "1")
        values |= dict.fromkeys(OFFLINE, "1")
        values["TOKENIZERS_PARALLELISM"] = "false"
        values["CUDA_VISIBLE_DEVICES"] = ""
        values["PYTHONPATH"] = str(self.source)
        values["SHARPEN_CACHE"] = str(self.folder / "cache")
        values["SHARPEN_DATA"] = str(self.folder / "data")
        return values

    def python(self, *arguments: str) -> str:
        """Run Python in the work folder. Returns what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            last_line = lines[-1].replace(str(self.folder), "WORK").replace(str(self.source), "SRC")
            raise CommandFailed(f"exit {done.returncode}: {last_line}")
        return done.stdout

    def sharpen(self, *arguments: str) -> str:
        """Run one command of the command line. Returns what it printed."""
        return self.python("-m", "sharpen.cli.main", *arguments)

    def train(self, verb: str, name: str, *arguments: str) -> Figures:
        """Train into `runs/NAME`. Returns the metrics of all steps and the final weights."""
        output = f"runs/{name}"
        self.sharpen("train", verb, "--output", output, "device=cpu", *arguments)
        run = self.folder / output
        return columns("metrics", read_rows(run / "metrics.jsonl")) | weights(run / "final")


@dataclass(frozen=True)
class Job:
    """One thing to compute, and the names of the jobs that must run before it."""

    name: str
    run: Callable[[Workplace], Figures]
    needs: tuple[str, ...] = ()


JOBS: dict[str, Job] = {}


def job(name: str, needs: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Put the decorated function into the registry."""

    def register(function: Callable[[Workplace], Figures]) -> Callable[[Workplace], Figures]:
        JOBS[name] = Job(name, function, needs)
        return function

    return register


# Figures ------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Json]:
    """Returns the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[Json]) -> None:
    """Write a JSONL file."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, "utf-8")


def sha256(path: Path) -> str:
    """Returns the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_of(value: Any) -> str:
    """Returns the hash of a plain value; keys of objects may stand in any order."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def without_volatile(value: Any) -> Any:
    """Returns a plain value without the fields that no two runs share."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if not VOLATILE.search(key)}
        # arguments of tools may have such names too
        return {k: v if k == "messages" else without_volatile(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [without_volatile(part) for part in value]
    return value


def columns(title: str, rows: list[Json]) -> Figures:
    """Returns each field of the rows as a list with one entry per row."""
    rows = [without_volatile(row) for row in rows]
    names = sorted({name for row in rows for name in row})
    figures: Figures = {f"{title}: {name}": [row.get(name) for row in rows] for name in names}
    figures[f"{title}: rows"] = len(rows)
    return figures


def hashed_columns(title: str, rows: list[Json]) -> Figures:
    """Returns the hash of each field of the rows, so that a difference names its field."""
    figures = columns(title, rows)
    return {
        name: hash_of(value) if isinstance(value, list) else value
        for name, value in figures.items()
    }


def last_json(output: str) -> Json:
    """Returns the object that `--json` prints on the last line."""
    return json.loads(output.strip().splitlines()[-1])


def weights(folder: Path) -> Figures:
    """Returns the hash of all tensors in a folder, whatever their order in the files."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: digest for file in files for name, digest in tensor_hashes(file).items()}
    if not tensors:
        raise CommandFailed(f"{folder.name}: no tensors were written")
    return {"weights: tensors": len(tensors), "weights: sha256": hash_of(tensors)}


def tensor_hashes(file: Path) -> dict[str, list[Any]]:
    """Returns type, shape and hash of each tensor in a safetensors file."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    hashes = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        digest = hashlib.sha256(content[start + first : start + last]).hexdigest()
        hashes[name] = [about["dtype"], about["shape"], digest]
    return hashes
