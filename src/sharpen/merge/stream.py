"""Makes the tensors of a plan in bounded memory and writes them as a model folder.

Tensors are read, merged and written in tiles so small that they stay in the processor's cache;
reading a tile again for a second pass is cheaper than keeping it. The folder takes its name only
when everything in it is complete. `merge` is called by `sharpen merge`, `search` and `merger`.
"""

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
from sharpen.merge.plan import Plan, TensorJob, build_plan
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.tiles import (
    Array,
    NotFinite,
    Tile,
    Tiles,
    cast,
    compute_dtype,
    round_in_place,
    to_numpy,
)
from sharpen.progress import Advance, progress
from sharpen.records import atomic_folder, read_json, write_json, write_text
from sharpen.types import Json, SharpenError

TILE_ELEMENTS = 1 << 17
_SMALL_MODEL_ELEMENTS = 1 << 24  # a smaller model is not worth several processes
_SPARE_DISK_BYTES = 64 << 20  # for everything but the weights
_SMALL_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "vocab.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
_MoveToDevice = Callable[[np.ndarray], Array]


@dataclass(frozen=True)
class MergeOptions:
    """How to run a merge, as opposed to what to merge."""

    seed: int = 0
    workers: int = 0  # processes; 0: one per core, 8 at most
    device: str = "cpu"
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    show: bool = False  # progress


DEFAULTS = MergeOptions()


def merge(recipe: MergeConfig, out: str | Path, options: MergeOptions = DEFAULTS) -> Json:
    """Merge as the recipe says; return what was made and what differed between the inputs."""
    started = time.perf_counter()
    out = Path(out)
    check_output(out, options.overwrite)
    move = _mover_to(options.device)
    plan = build_plan(recipe)
    size = sum(job.output.nbytes for job in plan.jobs)
    _check_disk_space(out, size)
    bar = progress("merging", len(plan.jobs)) if options.show else nullcontext(lambda count: None)
    with atomic_folder(out) as folder, bar as advance, np.errstate(all="ignore"):
        _write_tensors(plan, folder, options, move, advance)
        _write_small_files(plan, recipe, folder, options.seed)
    return {
        "out": str(out),
        "method": recipe.merge_method,
        "tensors": len(plan.jobs),
        "bytes": size,
        "seconds": round(time.perf_counter() - started, 3),
        "seed": options.seed,
        "device": options.device,
        "notes": plan.notes,
    }


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, in a process that does nothing but merge.

    Otherwise it gives freed tiles back to the system and pages them in again, which takes a third
    of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 256 << 20)  # M_MMAP_THRESHOLD


def check_output(out: Path, overwrite: bool) -> None:
    """Raise if `out` is a file, or a folder with files that may not be replaced."""
    require(out.is_dir() or not out.exists(), f"{out}: exists and is not a folder")
    usable = overwrite or not out.exists() or not any(out.iterdir())
    require(usable, f"{out}: exists and is not empty; choose another folder or --overwrite")


def _check_disk_space(out: Path, size: int) -> None:
    """Raise if the disk has no room for weights of `size` bytes."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    needed = size + _SPARE_DISK_BYTES
    free = shutil.disk_usage(existing).free
    require(free >= needed, f"{existing}: {needed:,} bytes are needed, {free:,} are free")


def _mover_to(device: str) -> _MoveToDevice:
    """Returns the function that moves numpy arrays to a device; raises if there is none such."""
    if device == "cpu":
        return lambda values: values
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SharpenError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    return lambda values: torch.from_numpy(values).to(device)


def _write_tensors(
    plan: Plan, folder: Path, options: MergeOptions, move: _MoveToDevice, advance: Advance
) -> None:
    """Make and write every tensor, the largest first, in one or several processes."""
    jobs = sorted(plan.jobs, key=lambda job: -job.output.size)
    specs = {job.name: job.output for job in plan.jobs}
    workers = options.workers or _default_workers(jobs, options.device)
    with closing(ShardWriter(folder, specs, options.shard_bytes)) as writer:

        def make(index: int) -> None:
            _make_tensor(jobs[index], writer, _tiles_of(jobs[index], options.seed, move))

        if workers == 1:
            for index in range(len(jobs)):
                make(index)
                advance(1)
            return
        # processes, because threads would wait for each other: numpy takes Python's lock at
        # every step
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(workers, context, _start_worker, (make,))
        try:
            for _ in pool.map(_run_in_worker, range(len(jobs))):
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)


def _default_workers(jobs: list[TensorJob], device: str) -> int:
    """Returns one process for a GPU or a small model, otherwise one per core, 8 at most."""
    elements = sum(job.output.size for job in jobs)
    if device != "cpu" or elements < _SMALL_MODEL_ELEMENTS:
        return 1
    return min(8, os.cpu_count() or 1)


_WORKER_TASK: list[Callable[[int], None]] = []  # in a worker process: what it runs


def _start_worker(task: Callable[[int], None]) -> None:
    """Prepare a new worker, which ends with its parent and leaves interrupts to it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _WORKER_TASK.append(task)


