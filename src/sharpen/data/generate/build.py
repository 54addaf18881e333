"""`sharpen data build`: the three sets from the tool world, the same bytes for the same seed. A row
is a pure function of (file, kind, seed, number), so workers may draw it; the guard sees all rows in
order, held-out splits first, because train has more to choose from.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sharpen import records
from sharpen.data.generate.dialogs import KINDS, draw_dialog
from sharpen.data.generate.plans import verify_gold
from sharpen.data.generate.splits import Guard, Shelf, split_categories
from sharpen.data.generate.tasks import PARTS, draw_task
from sharpen.progress import Advance, progress
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
    """How many rows: dialogs in all, a part of the usual number of tasks, and fresh tasks."""

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


USUAL = Sizes()
shelf_of = cache(Shelf)
Noun = Dialog | Task
Job = tuple[File, str, int, range]  # a file, a kind, the seed and the numbers of rows to be drawn
Run = Callable[[list[Job]], Iterator[list[Noun | None]]]


def plan_files(sizes: Sizes) -> list[File]:
    files = []
    for split in SPLITS:
        quotas = portions(round(sizes.dialogs * SFT[split]), {n: k.share for n, k in KINDS.items()})
        files.append(File(f"agent_sft/{split}.jsonl", split, quotas))
        for part, usual in TASKS.items():
            shares = {name: share for name, (_, share) in PARTS[part].items()}
            folder = f"agent_benchmark/{part}"
            quotas = portions(round(usual * sizes.tasks * BENCHMARK[split]), shares)
            files.append(File(f"{folder}/{split}.jsonl", split, quotas, part))
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


def draw(job: Job, world: World | None = None) -> list[Noun | None]:
    """Rows of one job, each gold answer executed once more from what will be written."""
    (file, kind, seed, numbers), world = job, world or shipped_world()
    shelf = shelf_of(world, file.split, seed)
    if not file.part:
        return [draw_dialog(shelf, kind, seed, number) for number in numbers]
    source = f"{seed}:extended" if file.extended else seed
    tasks = [draw_task(shelf, file.part, kind, source, number) for number in numbers]
    for task in filter(None, tasks):
        verify_gold(world, task.gold, f"{file.path}: {kind} ({task.instruction!r})")
    return [*tasks]


def fill_file(
    file: File, seed: int, guard: Guard, run: Run, advance: Advance = lambda _: None
) -> list[Noun]:
    """Rows of every kind until the quotas are met."""
    kept: list[Noun] = []
    for kind, quota in file.quotas.items():
        found, start, barren = 0, 0, 0  # a wave that adds nothing makes the next one larger
        while found < quota and barren < MOST_BARREN:
            before, end = found, start + (max(LEAST, round((quota - found) * 1.25)) << barren)
            chunks = [range(at, min(at + CHUNK, end)) for at in range(start, end, CHUNK)]
            for noun in (n for rows in run([(file, kind, seed, c) for c in chunks]) for n in rows):
                if noun is None or found == quota:
                    continue
                if guard.admit(noun, file.split, file.path, not file.extended):
                    kept.append(noun)
                    found += 1
                    advance(1)
            start, barren = end, 0 if found > before else barren + 1
        if found < quota:
            came = f"only {found} of {quota} rows of kind {kind!r} came about"
            raise SharpenError(f"{file.path}: {came}")
    seeded("order", seed, file.path).shuffle(kept)
    name = file.path.removesuffix(".jsonl").replace("/", "-")
    return [replace(noun, id=f"{name}-{number:05d}") for number, noun in enumerate(kept, 1)]


def tool_rows(world: World, places: dict[str, Family]) -> Iterator[Json]:
    """The catalogue. What people say to held-out tools is left out: it is what the tests ask."""
    for tool in world.tools():
        row: Json = card_row(world, tool) | {"split": places[tool.category]}
        for example in row["examples"] if row["split"] != "train" else ():
            del example["request"]
        yield row


def build_data(
    out: Path, seed: int = 0, sizes: Sizes = USUAL, workers: int = 0, world: World | None = None
) -> Json:
    """Build the three sets below `out`; another world than the shipped one in this process."""
    refuse_foreign(out)
    files, home, guard = plan_files(sizes), world or shipped_world(), Guard()
    places = split_categories(home.categories)
    total = sum(sum(file.quotas.values()) for file in files)
    # the catalogue reads the whole world, before workers copy this process
    rows: dict[str, list[Json]] = {"agent_tools/tools.jsonl": list(tool_rows(home, places))}
    with workers_of(1 if world else workers, home) as run, progress("building", total) as advance:
        for file in files:
            nouns = fill_file(file, seed, guard, run, advance)
            rows[file.path] = [
                task_to_row(n) if isinstance(n, Task) else dialog_to_row(n) for n in nouns
            ]
    held_out = {s: [c for c in places if places[c] == s] for s in ("dev", "test")}
    world_files = {name: records.sha256_file(path) for name, path in home.files.items()}
    return write_sets(out, rows, {"seed": seed, "held_out": held_out, "world": world_files})


@contextmanager
def workers_of(count: int, world: World) -> Iterator[Run]:
    """Copies of this process, made before it starts threads; none where they cannot be made."""
    count = count or min(4, os.cpu_count() or 1)
    if count == 1 or sys.platform != "linux":
        yield lambda jobs: (draw(job, world) for job in jobs)
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as executor:
        executor.submit(int).result()
        yield lambda jobs: executor.map(draw, jobs)


def refuse_foreign(out: Path) -> None:
    """Folders of our names are replaced only where we made them."""
    if not (out / "manifest.json").exists() and any((out / name).exists() for name in SETS):
        raise SharpenError(f"{out}: holds data without a manifest.json; choose another folder")


def write_sets(out: Path, rows: dict[str, list[Json]], origin: Json) -> Json:
    """Each set as a whole, then the manifest: what was built, from what, without a date."""
    digests = {}
    for name in SETS:
        with records.atomic_folder(out / name) as folder:
            for path in (p for p in rows if p.startswith(f"{name}/")):
                records.write_jsonl(folder / path.removeprefix(f"{name}/"), rows[path])
        files = records.sha256_folder(out / name).items()
        digests |= {f"{name}/{path}": digest for path, digest in files}
    manifest = {"sharpen": records.version("sharpen")} | origin
    manifest |= {"rows": {path: len(found) for path, found in rows.items()}, "files": digests}
    records.write_json(out / "manifest.json", manifest)
    return manifest


def is_built(folder: Path) -> bool:
    path = folder / "manifest.json"
    return path.is_file() and "files" in records.read_json(path)
