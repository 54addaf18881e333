"""A run's rows and which of them each step takes: read, chosen, rendered once, then a pure function
of the step, so that a resumed run needs no saved position to see the same rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sharpen.data.sources import read_dialogs, read_rows
from sharpen.render import Renderer
from sharpen.rows import dialog_from_row
from sharpen.train.batching import epoch_order
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.types import Datum, Dialog, SharpenError

if TYPE_CHECKING:
    from sharpen.data.replay import OnlineContinualLearner
    from sharpen.train.scoring import ModelScorer

T = TypeVar("T")
FOCUS = {
    "tool_format_understanding": ("tool_selection", "tool_retrieval"),
    "basic_planning_structure": ("multi_step_planning",),
}


@dataclass
class Phase:
    """Rows that so many steps are drawn from, epoch after epoch."""

    rows: list[Datum]
    steps: int
    ordered: bool = False  # a curriculum is not shuffled
    orders: dict[int, list[int]] = field(default_factory=dict)

    def order(self, epoch: int, seed: int, weights: dict[str, float]) -> list[int]:
        if self.ordered:
            return list(range(len(self.rows)))
        if epoch not in self.orders:
            kinds = [d.task_type for d in self.rows]
            self.orders = {epoch: epoch_order(kinds, seed, epoch, weights)}
        return self.orders[epoch]

    def chosen(self, step: int, count: int, seed: int, weights: dict[str, float]) -> list[int]:
        """The rows of one step: epochs of weighted random order, laid end to end."""
        places = [divmod(at, len(self.rows)) for at in range(step * count, (step + 1) * count)]
        return [self.order(epoch, seed, weights)[offset] for epoch, offset in places]


def within(limit: int, rows: Sequence[tuple[int, T]], source: str) -> list[T]:
    """Those rows (length, row) that fit; the others are counted, never cut."""
    fitting = [row for length, row in rows if length <= limit]
    if len(fitting) < len(rows):
        left_out = f"{len(rows) - len(fitting)} of {len(rows)} rows left out"
        longest = max(length for length, _ in rows)
        print(f"{source}: {left_out}, over max_length ({limit} tokens; longest {longest})")
    return fitting


def shared_out(phases: list[Phase], steps: int) -> list[Phase]:
    """So many steps in all, each phase its share of them: a stream's last round is not cut off."""
    ends = np.cumsum([0, *(phase.steps for phase in phases)])
    ends = np.round(ends * steps / max(ends[-1], 1)).astype(int).tolist()
    return [replace(p, steps=b - a) for p, (a, b) in zip(phases, pairwise(ends), strict=True)]


