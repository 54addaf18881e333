"""A plan → a model folder, tensor by tensor, in bounded memory.

Large tensors are read, merged and written in tiles that threads share; of small tensors each thread
takes a whole one. Tiles are so small that they stay in the processor's cache, and reading them
again for another look is cheaper than keeping them. The folder takes its name only when everything
in it is complete.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import yaml

from sharpen.merge import require
from sharpen.merge.checkpoint import ShardWriter
from sharpen.merge.plan import Job, Plan, build_plan
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.tiles import Array, NotFinite, Run, Tile, Tiles, cast, on_host, rounded, wide
from sharpen.progress import Advance, progress
from sharpen.records import atomic_folder, read_json, write_json, write_text
from sharpen.types import Json, SharpenError

TILE_ELEMENTS = 1 << 17
LARGE_ELEMENTS = 1 << 24  # tensors from this size on are shared by all threads
SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt")
SMALL_FILES += ("vocab.json", "chat_template*", "generation_config.json", "*processor_config.json")
Move = Callable[[np.ndarray], Array]  # to where it is computed


@dataclass(frozen=True)
class MergeOptions:
    seed: int = 0
    threads: int = 0  # 0: one a core, 8 at most
    device: str = "cpu"
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    show: bool = False  # progress


DEFAULTS = MergeOptions()


def merge(recipe: MergeConfig, out: str | Path, options: MergeOptions = DEFAULTS) -> Json:
    """Merge as the recipe says; returns what was made and what differed between the inputs."""
    out, started = Path(out), time.perf_counter()
    check_output(out, options.overwrite)
    move = mover(options.device)
    plan = build_plan(recipe)
    check_space(plan, out)
    shown = progress("merging", len(plan.jobs)) if options.show else nullcontext(lambda count: None)
    with atomic_folder(out) as folder, shown as advance, np.errstate(all="ignore"):
        write_tensors(plan, folder, options, move, advance)
        write_small_files(plan, recipe, folder, options.seed)
    report = {"out": str(out), "method": recipe.merge_method, "tensors": len(plan.jobs)}
    report |= {"bytes": plan.nbytes, "seconds": round(time.perf_counter() - started, 3)}
    report |= {"seed": options.seed, "device": options.device, "notes": list(plan.notes)}
    return report


def keep_freed_memory() -> None:
    """For a process that only merges: glibc would give freed tiles back to the system and page them
    in again for the next ones, which takes a third of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 256 << 20)  # M_MMAP_THRESHOLD


def check_output(out: Path, overwrite: bool) -> None:
    require(out.is_dir() or not out.exists(), f"{out}: exists and is not a folder")
    free = overwrite or not out.exists() or not any(out.iterdir())
    require(free, f"{out}: exists and is not empty; choose another folder or --overwrite")


def mover(device: str) -> Move:
    if device == "cpu":
        return lambda values: values
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SharpenError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    return lambda values: torch.from_numpy(values).to(device)


def check_space(plan: Plan, out: Path) -> None:
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    needed = plan.nbytes + (64 << 20)
    free = shutil.disk_usage(parent).free
    require(free >= needed, f"{parent}: {needed:,} bytes are needed, {free:,} are free")


def write_tensors(
    plan: Plan, folder: Path, options: MergeOptions, move: Move, advance: Advance
) -> None:
    specs = {job.name: job.made for job in plan.jobs}
    threads = options.threads or min(8, os.cpu_count() or 1)
    # what is not finite is found in the results, and said once
    pool = ThreadPoolExecutor(threads, initializer=lambda: np.seterr(all="ignore"))
    with closing(ShardWriter(folder, specs, options.shard_bytes)) as writer:

        def make(job: Job, run: Run = map) -> None:
            make_tensor(job, writer, tiles_of(job, options.seed, move, run))

        try:
            for job in (job for job in plan.jobs if job.size >= LARGE_ELEMENTS):
                make(job, pool.map)
                advance(1)
            for _ in pool.map(make, [job for job in plan.jobs if job.size < LARGE_ELEMENTS]):
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)


def make_tensor(job: Job, writer: ShardWriter, tiles: Tiles) -> None:
    def finish(tile: Tile) -> None:
        merged = on_host(kernel(tile))
        if job.made.dtype != job.work:
            merged = rounded(merged, job.work)
        writer.write(job.name, tile.start, merged)

    try:
        kernel = job.method.kernel(tiles, dict(job.values))
        for _ in tiles.each(finish):
            pass
    except NotFinite:
        blame(job)


def tiles_of(job: Job, seed: int, move: Move, run: Run) -> Tiles:
    """A tensor's tiles, read from every input."""
    ranges = job.made.row_ranges(TILE_ELEMENTS)

    def load(index: int) -> Tile:
        tensors = []
        for model, name in job.inputs:
            tensor = model.read(name, *ranges[index])
            if model.tensors[name].dtype != job.work:
                tensor = rounded(cast(tensor, wide(job.work)), job.work)
            tensors.append(move(tensor))
        return Tile(tuple(tensors), index, ranges[index][0] * job.made.columns)

    return Tiles(len(ranges), load, job.size, job.work, job.name, seed, run)


def blame(job: Job) -> NoReturn:
    """A merged value is not a number: say which input has one, or that the merge made it."""
    for model, name in job.inputs:
        for start, stop in job.made.row_ranges(TILE_ELEMENTS):
            rows = model.read(name, start, stop)
            wrong = np.argwhere(~np.isfinite(rows))
            if len(wrong):
                row, column = wrong[0].tolist()
                value = rows[row, column]
                raise SharpenError(f"{model.where}: {name}: {value} at [{start + row}, {column}]")
    kinds = " or ".join(dict.fromkeys((job.work, job.made.dtype)))
    raise SharpenError(f"{job.name}: merged values are beyond the range of {kinds}")


def write_small_files(plan: Plan, recipe: MergeConfig, folder: Path, seed: int) -> None:
    """config.json, the tokenizer's files, and the recipe that made the model."""
    write_json(folder / "config.json", plan.config)
    donor = plan.vocabulary.donor if plan.vocabulary else plan.donor
    for file in (file for pattern in SMALL_FILES for file in donor.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    if plan.vocabulary:
        write_json(folder / "tokenizer.json", plan.vocabulary.tokenizer)
    if plan.chat_template:
        write_text(folder / "chat_template.jinja", plan.chat_template)
        settings = folder / "tokenizer_config.json"
        if settings.exists():  # some readers prefer a template that stands there
            kept = {k: v for k, v in read_json(settings).items() if k != "chat_template"}
            write_json(settings, kept)
    made = recipe.model_dump(mode="json", exclude_defaults=True) | {"seed": seed}
    write_text(folder / "merge.yaml", yaml.safe_dump(made, allow_unicode=True, sort_keys=False))
