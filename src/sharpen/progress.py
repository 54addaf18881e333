"""Progress of long work: a bar on a terminal, otherwise a plain line every few seconds.

Called by data building, evaluation, merging and preference training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_LINE_EVERY_S = 10.0
Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yields `advance(count)`, which reports that `count` more items are done."""
    if sys.stderr.isatty():
        yield from _show_bar(title, total)
    else:
        yield from _print_lines(title, total)


def _show_bar(title: str, total: int) -> Iterator[Advance]:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def _print_lines(title: str, total: int) -> Iterator[Advance]:
    started = time.monotonic()
    last_printed = started
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last_printed
        done += count
        now = time.monotonic()
        if done < total and now - last_printed < _LINE_EVERY_S:
            return
        last_printed = now
        elapsed = now - started
        if done < total:
            remaining = elapsed / max(done, 1) * (total - done)
            time_note = f", about {remaining:.0f} s left"
        else:
            time_note = f" in {elapsed:.0f} s"
        print(f"{title}: {done}/{total}{time_note}", file=sys.stderr, flush=True)

    yield advance
