"""Rehearsal: rows of earlier rounds, kept in a buffer of fixed size, are trained on again. Every
row draws a key when it is seen, ln(u) / weight with u uniform, and the highest keys stay: a sample
in proportion to the weights (Efraimidis and Spirakis). What is replayed is drawn by fresh keys."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.records import dump_row, read_json, write_text
from sharpen.rows import dialog_from_row, dialog_to_row
from sharpen.types import Datum, Dialog, Json, RowError, SharpenError

STRATEGIES = ("reservoir", "loss_weighted", "class_balanced")
LEAST_WEIGHT = 1e-6  # a row without loss can still be drawn
Kept = tuple[float, int, int, float, Any]  # key, serial number, round, weight, row


class OnlineContinualLearner:
    """`mix(rows)` is a round: the new rows, dialogs or datums, and `replay_ratio` times as many of
    earlier rounds. `class_balanced` keeps and draws the task types evenly."""

    def __init__(
        self, buffer_size: int, replay_ratio: float, strategy: str = "reservoir", seed: int = 0
    ):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise SharpenError(f"replay strategy {strategy!r} is unknown; known are {known}")
        if buffer_size < 1 or not 0 <= replay_ratio < math.inf:
            raise SharpenError(f"replay: a buffer of {buffer_size} rows, a ratio of {replay_ratio}")
        self.buffer_size, self.replay_ratio, self.strategy = buffer_size, replay_ratio, strategy
        self.chance = random.Random(f"replay:{seed}")
        self.heaps: dict[str, list[Kept]] = {}  # lowest key first; one a class if they are balanced
        self.round, self.seen = 1, 0

    def __len__(self) -> int:
        return sum(map(len, self.heaps.values()))

    def mix(self, rows: Sequence[Any], losses: Sequence[float] | None = None) -> list[Any]:
        """One whole round: the rows and those replayed beside them; the rows are then kept."""
        wanted, kept = round(self.replay_ratio * len(rows)), len(self)
        replayed = self.replay(wanted)
        told = f"{len(replayed)} rows replayed ({wanted} wanted, {kept} kept)"
        print(f"round {self.round}: {told if self.round > 1 else 'nothing to replay yet'}")
        self.observe(rows, losses)
        self.round += 1
        return [*rows, *replayed]

    def observe(self, rows: Sequence[Any], losses: Sequence[float] | None = None) -> None:
        """Offer rows to the buffer; they may be replayed when `round` has gone up."""
        for row, weight in zip(rows, self.weights(rows, losses), strict=True):
            self.seen += 1
            name = row.task_type if self.strategy == "class_balanced" else ""
            heap = self.heaps.setdefault(name, [])
            heapq.heappush(heap, (self.key(weight), self.seen, self.round, weight, row))
            if len(self) > self.buffer_size:
                # of the largest classes the row's own: a class that once gave way then never grows
                # again, and stays a uniform sample of its rows
                heapq.heappop(max(self.heaps.values(), key=lambda h: (len(h), h is heap)))

    def replay(self, count: int) -> list[Any]:
        """At most `count` different rows, none of the current round."""
        drawn: list[tuple[int, float, Any]] = []  # place in its class, key turned round, row
        for heap in self.heaps.values():
            old = [(-self.key(kept[3]), kept[4]) for kept in heap if kept[2] < self.round]
            old.sort(key=lambda found: found[0])
            drawn += [(place, *found) for place, found in enumerate(old)]
        drawn.sort(key=lambda found: found[:2])  # each class's first, then each one's second …
        return [row for _, _, row in drawn[:count]]

    def weights(self, rows: Sequence[Any], losses: Sequence[float] | None) -> list[float]:
        if self.strategy != "loss_weighted":
            return [1.0] * len(rows)
        if losses is None:
            losses = [getattr(row, "metadata", {}).get("loss", math.nan) for row in rows]
        for row, loss in zip(rows, losses, strict=True):
            if not math.isfinite(loss):
                raise RowError(row.id, f"loss_weighted replay needs the row's loss, found {loss}")
        return [max(loss, LEAST_WEIGHT) for loss in losses]

    def key(self, weight: float) -> float:
        return math.log(1.0 - self.chance.random()) / weight

    def state(self) -> Json:
        """Everything that later calls depend on, as plain JSON values."""
        heaps = {n: [[*kept[:4], plain(kept[4])] for kept in h] for n, h in self.heaps.items()}
        values = {"round": self.round, "seen": self.seen, "chance": self.chance.getstate()}
        return {"kept_by": [self.buffer_size, self.strategy], "heaps": heaps} | values

    def load_state(self, state: Json) -> None:
        if state["kept_by"] != (asked := [self.buffer_size, self.strategy]):
            raise SharpenError(f"the replay buffer was kept by {state['kept_by']}, not by {asked}")
        version, numbers, spare = state["chance"]
        self.chance.setstate((version, tuple(numbers), spare))
        self.round, self.seen = state["round"], state["seen"]
        heaps = state["heaps"].items()
        self.heaps = {name: [(*k[:4], noun(k[4])) for k in heap] for name, heap in heaps}

    def save(self, path: str | Path) -> None:
        write_text(path, dump_row(self.state()))

    def load(self, path: str | Path) -> None:
        state = read_json(path)
        if not isinstance(state, dict) or "kept_by" not in state:
            raise SharpenError(f"{path}: not a replay buffer")
        self.load_state(state)


def plain(row: Dialog | Datum) -> Json:
    if isinstance(row, Dialog):
        return dialog_to_row(row)
    about = [row.id, row.task_type, row.weight]
    return {"ids": row.ids.tolist(), "mask": row.mask.astype(int).tolist(), "about": about}


def noun(value: Json) -> Dialog | Datum:
    if "ids" not in value:
        return dialog_from_row(value)
    return Datum(np.array(value["ids"], np.int32), np.array(value["mask"], bool), *value["about"])
