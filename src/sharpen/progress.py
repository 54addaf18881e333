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
    """Yields `advance(count)`: a rich bar on a terminal, else a line at most every ten seconds."""
    yield from (rich_bar if sys.stderr.isatty() else plain_lines)(title, total)


def rich_bar(title: str, total: int) -> Iterator[Advance]:
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, *times, console=Console(stderr=True)) as bar:
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
