"""`sharpen data build`: the three sets from the tool world, the same bytes for the same seed. A row
is a pure function of (file, kind, seed, number), so workers may draw it; the guard sees all rows in
order, held-out splits first, because train has more to choose from."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from sharpen import records
from sharpen.data.generate.dialog_draft import DrawFailed, ToolPool, parts, split_categories
from sharpen.data.generate.plans import run_gold, verify_gold
from sharpen.data.generate.scenarios import Scenario
from sharpen.data.overlap import MAX_OVERLAP, perhaps_near, request_of
from sharpen.progress import Advance, progress
from sharpen.rows import dialog_to_row, task_to_row
from sharpen.types import Dialog, Json, SharpenError, Task
from sharpen.world.cards import card_row
from sharpen.world.episode import FAULTS, Faults, World, shipped_world
from sharpen.world.fields import Family
from sharpen.world.state import seeded

SETS = ("agent_tools", "agent_sft", "agent_benchmark")
SPLITS: tuple[Family, ...] = ("test", "dev", "train")
LEVELS = ("easy", "medium", "hard")
CHUNK, LEAST, MOST_BARREN = 40, 8, 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows: dialogs in all, a part of the usual number of tasks, and fresh tasks."""

    dialogs: int = 5000
    tasks: float = 1.0
    extended: int = 2000


@dataclass(frozen=True, slots=True)
class File:
    """One file to fill, and how many rows of each kind of a part it takes."""

    path: str
    split: Family
    quotas: dict[str, int]
    part: str
    extended: bool = False


USUAL = Sizes()
shelf_of = cache(ToolPool)
Noun = Dialog | Task
Job = tuple[File, str, int, range]  # a file, a kind, the seed and the numbers of rows to be drawn
CallExecutor = Callable[[list[Job]], Iterator[list[Noun | None]]]


def plan_files(sizes: Sizes) -> list[File]:
    files = []
    for split in SPLITS:
        for name, part in parts().items():
            shares = {kind: described.share for kind, described in part.kinds.items()}
            rows = sizes.dialogs if name == "sft" else part.rows * sizes.tasks
            wanted = {split: round(rows * part.splits[split])}
            wanted |= {"extended": sizes.extended} if split == "test" and name != "sft" else {}
            for stem, count in wanted.items():
                path, quotas = f"{part.folder}/{stem}.jsonl", portions(count, shares)
                files.append(File(path, split, quotas, name, stem == "extended"))
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
    shelf, source = shelf_of(world, file.split, seed), f"{seed}:extended" if file.extended else seed
    nouns = [draw_row(shelf, file.part, kind, source, number) for number in numbers]
    for noun in nouns:
        if isinstance(noun, Task):
            verify_gold(world, noun.gold, f"{file.path}: {kind} ({noun.instruction!r})")
    return nouns


def draw_row(shelf: ToolPool, part: str, name: str, seed: int | str, index: int) -> Noun | None:
    """The row of this kind and number, or None if it did not come about."""
    kind, rng = parts()[part].kinds[name], seeded(part, seed, shelf.split, name, index)
    start = seeded("start", name) if kind.task_type else seeded("start", part, name)
    tool, text = shelf.ask(start.randrange(1 << 20) + index, kind.writes)
    faults = {rng.choice(kind.faults): rng.choice(list(FAULTS))} if kind.faults else {}
    place = [tool.category], rng.randrange(1 << 30), shelf.split
    episode, level = shelf.world.episode(*place, Faults(at=faults)), index % len(kind.offered)
    scene = Scenario(shelf, episode, rng, kind, tool, text, level)
    scene.mistaken = rng.choice(kind.mistakes) if kind.mistakes else -1
    try:
        for play in kind.play:
            getattr(scene, play)()
    except DrawFailed:
        return None
    needed = list(scene.used.values()) or ([] if scene.barred else [tool])
    count = kind.offered[level]
    count = max(count if isinstance(count, int) else rng.randint(*count), len(needed) + 1)
    offered = shelf.candidates(needed, count, rng, scene.barred, kind.same[level])
    specs = tuple(t.spec for t in offered)
    if kind.task_type:
        right = [message for message in scene.messages if message.trained]
        called = list(dict.fromkeys(c.name for m in right for c in m.tool_calls))
        about = {"kind": name, "category": tool.category, "target_tools": called}
        about |= {"seed": episode.seed, "faults": {"at": {str(n): f for n, f in faults.items()}}}
        return Dialog(tuple(scene.messages), specs, task_type=kind.task_type, metadata=about)
    *context, asked = scene.messages
    categories = sorted({t.category for t in offered})
    where = {"categories": categories, "seed": episode.seed, "family": shelf.split}
    if "calls" in scene.gold:
        end, _ = run_gold(shelf.world, scene.gold | where, asked.content)
        if kind.writes and not end.changes():
            return None  # doing nothing would be as good
        scene.gold["state"] = end.digest()
    about, gold = {"category": tool.category, "variant": name}, scene.gold | where
    return Task("", asked.content, specs, gold, part, LEVELS[level], tuple(context), about)


