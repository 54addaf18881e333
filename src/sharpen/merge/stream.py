"""A plan → a model folder in bounded memory: tensors are read, merged and written in tiles so small
that they stay in the processor's cache; reading them again for another look is cheaper than keeping
them. The folder takes its name only when everything in it is complete."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
from sharpen.merge.tiles import Array, NotFinite, Tile, Tiles, cast, on_host, rounded, wide
from sharpen.progress import Advance, progress
from sharpen.records import atomic_folder, read_json, write_json, write_text
from sharpen.types import Json, SharpenError

TILE_ELEMENTS = 1 << 17
SMALL_ELEMENTS = 1 << 24  # a smaller model is not worth several processes
SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt")
SMALL_FILES += ("vocab.json", "chat_template*", "generation_config.json", "*processor_config.json")
Move = Callable[[np.ndarray], Array]  # to where it is computed


@dataclass(frozen=True)
class MergeOptions:
    seed: int = 0
    workers: int = 0  # processes; 0: one a core, 8 at most
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
    size = sum(job.made.nbytes for job in plan.jobs)
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    needed, free = size + (64 << 20), shutil.disk_usage(parent).free
    require(free >= needed, f"{parent}: {needed:,} bytes are needed, {free:,} are free")
    shown = progress("merging", len(plan.jobs)) if options.show else nullcontext(lambda count: None)
    with atomic_folder(out) as folder, shown as advance, np.errstate(all="ignore"):
        write_tensors(plan, folder, options, move, advance)
        write_small_files(plan, recipe, folder, options.seed)
    report = {"out": str(out), "method": recipe.merge_method, "tensors": len(plan.jobs)}
    report |= {"bytes": size, "seconds": round(time.perf_counter() - started, 3)}
    return report | {"seed": options.seed, "device": options.device, "notes": plan.notes}


def keep_freed_memory() -> None:
    """For a process that only merges: else glibc gives freed tiles back to the system and pages
    them in again, which takes a third of the time."""
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


def write_tensors(
    plan: Plan, folder: Path, options: MergeOptions, move: Move, advance: Advance
) -> None:
    """Every tensor by one of several processes, the largest first."""
    jobs = sorted(plan.jobs, key=lambda job: -job.made.size)
    specs = {job.name: job.made for job in plan.jobs}
    alone = options.device != "cpu" or sum(job.made.size for job in jobs) < SMALL_ELEMENTS
    workers = options.workers or (1 if alone else min(8, os.cpu_count() or 1))
    with closing(ShardWriter(folder, specs, options.shard_bytes)) as writer:

        def make(index: int) -> None:
            make_tensor(jobs[index], writer, tiles_of(jobs[index], options.seed, move))

        if workers == 1:
            for index in range(len(jobs)):
                make(index)
                advance(1)
            return
        # threads would wait for each other: numpy takes Python's lock at every step
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(workers, context, begin_work, (make,))
        try:
            for _ in pool.map(do_work, range(len(jobs))):
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)


WORK: list[Callable[[int], None]] = []  # what a worker process does


def begin_work(work: Callable[[int], None]) -> None:
    """In a new worker, which ends with its parent and leaves interrupts to it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    WORK.append(work)


def do_work(index: int) -> None:
    WORK[0](index)


def make_tensor(job: Job, writer: ShardWriter, tiles: Tiles) -> None:
    def finish(tile: Tile) -> None:
        merged = on_host(kernel(tile))
        same = job.made.dtype == job.work
        writer.write(job.name, tile.start, merged if same else rounded(merged, job.work))

    try:
        kernel = job.method.kernel(tiles, dict(job.values))
        for _ in tiles.each(finish):
            pass
    except NotFinite:
        blame(job)


def tiles_of(job: Job, seed: int, move: Move) -> Tiles:
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

    return Tiles(len(ranges), load, job.made.size, job.work, job.name, seed)


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
