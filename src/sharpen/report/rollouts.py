"""The stored rollouts of an online run: reading them, and drawing them as a list to browse by step
and task. `report/runs.py` puts it on the page of a run; `train/rollout_store.py` writes the files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpen.report.page import Page, escape, render_dialog
from sharpen.types import Json, SharpenError

ROLLOUTS = "rollouts"  # the folder's name in a run
_PATTERN = "step-*.jsonl.gz"
_SUFFIX = ".jsonl.gz"
_SAMPLES_ON_PAGE = 400
_TITLE_CHARACTERS = 100


def rollout_files(run: Path) -> list[Path]:
    """Returns the files of a run's rollouts, the oldest step first."""
    return sorted((run / ROLLOUTS).glob(_PATTERN), key=step_of_file)


def step_of_file(path: Path) -> int:
    """Returns the step whose samples a file holds."""
    return int(path.name.removesuffix(_SUFFIX).removeprefix("step-"))


def read_rollouts(run: str | Path, limit: int = 0) -> Iterator[Json]:
    """Yields stored samples, the newest step first and at most `limit` of them (0: all)."""
    count = 0
    for path in reversed(rollout_files(Path(run))):
        for row in _read_file(path):
            yield row
            count += 1
            if count == limit:
                return


def _read_file(path: Path) -> Iterator[Json]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, EOFError, ValueError) as error:
        raise SharpenError(f"{path}: cannot be read: {error}; remove the file") from None


def draw_rollouts(page: Page, run: Path) -> None:
    """Add the newest samples to a run's page: a step opens its tasks, a task its samples."""
    rows = list(read_rollouts(run, _SAMPLES_ON_PAGE))
    if not rows:
        return
    page.heading("Samples by step and task, the newest first")
    stored = len(rollout_files(run))
    by_step = _group_rows(rows, "step")
    page.text(
        f"{len(rows)} samples of {len(by_step)} steps; {stored} steps are stored in {ROLLOUTS}/",
        "note",
    )
    for step, step_rows in by_step.items():
        by_task = _group_rows(step_rows, "task")
        tasks = [_draw_task(task, task_rows) for task, task_rows in by_task.items()]
        title = f"step {step}: {len(by_task)} tasks, mean reward {_mean_reward(step_rows):.3g}"
        page.details(title, "".join(tasks))


def _draw_task(task: str, rows: Sequence[Json]) -> str:
    """One task with its samples, as markup."""
    solved = sum(bool(row.get("solved")) for row in rows)
    instruction = str(rows[0].get("instruction", ""))[:_TITLE_CHARACTERS]
    title = f"task {task}: {solved} of {len(rows)} solved — {instruction}"
    return _details(title, "".join(_draw_sample(row) for row in rows))


def _draw_sample(row: Json) -> str:
    """One sample: its score in the title, its parts and messages inside."""
    title = f"reward {row['reward']:.3g}, {row['stop']}"
    if row.get("advantage") is not None:
        title += f", advantage {row['advantage']:+.3g}"
    notes = [f"{name} {value:.3g}" for name, value in row.get("parts", {}).items()]
    if row.get("feedback"):
        notes.append(row["feedback"])
    note = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
    return _details(title, note + render_dialog(row.get("messages", ())))


def _details(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def _group_rows(rows: Sequence[Json], key: str) -> dict[Any, list[Json]]:
    """Rows by one of their fields, in order of appearance."""
    groups: dict[Any, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _mean_reward(rows: Sequence[Json]) -> float:
    return sum(row["reward"] for row in rows) / len(rows)
