"""Build the three data sets from the tool world: agent_tools, agent_sft and agent_benchmark.

`sharpen data build` calls `build_data`. The same seed gives the same bytes: a row depends on its
file, kind, seed and number alone, so worker processes may draw rows, and the `Guard` sees them all
in one order. Held-out splits come first, because train has more rows to choose from.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sharpen import records
from sharpen.data.generate.draw import BuiltFile, Row, RowJob, draw_rows
from sharpen.data.generate.guard import Guard
from sharpen.data.generate.sets import Part, parts
from sharpen.data.generate.tool_pool import split_categories
from sharpen.progress import Advance, progress
from sharpen.rows import dialog_to_row, task_to_row
from sharpen.types import Dialog, Json, SharpenError
from sharpen.world.cards import card_row
from sharpen.world.episode import World, shipped_world
from sharpen.world.fields import Family
from sharpen.world.state import seeded_rng

_SETS = ("agent_tools", "agent_sft", "agent_benchmark")
SPLITS: tuple[Family, ...] = ("test", "dev", "train")
_MAX_WORKERS = 4
_ROWS_PER_JOB = 40
_MIN_DRAWS = 8  # per wave
_SPARE_DRAWS = 1.25  # draws per missing row
_MAX_BARREN_WAVES = 6  # in a row


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows to build."""

    dialogs: int = 5000  # in all three splits
    tasks: float = 1.0  # factor on the number of tasks in sets.yaml
    extended: int = 2000  # further test tasks per part of the benchmark


DEFAULT_SIZES = Sizes()
_RunJobs = Callable[[list[RowJob]], Iterator[list[Row | None]]]


# The build


def build_data(
    out: Path,
    seed: int = 0,
    sizes: Sizes = DEFAULT_SIZES,
    workers: int = 0,
    world: World | None = None,
) -> Json:
    """Build the three sets below `out` and return the manifest.

    `workers` is the number of processes, 0 for up to four. A world other than the shipped one is
    drawn from in this process.
    """
    refuse_foreign(out)
    files = plan_files(sizes)
    tool_world = world or shipped_world()
    # the catalogue reads the whole world, before workers copy this process
    rows = {"agent_tools/tools.jsonl": _catalogue_tools(tool_world)}
    if world:
        workers = 1
    guard = Guard()
    total = sum(sum(file.quotas.values()) for file in files)
    with (
        start_workers(workers, tool_world) as run_jobs,
        progress("building", total) as advance,
    ):
        for file in files:
            file_rows = fill_file(file, seed, guard, run_jobs, advance)
            rows[file.path] = [_row_to_json(row) for row in file_rows]
    origin = {
        "seed": seed,
        "held_out": _held_out_categories(tool_world),
        "world": {name: records.sha256_file(path) for name, path in tool_world.files.items()},
    }
    return write_sets(out, rows, origin)


def _row_to_json(row: Row) -> Json:
    """Returns a dialog or a task as a row of a file."""
    if isinstance(row, Dialog):
        return dialog_to_row(row)
    return task_to_row(row)


def _catalogue_tools(world: World) -> list[Json]:
    """Returns one row per tool; the requests of held-out tools are left out."""
    split_of = split_categories(world.categories)
    cards = []
    for tool in world.tools():
        split = split_of[tool.category]
        card: Json = card_row(world, tool)
        card["split"] = split
        if split != "train":
            for example in card["examples"]:
                del example["request"]  # dev and test rows ask it
        cards.append(card)
    return cards


def _held_out_categories(world: World) -> dict[str, list[str]]:
    """Returns the categories of dev and of test."""
    split_of = split_categories(world.categories)
    held_out = {}
    for held_out_split in ("dev", "test"):
        names = [name for name, split in split_of.items() if split == held_out_split]
        held_out[held_out_split] = names
    return held_out


# Which files, and which quotas


def plan_files(sizes: Sizes) -> list[BuiltFile]:
    """Returns the files to build, in order, each with its quotas by kind."""
    files = []
    for split in SPLITS:
        for name, part in parts().items():
            part_rows = sizes.dialogs if name == "sft" else part.rows * sizes.tasks
            count = round(part_rows * part.splits[split])
            files.append(_plan_file(name, part, split, split, count))
            if split == "test" and name != "sft":
                files.append(_plan_file(name, part, split, "extended", sizes.extended))
    return files


def _plan_file(part_name: str, part: Part, split: Family, stem: str, count: int) -> BuiltFile:
    """Returns one file with `count` rows, divided by the shares of the part's kinds."""
    shares = {kind_name: kind.share for kind_name, kind in part.kinds.items()}
    return BuiltFile(
        path=f"{part.folder}/{stem}.jsonl",
        split=split,
        quotas=divide_by_shares(count, shares),
        part=part_name,
        extended=stem == "extended",
    )


