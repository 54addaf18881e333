"""The descriptions of the built data, read from `sets.yaml` and `frames.yaml`.

`sets.yaml` says which files there are and which kinds of rows they hold; `frames.yaml` holds the
phrases that people use around the phrases of a tool. Every other file of this folder reads them
from here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sharpen.config import Config, parse_config, read_yaml
from sharpen.world.fields import Family

HERE = Path(__file__).parent


class RowKind(Config):
    """One kind of row, as `sets.yaml` describes it; the defaults are those of a dialog.

    Lists of lists and `tools_offered` have one entry per level: dialogs have one level, tasks have
    three (easy, medium, hard).
    """

    scenario: str  # a name registered with `@scenario`
    share: float = 1.0  # of the rows of its part
    task_type: str = ""  # empty for a task
    tools_offered: tuple[int | tuple[int, int], ...] = ((3, 5),)
    same_category: tuple[float, ...] = (1.0,)  # share of the distractors
    plan_shapes: tuple[tuple[str, ...], ...] = ()
    plan_frame: str = ""  # empty: whichever fits the plan
    plan_attempts: int = 8
    fault_at: tuple[int, ...] = ()  # numbers of calls: one of them meets a fault
    mistake_at: tuple[int, ...] = ()  # numbers of calls: one of them is first made wrongly
    must_write: bool = False  # the gold calls have to change the state

    @property
    def is_dialog(self) -> bool:
        """Whether rows of this kind are dialogs to train on; otherwise they are tasks."""
        return bool(self.task_type)


class Part(Config):
    """One part of the data, such as `sft` or `planning`: its folder, size, splits and kinds."""

    folder: str
    rows: int
    splits: dict[Family, float]
    kinds: dict[str, RowKind]


@cache
def parts() -> dict[str, Part]:
    """Returns the parts of `sets.yaml` by name."""
    loaded = {}
    for name, values in read_yaml(HERE / "sets.yaml").items():
        loaded[name] = parse_config(Part, values, f"sets.yaml: {name}")
    return loaded


@cache
def frames(heading: str) -> Any:
    """Returns what `frames.yaml` has under a heading: a split, or `retry`, `haystack` and so on."""
    return read_yaml(HERE / "frames.yaml")[heading]
