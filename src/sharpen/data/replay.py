"""Replay for continual learning: rows of earlier rounds, kept in a buffer of fixed size.

Every row draws a key when it is seen, ln(u) / weight with u uniform, and the rows with the highest
keys stay: a sample in proportion to the weights (Efraimidis and Spirakis). Which rows are replayed
is decided by fresh keys. `train.dataset` and `train.continual` call it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sharpen.records import dump_row, read_json, write_text
from sharpen.rows import dialog_from_row, dialog_to_row
from sharpen.types import Datum, Dialog, Json, RowError, SharpenError

_STRATEGIES = ("reservoir", "loss_weighted", "class_balanced")
_LEAST_WEIGHT = 1e-6  # so that a row without loss can still be drawn


class _Entry(NamedTuple):
    """A row in the buffer. Entries are ordered by key; the serial number breaks ties."""

    key: float
    serial: int
    round: int
    weight: float
    row: Any


class OnlineContinualLearner:
    """A replay buffer for training in rounds.

    `mix(rows)` is one round: it returns the new rows, dialogs or datums, and `replay_ratio` times
    as many of earlier rounds. `class_balanced` keeps and draws the same number of each task type.
    """

    def __init__(
        self, buffer_size: int, replay_ratio: float, strategy: str = "reservoir", seed: int = 0
    ):
        if strategy not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise SharpenError(f"replay strategy {strategy!r} is unknown; known are {known}")
        if buffer_size < 1 or not 0 <= replay_ratio < math.inf:
            raise SharpenError(
                f"replay: a buffer of {buffer_size} rows and a ratio of {replay_ratio}; the buffer "
                "needs at least 1 row and the ratio a finite number from 0 on"
            )
        self.buffer_size = buffer_size
        self.replay_ratio = replay_ratio
        self.strategy = strategy
        self.round = 1
        self.seen = 0
        # lowest key first; one heap per task type if they are balanced, otherwise one for all
        self.heaps: dict[str, list[_Entry]] = {}
        self._rng = random.Random(f"replay:{seed}")

    def __len__(self) -> int:
        return sum(len(heap) for heap in self.heaps.values())

    def mix(self, rows: Sequence[Any], losses: Sequence[float] | None = None) -> list[Any]:
        """Run one round: return the new rows and the replayed ones, and observe the new rows."""
        count = round(self.replay_ratio * len(rows))
        kept_count = len(self)
        replayed = self.replay(count)
        if self.round > 1:
            summary = f"{len(replayed)} rows replayed ({count} wanted, {kept_count} kept)"
        else:
            summary = "nothing to replay yet"
        print(f"round {self.round}: {summary}")
        self.observe(rows, losses)
        self.round += 1
        return [*rows, *replayed]

    def observe(self, rows: Sequence[Any], losses: Sequence[float] | None = None) -> None:
        """Offer rows to the buffer. They can be replayed once `round` has gone up."""
        for row, weight in zip(rows, self._weights(rows, losses), strict=True):
            self.seen += 1
            heap_name = row.task_type if self.strategy == "class_balanced" else ""
            heap = self.heaps.setdefault(heap_name, [])
            entry = _Entry(self._draw_key(weight), self.seen, self.round, weight, row)
            heapq.heappush(heap, entry)
            if len(self) > self.buffer_size:
                heapq.heappop(self._largest_heap(heap))

    def _largest_heap(self, preferred: list[_Entry]) -> list[_Entry]:
        """Return the largest heap; of several, `preferred`, the one of the row that was just added.

        A class that once gave way to another then never grows again, and stays a uniform sample of
        its rows.
        """
        return max(self.heaps.values(), key=lambda heap: (len(heap), heap is preferred))

    def replay(self, count: int) -> list[Any]:
        """Draw at most `count` different rows, none of the current round."""
        candidates: list[tuple[int, float, Any]] = []  # rank in its heap, negated key, row
        for heap in self.heaps.values():
            earlier = []
            for entry in heap:
                if entry.round < self.round:
                    earlier.append((-self._draw_key(entry.weight), entry.row))
            earlier.sort(key=lambda pair: pair[0])
            for rank, (negated_key, row) in enumerate(earlier):
                candidates.append((rank, negated_key, row))
        # the first of every class, then the second of every class, and so on
        candidates.sort(key=lambda candidate: candidate[:2])
        return [row for _, _, row in candidates[:count]]

    def _weights(self, rows: Sequence[Any], losses: Sequence[float] | None) -> list[float]:
        """Return one positive weight per row: its loss, or 1 if the strategy ignores losses."""
        if self.strategy != "loss_weighted":
            return [1.0] * len(rows)
        if losses is None:
            losses = [getattr(row, "metadata", {}).get("loss", math.nan) for row in rows]
        for row, loss in zip(rows, losses, strict=True):
            if not math.isfinite(loss):
                raise RowError(row.id, f"loss_weighted replay needs the row's loss, found {loss}")
        return [max(loss, _LEAST_WEIGHT) for loss in losses]

    def _draw_key(self, weight: float) -> float:
        return math.log(1.0 - self._rng.random()) / weight

    def state(self) -> Json:
        """Return everything that later calls depend on, as plain JSON values."""
        heaps = {}
        for name, heap in self.heaps.items():
            heaps[name] = [[*entry[:-1], _row_to_json(entry.row)] for entry in heap]
        return {
            "kept_by": [self.buffer_size, self.strategy],
            "heaps": heaps,
            "round": self.round,
            "seen": self.seen,
            "chance": self._rng.getstate(),
        }

    def load_state(self, state: Json) -> None:
        """Continue from what `state` returned, of a buffer of the same size and strategy."""
        expected = [self.buffer_size, self.strategy]
        if state["kept_by"] != expected:
            raise SharpenError(
                f"the replay buffer was kept by {state['kept_by']}, not by {expected}"
            )
        version, numbers, gauss_next = state["chance"]
        self._rng.setstate((version, tuple(numbers), gauss_next))
        self.round = state["round"]
        self.seen = state["seen"]
        self.heaps = {}
        for name, heap in state["heaps"].items():
            entries = []
            for key, serial, round_number, weight, row in heap:
                entries.append(_Entry(key, serial, round_number, weight, _row_from_json(row)))
            self.heaps[name] = entries

    def save(self, path: str | Path) -> None:
        """Write the buffer to a JSON file."""
        write_text(path, dump_row(self.state()))

    def load(self, path: str | Path) -> None:
        """Continue with the buffer that `save` wrote."""
        state = read_json(path)
        if not isinstance(state, dict) or "kept_by" not in state:
            raise SharpenError(f"{path}: not a replay buffer")
        self.load_state(state)


def _row_to_json(row: Dialog | Datum) -> Json:
    if isinstance(row, Dialog):
        return dialog_to_row(row)
    return {
        "ids": row.ids.tolist(),
        "mask": row.mask.astype(int).tolist(),
        "about": [row.id, row.task_type, row.weight],
    }


def _row_from_json(value: Json) -> Dialog | Datum:
    if "ids" not in value:
        return dialog_from_row(value)
    ids = np.array(value["ids"], np.int32)
    mask = np.array(value["mask"], bool)
    return Datum(ids, mask, *value["about"])
