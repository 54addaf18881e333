"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LINE_EVERY_S = 10.0
Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yields `advance(count)`. On a terminal a rich bar with the time left; else a line at most
    every ten seconds."""
    if sys.stderr.isatty():
        yield from rich_bar(title, total)
    else:
        yield from plain_lines(title, total)


def rich_bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def plain_lines(title: str, total: int) -> Iterator[Advance]:
    started = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if done >= total or now - shown >= LINE_EVERY_S:
            shown = now
            left = (now - started) / max(done, 1) * (total - done)
            rest = f", about {left:.0f} s left" if done < total else f" in {now - started:.0f} s"
            print(f"{title}: {done}/{total}{rest}", file=sys.stderr, flush=True)

    yield advance