class TrainingRows:
    """The phases of a run: the warm-up if there is one, then the data, or a stream's rounds."""

    def __init__(self, config: AgentSFTConfig, renderer: Renderer):
        self.config, self.renderer = config, renderer
        self.per_step = config.batch_size * config.gradient_accumulation
        self.replay: OnlineContinualLearner | None = None
        self.dev = self.rendered(config.dev_data) if config.dev_data else []
        rounds = self.rounds()
        self.rows = [row for rows in rounds for row in rows]
        self.phases = [self.phase(rows, config.num_epochs) for rows in rounds]
        first = [self.phase(self.warmup(), 1)] if config.warmup.enabled else []
        left = config.max_steps - sum(phase.steps for phase in first)
        if config.max_steps and left > 0:
            self.phases = shared_out(self.phases, left)
        self.phases = first + self.phases
        self.total = config.max_steps or sum(phase.steps for phase in self.phases)

    def step_rows(self, step: int) -> list[Datum]:
        phases = iter(self.phases)
        phase = next(phases)
        for following in phases:
            if step < phase.steps:
                break
            step, phase = step - phase.steps, following
        config = self.config
        chosen = phase.chosen(step, self.per_step, config.seed, config.task_weights)
        return [phase.rows[index] for index in chosen]

    def phase(self, rows: list[Datum], epochs: int) -> Phase:
        ordered = self.config.use_coreset_selection and "curriculum" in self.config.coreset_strategy
        return Phase(rows, math.ceil(len(rows) / self.per_step) * epochs, ordered)

    def rounds(self) -> list[list[Datum]]:
        """All rows as one round; a stream's rounds are its sources, or its task types, each with
        rows of earlier rounds mixed in."""
        config = self.config
        select = config.use_coreset_selection
        sources = [self.rendered(name, select) for name in config.train_data.split(",")]
        if not config.use_online_continual:
            return [[row for rows in sources for row in rows]]
        if len(sources) == 1:
            by_type: dict[str, list[Datum]] = {}
            for row in sources[0]:
                by_type.setdefault(row.task_type, []).append(row)
            sources = list(by_type.values())
        return self.with_replay(sources)

    def with_replay(self, rounds: list[list[Datum]]) -> list[list[Datum]]:
        """Each round with rows of earlier ones; what is kept at the end goes on to the next run."""
        from sharpen.data.replay import OnlineContinualLearner

        config, strategy = self.config, self.config.continual_strategy
        size, ratio = config.continual_buffer_size, config.continual_replay_ratio
        self.replay = OnlineContinualLearner(size, ratio, strategy, config.seed)
        if config.continual_buffer:
            self.replay.load(config.continual_buffer)
        mixed = []
        for rows in rounds:
            losses = self.scorer().datum_losses(rows) if strategy == "loss_weighted" else None
            mixed.append(self.replay.mix(rows, losses))
        return mixed

    def scorer(self) -> ModelScorer:
        from sharpen.train.scoring import ModelScorer

        return ModelScorer.load(self.config.base_model, self.config.device)

    def warmup(self) -> list[Datum]:
        wanted = self.config.warmup
        kinds = {kind for focus in wanted.focus for kind in FOCUS[focus]}
        name = wanted.data_source
        if ":" not in name and not Path(name).is_file():
            name = f"{name}:train"
        found = [row for row in self.rendered(name) if row.task_type in kinds]
        if not found:
            raise SharpenError(f"warmup: {name} has no rows of {', '.join(sorted(kinds))}")
        chance = random.Random(f"warmup:{self.config.seed}")
        return chance.sample(found, min(wanted.samples, len(found)))

    def rendered(self, source: str, select: bool = False) -> list[Datum]:
        """Dialogs and plain texts of a source. Rows over max_length are counted and left out, never
        cut; a plain text is trained on whole, in pieces."""
        limit = self.config.max_length
        dialogs, pieces = [], []
        for row in read_rows(source):
            if "text" in row.value and "messages" not in row.value:
                pieces += self.renderer.plain(row.value["text"], row.where, limit)
            else:
                dialogs.append(dialog_from_row(row.value, row.where))
        if select:
            dialogs = self.coreset(dialogs)
        datums = list(self.renderer.render(dialogs))
        fitting = within(limit, [(len(d.ids), d) for d in datums], source)
        if not fitting and not pieces:
            found = f"of {len(datums)}; max_length {limit}"
            raise SharpenError(f"{source}: no row to train on ({found})")
        return fitting + pieces

    def coreset(self, dialogs: Sequence[Dialog]) -> list[Dialog]:
        from sharpen.data.coreset import CoresetSelector

        config, scorer = self.config, self.scorer()
        strategy, size = config.coreset_strategy, config.coreset_target_size
        influence: Any = None
        if strategy == "gradient":
            from sharpen.train.gradients import GradientInfluence

            if not config.dev_data:
                raise SharpenError("coreset_strategy=gradient: dev_data says what to be useful for")
            target = list(read_dialogs(config.dev_data))
            influence = GradientInfluence(scorer.model, self.renderer, target)
        selector = CoresetSelector(strategy, size, scorer, seed=config.seed, influence=influence)
        chosen = selector.select(dialogs)
        print(f"coreset ({strategy}): {len(chosen)} of {len(dialogs)} rows")
        return chosen

    def __str__(self) -> str:
        kinds = Counter(d.task_type or "untyped" for d in self.rows)
        tokens = sum(len(d.ids) for d in self.rows)
        shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        return f"{len(self.rows)} rows to train on, {tokens} tokens ({shown})"