def _run_in_worker(index: int) -> None:
    """Run the worker's task; a closure cannot be sent to it, so that it is kept there."""
    _WORKER_TASK[0](index)


def _make_tensor(job: TensorJob, writer: ShardWriter, tiles: Tiles) -> None:
    """Merge and write all tiles of one tensor."""
    try:
        kernel = job.method.kernel(tiles, dict(job.values))

        def merge_and_write(tile: Tile) -> None:
            merged = to_numpy(kernel(tile))
            if job.output.dtype != job.dtype:
                merged = round_in_place(merged, job.dtype)
            writer.write(job.name, tile.start, merged)

        for _ in tiles.map(merge_and_write):
            pass
    except NotFinite:
        _raise_not_finite(job)


def _tiles_of(job: TensorJob, seed: int, move: _MoveToDevice) -> Tiles:
    """Returns a tensor's tiles, read from every input."""
    ranges = job.output.row_ranges(TILE_ELEMENTS)

    def load(index: int) -> Tile:
        first_row, end_row = ranges[index]
        tensors = []
        for model, name in job.inputs:
            tensor = model.read(name, first_row, end_row)
            if model.tensors[name].dtype != job.dtype:
                tensor = round_in_place(cast(tensor, compute_dtype(job.dtype)), job.dtype)
            tensors.append(move(tensor))
        return Tile(tuple(tensors), index, first_row * job.output.columns)

    return Tiles(len(ranges), load, job.output.size, job.dtype, job.name, seed)


def _raise_not_finite(job: TensorJob) -> NoReturn:
    """Raise an error that names the input with a bad value, or says that the merge made it."""
    for model, name in job.inputs:
        for start, stop in job.output.row_ranges(TILE_ELEMENTS):
            rows = model.read(name, start, stop)
            wrong = np.argwhere(~np.isfinite(rows))
            if len(wrong):
                row, column = wrong[0].tolist()
                value = rows[row, column]
                raise SharpenError(f"{model.where}: {name}: {value} at [{start + row}, {column}]")
    dtypes = " or ".join(dict.fromkeys((job.dtype, job.output.dtype)))
    raise SharpenError(f"{job.name}: merged values are beyond the range of {dtypes}")


def _write_small_files(plan: Plan, recipe: MergeConfig, folder: Path, seed: int) -> None:
    """Write config.json, the tokenizer's files, and the recipe that made the model."""
    write_json(folder / "config.json", plan.config)
    donor = plan.vocabulary.donor if plan.vocabulary else plan.donor
    for pattern in _SMALL_FILES:
        for file in donor.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    if plan.vocabulary:
        write_json(folder / "tokenizer.json", plan.vocabulary.tokenizer)
    if plan.chat_template:
        write_text(folder / "chat_template.jinja", plan.chat_template)
        tokenizer_config = folder / "tokenizer_config.json"
        if tokenizer_config.exists():  # some readers prefer a template that stands there
            settings = read_json(tokenizer_config)
            without_template = {k: v for k, v in settings.items() if k != "chat_template"}
            write_json(tokenizer_config, without_template)
    used_recipe = recipe.model_dump(mode="json", exclude_defaults=True) | {"seed": seed}
    text = yaml.safe_dump(used_recipe, allow_unicode=True, sort_keys=False)
    write_text(folder / "merge.yaml", text)
