"""`sharpen data build`: the three sets from the tool world, the same bytes for the same seed.

A row is a pure function of (file, kind, seed, number), so workers draw rows in any order; the guard
then sees them in theirs and turns away what is too near another split. Held-out splits come first,
because train has more to choose from.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sharpen.data.generate.dialogs import KINDS, draw_dialog
from sharpen.data.generate.plans import verify_gold
from sharpen.data.generate.splits import Guard, Shelf, split_categories
from sharpen.data.generate.tasks import PARTS, draw_task
from sharpen.progress import Advance, progress
from sharpen.records import (
    atomic_folder,
    read_json,
    sha256_file,
    sha256_folder,
    version,
    write_json,
    write_jsonl,
)
from sharpen.rows import dialog_to_row, task_to_row
from sharpen.types import Dialog, Json, SharpenError, Task
from sharpen.world.cards import card_row
from sharpen.world.episode import World, shipped_world
from sharpen.world.fields import Family
from sharpen.world.state import seeded

SETS = ("agent_tools", "agent_sft", "agent_benchmark")
SPLITS: tuple[Family, ...] = ("test", "dev", "train")
TASKS = {"selection": 500, "planning": 300, "timing": 300, "end_to_end": 200}
SFT = {"train": 0.8, "dev": 0.1, "test": 0.1}
BENCHMARK = {"train": 0.7, "dev": 0.15, "test": 0.15}
CHUNK, LEAST, MOST_BARREN = 40, 8, 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows: dialogs in all, and parts of the usual number of tasks and fresh tasks."""

    dialogs: int = 5000
    tasks: float = 1.0
    extended: int = 2000


