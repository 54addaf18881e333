"""A plan → a model folder, tensor by tensor, in bounded memory.

Large tensors are read, merged and written in tiles that threads share; of small tensors each thread
takes a whole one. The folder takes its name only when everything in it is complete.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NoReturn

import torch
import yaml

from sharpen.merge.checkpoint import ShardWriter, Spec
from sharpen.merge.plan import Job, Plan, build_plan
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.tiles import TILE_ELEMENTS, NotFinite, Run, Tile, Tiles, all_finite
from sharpen.records import atomic_folder, read_json, write_json, write_text
from sharpen.types import Json, SharpenError

WHOLE_BYTES = 24 << 20  # a tensor up to this size is read once and kept while it is merged
SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt")
SMALL_FILES += ("vocab.json", "chat_template*", "generation_config.json", "*processor_config.json")
Progress = Callable[[str, int, int], None]  # tensor, bytes made so far, bytes in all


@dataclass(frozen=True)
class MergeOptions:
    seed: int = 0
    threads: int = 0  # 0: one a core, 8 at most
    device: str = "cpu"
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False


DEFAULTS = MergeOptions()


def merge(
    recipe: MergeConfig,
    out: str | Path,
    options: MergeOptions = DEFAULTS,
    progress: Progress = lambda name, done, total: None,
) -> Json:
    """Merge as the recipe says; returns what was made and what differed between the inputs."""
    out, started = Path(out), time.perf_counter()
    check_output(out, options.overwrite)
    device = checked_device(options.device)
    plan = build_plan(recipe)
    check_space(plan, out)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads are ours: one a tile
    try:
        with atomic_folder(out) as folder:
            write_tensors(plan, folder, options, device, progress)
            write_small_files(plan, recipe, folder, options.seed)
    finally:
        torch.set_num_threads(before)
    return {
        "out": str(out),
        "method": recipe.merge_method,
        "tensors": len(plan.jobs),
        "bytes": plan.nbytes,
        "seconds": round(time.perf_counter() - started, 3),
        "seed": options.seed,
        "device": str(device),
        "notes": list(plan.notes),
    }


def keep_freed_memory() -> None:
    """For a process that only merges: glibc would give freed tiles back to the system and page them
    in again for the next ones, which takes a third of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 256 << 20)  # M_MMAP_THRESHOLD


def check_output(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise SharpenError(f"{out}: exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise SharpenError(f"{out}: exists and is not empty; choose another folder or --overwrite")


def checked_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise SharpenError(f"device {name!r}: {str(error).splitlines()[0]}") from None


def check_space(plan: Plan, out: Path) -> None:
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    needed = plan.nbytes + (64 << 20)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SharpenError(f"{parent}: {needed:,} bytes are needed, {free:,} are free")


def write_tensors(
    plan: Plan, folder: Path, options: MergeOptions, device: torch.device, progress: Progress
) -> None:
    writer = ShardWriter(folder, plan.specs, options.shard_bytes)
    lock, done = Lock(), 0

    def make(job: Job, run: Run) -> None:
        nonlocal done
        tiles = tiles_of(job, options.seed, device, run)

        def finish(index: int) -> int:
            tile = tiles.load(index)
            merged = kernel(tile).to(job.out).cpu()
            if not all_finite(merged):
                raise NotFinite(tile)
            writer.write_at(job.name, tile.start * job.out.itemsize, merged)
            return merged.nbytes

        try:
            kernel = job.method.kernel(tiles, dict(job.values))
            made = sum(run(finish, range(tiles.count)))
        except NotFinite as error:
            blame(job, error.index)
        with lock:
            done += made
            progress(job.name, done, plan.nbytes)

    pool = ThreadPoolExecutor(options.threads or min(8, os.cpu_count() or 1))
    try:
        for job in plan.jobs:
            if is_large(job):
                make(job, pool.map)
        small = [job for job in plan.jobs if not is_large(job)]
        list(pool.map(lambda job: make(job, map), small))
        writer.finish()
    finally:
        pool.shutdown(cancel_futures=True)
        writer.close()


def is_large(job: Job) -> bool:
    return Spec(job.work, job.shape).nbytes > WHOLE_BYTES


def tiles_of(job: Job, seed: int, device: torch.device, run: Run) -> Tiles:
    """A tensor's tiles, read from every input; a small tensor is read once."""
    spec = Spec(job.work, job.shape)
    count = max(1, -(-spec.rows // row_step(spec)))

    def load(index: int) -> Tile:
        start, stop = row_range(spec, index)
        tensors = [model.rows(name, start, stop) for model, name in job.inputs]
        moved = tuple(tensor.to(device=device, dtype=job.work) for tensor in tensors)
        return Tile(moved, index, start * spec.columns)

    loader = load if is_large(job) else cache(load)
    size = spec.rows * spec.columns
    return Tiles(count, loader, size, job.work, job.name, seed, run)


def row_step(spec: Spec) -> int:
    return max(1, TILE_ELEMENTS // max(1, spec.columns))


def row_range(spec: Spec, index: int) -> tuple[int, int]:
    return index * row_step(spec), min(spec.rows, (index + 1) * row_step(spec))


def blame(job: Job, index: int) -> NoReturn:
    """A tile with a value that is not a number: say in which input, or that the merge made it."""
    start, stop = row_range(Spec(job.work, job.shape), index)
    for model, name in job.inputs:
        rows = model.rows(name, start, stop)
        wrong = (~rows.double().isfinite()).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            value = rows[row, column].item()
            raise SharpenError(f"{model.where}: {name}: {value} at [{start + row}, {column}]")
    raise SharpenError(f"{job.name}: merged values are beyond the range of {job.work} or {job.out}")


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