def divide_by_shares(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Divide `total` by shares; the largest remainders are rounded up."""
    sum_of_shares = sum(shares.values())
    exact = {name: total * share / sum_of_shares for name, share in shares.items()}
    quotas = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    rows_left = total - sum(quotas.values())
    for name in by_remainder[:rows_left]:
        quotas[name] += 1
    return quotas


# Draw, check, keep


def fill_file(
    file: BuiltFile, seed: int, guard: Guard, run_jobs: _RunJobs, advance: Advance
) -> list[Row]:
    """Draw the rows of a file until every quota is met; returns them shuffled, with their ids."""
    rows: list[Row] = []
    for kind, quota in file.quotas.items():
        kind_rows = _fill_quota(file, kind, quota, seed, guard, run_jobs, advance)
        if len(kind_rows) < quota:
            raise SharpenError(
                f"{file.path}: only {len(kind_rows)} of {quota} rows of kind {kind!r} could be "
                "drawn; ask for fewer rows"
            )
        rows += kind_rows
    seeded_rng("order", seed, file.path).shuffle(rows)
    name = file.path.removesuffix(".jsonl").replace("/", "-")
    return [replace(row, id=f"{name}-{number:05d}") for number, row in enumerate(rows, 1)]


def _fill_quota(
    file: BuiltFile,
    kind: str,
    quota: int,
    seed: int,
    guard: Guard,
    run_jobs: _RunJobs,
    advance: Advance,
) -> list[Row]:
    """Draw rows of one kind in waves and keep those that the guard admits.

    A wave that adds no row doubles the size of the next one; after six of them in a row the quota
    is given up.
    """
    rows: list[Row] = []
    next_number = 0
    barren_waves = 0
    while len(rows) < quota and barren_waves < _MAX_BARREN_WAVES:
        rows_before = len(rows)
        draws = max(_MIN_DRAWS, round((quota - len(rows)) * _SPARE_DRAWS)) << barren_waves
        numbers = range(next_number, next_number + draws)
        for row in _draw_wave(file, kind, seed, numbers, run_jobs):
            if len(rows) == quota:
                continue  # the rest of the wave is drawn, but not needed
            if guard.admit(row, file.split, file.path, values_count=file.extended):
                rows.append(row)
                advance(1)
        next_number += draws
        if len(rows) > rows_before:
            barren_waves = 0
        else:
            barren_waves += 1
    return rows


def _draw_wave(
    file: BuiltFile, kind: str, seed: int, numbers: range, run_jobs: _RunJobs
) -> Iterator[Row]:
    """Draw the rows of these numbers, in order, without those whose draw failed."""
    jobs = []
    for first in range(0, len(numbers), _ROWS_PER_JOB):
        jobs.append(RowJob(file, kind, seed, numbers[first : first + _ROWS_PER_JOB]))
    for rows in run_jobs(jobs):
        for row in rows:
            if row is not None:
                yield row


@contextmanager
def start_workers(count: int, world: World) -> Iterator[_RunJobs]:
    """Yields a function that runs jobs in `count` processes, 0 for up to four.

    The processes are copies of this one, made before it starts threads. Where such copies cannot
    be made, jobs run in this process.
    """
    count = count or min(_MAX_WORKERS, os.cpu_count() or 1)
    if count == 1 or sys.platform != "linux":

        def run_here(jobs: list[RowJob]) -> Iterator[list[Row | None]]:
            for job in jobs:
                yield draw_rows(job, world)

        yield run_here
        return

    with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as executor:
        executor.submit(int).result()  # makes the copies now

        def run_in_workers(jobs: list[RowJob]) -> Iterator[list[Row | None]]:
            return executor.map(draw_rows, jobs)

        yield run_in_workers


# Write


def refuse_foreign(out: Path) -> None:
    """Raise if `out` holds folders of our names that were not built here."""
    if (out / "manifest.json").exists():
        return
    for name in _SETS:
        if (out / name).exists():
            raise SharpenError(
                f"{out}: holds {name} without a manifest.json, so it was not built by "
                "`sharpen data build`; choose another folder"
            )


def write_sets(out: Path, rows: dict[str, list[Json]], origin: Json) -> Json:
    """Write each set as a whole, then the manifest, which holds no date; returns the manifest."""
    digests = {}
    for name in _SETS:
        with records.atomic_folder(out / name) as folder:
            for path, file_rows in rows.items():
                if path.startswith(f"{name}/"):
                    records.write_jsonl(folder / path.removeprefix(f"{name}/"), file_rows)
        for path, digest in records.sha256_folder(out / name).items():
            digests[f"{name}/{path}"] = digest
    manifest: Json = {"sharpen": records.package_version("sharpen")}
    manifest |= origin
    manifest["rows"] = {path: len(file_rows) for path, file_rows in rows.items()}
    manifest["files"] = digests
    records.write_json(out / "manifest.json", manifest)
    return manifest
