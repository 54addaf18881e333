"""Reads data sets by name, and builds them on first use.

Names are `agent_sft:train`, `agent_benchmark/timing:dev`, `agent_tools`, a file's path, and
`procedural/arithmetic:train?levels=0-2` for tasks made on the spot. Training and evaluation read
their data here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from sharpen.calls import compact_json
from sharpen.data.generate.build import DEFAULT_SIZES, build_data, plan_files
from sharpen.data.procedural import PREFIX, procedural_tasks
from sharpen.records import Row, cache_folder, read_jsonl, sha256_file
from sharpen.rows import dialog_from_row, task_from_row, task_to_row
from sharpen.types import Dialog, SharpenError, Task
from sharpen.world.episode import shipped_world

PACKAGE_FOLDER = Path(__file__).parents[1]
_TOOLS_FILE = "agent_tools/tools.jsonl"


def data_folder() -> Path:
    """Return where the built sets are: `$SHARPEN_DATA`, or a folder of the cache.

    The name of the cache folder holds a hash of the tool world and of the code that builds the
    rows, so that a change of either builds the sets anew.
    """
    folder = os.environ.get("SHARPEN_DATA")
    if folder:
        return Path(folder)
    builders = sorted(
        [*PACKAGE_FOLDER.glob("world/*.*"), *PACKAGE_FOLDER.glob("data/generate/*.*")]
    )
    hashes = [sha256_file(file) for file in (*shipped_world().files.values(), *builders)]
    state = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return cache_folder() / f"data-{state[:12]}"


def resolve_files(name: str) -> list[Path]:
    """Return the files of a set, built first if need be. A procedural source has no file."""
    if Path(name).is_file():
        return [Path(name)]
    if name.startswith(PREFIX):
        return []
    part, _, split = name.partition(":")
    ending = f"/{split}.jsonl" if split else "/tools.jsonl"
    files = []
    for file in (_TOOLS_FILE, *(planned.path for planned in plan_files(DEFAULT_SIZES))):
        if file.startswith(f"{part}/") and file.endswith(ending):
            files.append(file)
    if not files:
        raise SharpenError(
            f"{name!r}: neither a file nor agent_tools, agent_sft:SPLIT, agent_benchmark:SPLIT or "
            "agent_benchmark/PART:SPLIT; splits are train, dev, test, parts selection, planning, "
            "timing, end_to_end; tasks can be procedural/KIND:SPLIT too"
        )
    folder = data_folder()
    if not (folder / "manifest.json").is_file():
        build_data(folder, workers=1)  # the caller may have threads, which rule out forking
    for file in files:
        if not (folder / file).is_file():
            raise SharpenError(f"{folder}: has no {file}; run sharpen data build --out {folder}")
    return [folder / file for file in files]


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a set, a file or a procedural source."""
    if name.startswith(PREFIX):
        for task in procedural_tasks(name):
            row = task_to_row(task)
            yield Row(f"{name}:{task.id}", row, compact_json(row).encode())
        return
    for path in resolve_files(name):
        yield from read_jsonl(path)


def read_dialogs(name: str) -> Iterator[Dialog]:
    """Yield the rows of a set as dialogs."""
    return (dialog_from_row(row.value, row.where) for row in read_rows(name))


def read_tasks(name: str) -> Iterator[Task]:
    """Yield the rows of a set as tasks."""
    return (task_from_row(row.value, row.where) for row in read_rows(name))