def fill_file(
    file: File, seed: int, guard: Guard, run: CallExecutor, advance: Advance
) -> list[Noun]:
    kept: list[Noun] = []
    for kind, quota in file.quotas.items():
        goal, start, barren = len(kept) + quota, 0, 0
        while len(kept) < goal and barren < MOST_BARREN:
            # a wave that added nothing makes the next one larger
            before, count = len(kept), max(LEAST, round((goal - len(kept)) * 1.25)) << barren
            numbers = range(start, start + count)
            jobs = [(file, kind, seed, numbers[at : at + CHUNK]) for at in range(0, count, CHUNK)]
            for noun in filter(None, chain.from_iterable(run(jobs))):
                if len(kept) < goal and guard.admit(noun, file.split, file.path, not file.extended):
                    kept.append(noun)
                    advance(1)
            start, barren = start + count, 0 if len(kept) > before else barren + 1
        if len(kept) < goal:
            came = f"only {quota - goal + len(kept)} of {quota} rows of kind {kind!r} came about"
            raise SharpenError(f"{file.path}: {came}")
    seeded("order", seed, file.path).shuffle(kept)
    name = file.path.removesuffix(".jsonl").replace("/", "-")
    return [replace(noun, id=f"{name}-{number:05d}") for number, noun in enumerate(kept, 1)]


class Guard:
    """Nothing verbatim, no 13 words in a row and no near copy may stand in two splits; within one
    file, no request may stand twice, values masked."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}  # instruction or 13 words → split
        self.asked: set[tuple[str, str]] = set()  # file and instruction, as it is and masked
        self.rows_with: dict[str, dict[str, set[frozenset[str]]]] = {}  # split → word → rows

    def admit(self, noun: Noun, split: Family, file: str, fresh: bool = True) -> bool:
        """May the row stand in `file`? Without `fresh`, values alone may make a difference."""
        text, masked, content, grams = request_of(noun)
        if not content or (file, masked if fresh else text) in self.asked:
            return False
        runs = [text, *grams]
        if any(self.said.get(run, split) != split for run in runs):
            return False
        others = [index for other, index in self.rows_with.items() if other != split]
        near = (row for index in others for row in perhaps_near(content, index, MAX_OVERLAP))
        if any(len(content & row) > MAX_OVERLAP * len(content | row) for row in near):
            return False
        self.said |= dict.fromkeys(runs, split)
        self.asked |= {(file, masked), (file, text)}
        index = self.rows_with.setdefault(split, {})
        for word in content:
            index.setdefault(word, set()).add(content)
        return True


def build_data(
    out: Path, seed: int = 0, sizes: Sizes = USUAL, workers: int = 0, world: World | None = None
) -> Json:
    """Build the three sets below `out`; another world than the shipped one in this process."""
    refuse_foreign(out)
    files, home, guard = plan_files(sizes), world or shipped_world(), Guard()
    places = split_categories(home.categories)
    total = sum(sum(file.quotas.values()) for file in files)
    # the catalogue reads the whole world, before workers copy this process
    cards: list[Json] = [card_row(home, t) | {"split": places[t.category]} for t in home.tools()]
    for example in (e for card in cards if card["split"] != "train" for e in card["examples"]):
        del example["request"]  # it is what the tests ask
    rows = {"agent_tools/tools.jsonl": cards}
    with workers_of(1 if world else workers, home) as run, progress("building", total) as advance:
        for file in files:
            to_row: Any = dialog_to_row if file.part == "sft" else task_to_row
            rows[file.path] = list(map(to_row, fill_file(file, seed, guard, run, advance)))
    held_out = {s: [c for c in places if places[c] == s] for s in ("dev", "test")}
    world_files = {name: records.sha256_file(path) for name, path in home.files.items()}
    return write_sets(out, rows, {"seed": seed, "held_out": held_out, "world": world_files})


@contextmanager
def workers_of(count: int, world: World) -> Iterator[CallExecutor]:
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