@dataclass(frozen=True, slots=True)
class File:
    """One file to fill, and how many rows of each kind it takes."""

    path: str
    split: Family
    quotas: dict[str, int]
    part: str = ""  # of the benchmark; empty for dialogs
    extended: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Rows to be drawn by a worker."""

    file: File
    kind: str
    seed: int
    start: int
    count: int


Run = Callable[[list[Job]], Iterator[list[Dialog | Task | None]]]


def plan_files(sizes: Sizes) -> list[File]:
    files = []
    for split in SPLITS:
        dialogs = round(sizes.dialogs * SFT[split])
        shares = {name: kind.share for name, kind in KINDS.items()}
        files.append(File(f"agent_sft/{split}.jsonl", split, portions(dialogs, shares)))
        for part, usual in TASKS.items():
            shares = {name: share for name, (_, share) in PARTS[part].items()}
            count = round(usual * sizes.tasks * BENCHMARK[split])
            folder = f"agent_benchmark/{part}"
            files.append(File(f"{folder}/{split}.jsonl", split, portions(count, shares), part))
            if split == "test":
                quotas = portions(sizes.extended, shares)
                files.append(File(f"{folder}/extended.jsonl", split, quotas, part, True))
    return files


def portions(total: int, shares: dict[str, float]) -> dict[str, int]:
    """`total` divided by shares, the largest remainders rounded up."""
    whole = sum(shares.values())
    exact = {name: total * share / whole for name, share in shares.items()}
    found = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in rest[: total - sum(found.values())]:
        found[name] += 1
    return found


@cache
def shelf_of(world: World, split: Family, seed: int) -> Shelf:
    return Shelf(world, split, seed)


def draw(job: Job, world: World | None = None) -> list[Dialog | Task | None]:
    """Rows of one job, each gold answer executed once more from what will be written."""
    world = world or shipped_world()
    shelf, file, rows = shelf_of(world, job.file.split, job.seed), job.file, []
    for index in range(job.start, job.start + job.count):
        if not file.part:
            rows.append(draw_dialog(shelf, job.kind, job.seed, index))
            continue
        source = job.seed if not file.extended else f"{job.seed}:extended"
        task = draw_task(shelf, file.part, job.kind, source, index)
        if task is not None:
            verify_gold(world, task.gold, f"{file.path}: {job.kind} {index} ({task.instruction!r})")
        rows.append(task)
    return rows


def fill_file(
    file: File, seed: int, guard: Guard, run: Run, advance: Advance = lambda _: None
) -> list[Dialog | Task]:
    """Rows of every kind until the quotas are met."""
    kept: list[Dialog | Task] = []
    for kind, quota in file.quotas.items():
        found, start, barren = 0, 0, 0  # a wave that adds nothing makes the next one larger
        while found < quota and barren < MOST_BARREN:
            before, ahead = found, max(LEAST, round((quota - found) * 1.25)) << barren
            jobs = [
                Job(file, kind, seed, at, min(CHUNK, start + ahead - at))
                for at in range(start, start + ahead, CHUNK)
            ]
            start += ahead
            for noun in (noun for rows in run(jobs) for noun in rows if noun is not None):
                if found < quota and guard.admit(noun, file.split, file.path, not file.extended):
                    kept.append(noun)
                    found += 1
                    advance(1)
            barren = 0 if found > before else barren + 1
        if found < quota:
            raise SharpenError(
                f"{file.path}: only {found} of {quota} rows of kind {kind!r} came about"
            )
    seeded("order", seed, file.path).shuffle(kept)
    name = file.path.removesuffix(".jsonl").replace("/", "-")
    return [replace(noun, id=f"{name}-{number:05d}") for number, noun in enumerate(kept, 1)]


def tool_rows(world: World) -> Iterator[Json]:
    """The catalogue. What people say to held-out tools is left out: it is what the tests ask."""
    places = split_categories(world.categories)
    for tool in world.tools():
        row: Json = card_row(world, tool) | {"split": places[tool.category]}
        if places[tool.category] != "train":
            row["examples"] = [
                {k: v for k, v in e.items() if k != "request"} for e in row["examples"]
            ]
        yield row


def build_data(
    out: str | Path,
    seed: int = 0,
    sizes: Sizes | None = None,
    workers: int | None = None,
    world: World | None = None,
) -> Json:
    """Build the three sets below `out` and return the manifest. Another world than the shipped one
    is drawn from in this process."""
    out, files = Path(out), plan_files(sizes or Sizes())
    refuse_foreign(out)
    home, guard = world or shipped_world(), Guard()
    total = sum(sum(file.quotas.values()) for file in files)
    list(home.tools())  # read once, before workers copy this process
    rows: dict[str, list[Json]] = {"agent_tools/tools.jsonl": list(tool_rows(home))}
    with workers_of(1 if world else workers) as executor, progress("building", total) as advance:
        run = runner(executor, home)
        for file in files:
            nouns = fill_file(file, seed, guard, run, advance)
            rows[file.path] = [
                task_to_row(n) if isinstance(n, Task) else dialog_to_row(n) for n in nouns
            ]
    places = split_categories(home.categories)
    held_out = {s: [c for c in places if places[c] == s] for s in ("dev", "test")}
    world_files = {name: sha256_file(path) for name, path in home.files.items()}
    return write_sets(out, rows, {"seed": seed, "held_out": held_out, "world": world_files})


@contextmanager
def workers_of(count: int | None) -> Iterator[Executor | None]:
    """A pool of copies of this process, started before anything here starts threads; None where one
    process has to do, as it must where processes cannot be copied."""
    count = count or min(4, os.cpu_count() or 1)
    if count == 1 or sys.platform != "linux":
        yield None
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as executor:
        executor.submit(int).result()
        yield executor


def runner(executor: Executor | None, world: World) -> Run:
    if executor is None:
        return lambda jobs: (draw(job, world) for job in jobs)
    return lambda jobs: executor.map(draw, jobs)


def refuse_foreign(out: Path) -> None:
    """Folders of our names are replaced only where we made them."""
    if not (out / "manifest.json").exists() and any((out / name).exists() for name in SETS):
        raise SharpenError(f"{out}: holds data without a manifest.json; choose another folder")


def write_sets(out: Path, rows: dict[str, list[Json]], origin: Json) -> Json:
    """Each set as a whole, then the manifest: what was built, from what, without a date."""
    for name in SETS:
        with atomic_folder(out / name) as folder:
            for path in (p for p in rows if p.startswith(f"{name}/")):
                write_jsonl(folder / path.removeprefix(f"{name}/"), rows[path])
    digests = {f"{n}/{path}": d for n in SETS for path, d in sha256_folder(out / n).items()}
    counts = {path: len(found) for path, found in rows.items()}
    manifest = {"sharpen": version("sharpen")} | origin | {"rows": counts, "files": digests}
    write_json(out / "manifest.json", manifest)
    return manifest


def is_built(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and "files" in read_json(folder / "manifest.json")
