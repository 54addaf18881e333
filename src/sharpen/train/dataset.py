"""A run's rows, and which of them each step takes.

The SFT trainer reads, selects and renders its rows once with `TrainingRows`. The rows of a step are
then a pure function of the step, so that a resumed run needs no saved position to see the same
rows. DPO and reward models share `Phase`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
_TASK_TYPES_OF_FOCUS = {
    "tool_format_understanding": ("tool_selection", "tool_retrieval"),
    "basic_planning_structure": ("multi_step_planning",),
}


@dataclass
class Phase:
    """Rows that a number of steps are drawn from, epoch after epoch."""

    rows: list[Datum]
    steps: int
    ordered: bool = False  # a curriculum is not shuffled
    cached_order: dict[int, list[int]] = field(default_factory=dict)  # epoch → its order

    def step_indices(
        self, step: int, count: int, seed: int, weights: dict[str, float]
    ) -> list[int]:
        """Return the numbers of the `count` rows of a step: epochs of weighted random order, laid
        end to end."""
        row_numbers = []
        for position in range(step * count, (step + 1) * count):
            epoch, offset = divmod(position, len(self.rows))
            row_numbers.append(self._epoch_order(epoch, seed, weights)[offset])
        return row_numbers

    def _epoch_order(self, epoch: int, seed: int, weights: dict[str, float]) -> list[int]:
        """Return the order of the rows in one epoch; that of the last one asked for is cached."""
        if self.ordered:
            return list(range(len(self.rows)))
        if epoch not in self.cached_order:
            task_types = [row.task_type for row in self.rows]
            self.cached_order = {epoch: epoch_order(task_types, seed, epoch, weights)}
        return self.cached_order[epoch]


def drop_long_rows(limit: int, rows: Sequence[tuple[int, T]], source: str) -> list[T]:
    """Return the rows, given as (length, row), that fit. The others are counted, never cut."""
    fitting = [row for length, row in rows if length <= limit]
    if len(fitting) < len(rows):
        dropped = len(rows) - len(fitting)
        longest = max(length for length, _ in rows)
        print(
            f"{source}: {dropped} of {len(rows)} rows left out, over max_length "
            f"({limit} tokens; longest {longest})"
        )
    return fitting


def _share_out_steps(phases: list[Phase], steps: int) -> list[Phase]:
    """Give the phases `steps` steps in all, each its share, so that the last round of a stream is
    not cut off."""
    own_ends = np.cumsum([0, *(phase.steps for phase in phases)])
    scaled_ends = np.round(own_ends * steps / max(own_ends[-1], 1))
    ends = scaled_ends.astype(int).tolist()
    scaled = []
    for number, phase in enumerate(phases):
        scaled.append(replace(phase, steps=ends[number + 1] - ends[number]))
    return scaled


class TrainingRows:
    """The phases of a run: the warm-up if there is one, then the data, or the rounds of a stream.

    `rows` are the training rows without the warm-up, `dev` the dev rows, `total` the number of
    steps.
    """

    def __init__(self, config: AgentSFTConfig, renderer: Renderer):
        self.config = config
        self.renderer = renderer
        self.rows_per_step = config.batch_size * config.gradient_accumulation
        self.replay: OnlineContinualLearner | None = None
        self.dev = self._load_rows(config.dev_data) if config.dev_data else []
        rounds = self._load_rounds()
        self.rows = [row for rows in rounds for row in rows]
        phases = [self._make_phase(rows, config.num_epochs) for rows in rounds]
        warmup_phases = []
        if config.warmup.enabled:
            warmup_phases = [self._make_phase(self._load_warmup_rows(), 1)]
        steps_after_warmup = config.max_steps - sum(phase.steps for phase in warmup_phases)
        if config.max_steps and steps_after_warmup > 0:
            phases = _share_out_steps(phases, steps_after_warmup)
        self.phases = warmup_phases + phases
        self.total = config.max_steps or sum(phase.steps for phase in self.phases)

    def step_rows(self, step: int) -> list[Datum]:
        """Return the rows of a step of the run."""
        phase, phase_step = self._find_phase(step)
        row_numbers = phase.step_indices(
            phase_step, self.rows_per_step, self.config.seed, self.config.task_weights
        )
        return [phase.rows[number] for number in row_numbers]

    def _find_phase(self, step: int) -> tuple[Phase, int]:
        """Return the phase of a step and the step's number in it; the last phase has no end."""
        for phase in self.phases[:-1]:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        return self.phases[-1], step

    def _make_phase(self, rows: list[Datum], epochs: int) -> Phase:
        config = self.config
        ordered = config.use_coreset_selection and "curriculum" in config.coreset_strategy
        steps_per_epoch = math.ceil(len(rows) / self.rows_per_step)
        return Phase(rows, steps_per_epoch * epochs, ordered)

    # Sources ---------------------------------------------------------------------------------

    def _load_rounds(self) -> list[list[Datum]]:
        """Return all rows as one round. A stream's rounds are its sources, or the task types of
        its only source, each with rows of earlier rounds mixed in."""
        config = self.config
        sources = []
        for name in config.train_data.split(","):
            sources.append(self._load_rows(name, config.use_coreset_selection))
        if not config.use_online_continual:
            return [[row for rows in sources for row in rows]]
        if len(sources) == 1:
            rows_by_type: dict[str, list[Datum]] = {}
            for row in sources[0]:
                rows_by_type.setdefault(row.task_type, []).append(row)
            sources = list(rows_by_type.values())
        return self._mix_replay_in(sources)

    def _mix_replay_in(self, rounds: list[list[Datum]]) -> list[list[Datum]]:
        """Add rows of earlier rounds to each round; the buffer at the end is for the next run."""
        from sharpen.data.replay import OnlineContinualLearner

        config = self.config
        self.replay = OnlineContinualLearner(
            config.continual_buffer_size,
            config.continual_replay_ratio,
            config.continual_strategy,
            config.seed,
        )
        if config.continual_buffer:
            self.replay.load(config.continual_buffer)
        mixed_rounds = []
        for rows in rounds:
            losses = None
            if config.continual_strategy == "loss_weighted":
                losses = self._load_scorer().datum_losses(rows)
            mixed_rounds.append(self.replay.mix(rows, losses))
        return mixed_rounds

    def _load_warmup_rows(self) -> list[Datum]:
        """Sample the warm-up's rows among those whose task type is in its focus."""
        warmup = self.config.warmup
        task_types: set[str] = set()
        for focus in warmup.focus:
            task_types |= set(_TASK_TYPES_OF_FOCUS[focus])
        source = warmup.data_source
        if ":" not in source and not Path(source).is_file():
            source = f"{source}:train"
        candidates = [row for row in self._load_rows(source) if row.task_type in task_types]
        if not candidates:
            raise SharpenError(
                f"warmup: {source} has no rows of {', '.join(sorted(task_types))}; "
                "choose another data_source or focus"
            )
        generator = random.Random(f"warmup:{self.config.seed}")
        return generator.sample(candidates, min(warmup.samples, len(candidates)))

    def _load_rows(self, source: str, select: bool = False) -> list[Datum]:
        """Read and render the dialogs and plain texts of a source.

        Dialogs over max_length are counted and left out, never cut; `select` reduces them to a
        coreset. A plain text is trained on whole, in pieces.
        """
        limit = self.config.max_length
        dialogs = []
        text_pieces = []
        for row in read_rows(source):
            if "text" in row.value and "messages" not in row.value:
                text_pieces += self.renderer.plain(row.value["text"], row.where, limit)
            else:
                dialogs.append(dialog_from_row(row.value, row.where))
        if select:
            dialogs = self._select_coreset(dialogs)
        datums = list(self.renderer.render(dialogs))
        fitting = drop_long_rows(limit, [(len(datum.ids), datum) for datum in datums], source)
        if not fitting and not text_pieces:
            raise SharpenError(
                f"{source}: no row to train on (of {len(datums)}; max_length {limit})"
            )
        return fitting + text_pieces

    # Coresets --------------------------------------------------------------------------------

    def _select_coreset(self, dialogs: Sequence[Dialog]) -> list[Dialog]:
        """Select the rows to train on by the configured strategy."""
        from sharpen.data.coreset import CoresetSelector

        config = self.config
        strategy = config.coreset_strategy
        scorer = self._load_scorer()
        selector = CoresetSelector(
            strategy,
            config.coreset_target_size,
            scorer,
            seed=config.seed,
            influence=self._make_influence(scorer) if strategy == "gradient" else None,
        )
        selected = selector.select(dialogs)
        print(f"coreset ({strategy}): {len(selected)} of {len(dialogs)} rows")
        return selected

    def _make_influence(self, scorer: ModelScorer) -> Any:
        """Return a function of dialogs that tells how useful each one is for the dev data."""
        from sharpen.train.gradients import GradientInfluence

        if not self.config.dev_data:
            raise SharpenError(
                "coreset_strategy=gradient: needs dev_data, the rows that training is to help with"
            )
        target = list(read_dialogs(self.config.dev_data))
        return GradientInfluence(scorer.model, self.renderer, target)

    def _load_scorer(self) -> ModelScorer:
        """Load the base model to score rows with."""
        from sharpen.train.scoring import ModelScorer

        return ModelScorer.load(self.config.base_model, self.config.device)

    def __str__(self) -> str:
        rows_by_type = Counter(row.task_type or "untyped" for row in self.rows)
        tokens = sum(len(row.ids) for row in self.rows)
        types = ", ".join(f"{name} {count}" for name, count in rows_by_type.most_common())
        return f"{len(self.rows)} rows to train on, {tokens} tokens ({types})"
