"""From scored trajectories to training rows, which hold exactly the ids that were sampled, and to
the figures of a step. GRPO, PPO, DPO and pair sampling call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sharpen.scored_rollout import TrajectoryGroup, mean_scores, summarize_reasons
from sharpen.types import Datum, Json, SharpenError, Trajectory, Turn

_RowKey = tuple[bytes, bytes, bytes]


def trajectory_to_datums(trajectory: Trajectory) -> list[Datum]:
    """Returns the ids that the model saw, with those that it sampled marked.

    Turns make one row as long as every prompt begins with the prompt and answer before it;
    otherwise a new row begins.
    """
    runs: list[list[Turn]] = []
    for turn in trajectory.turns:
        if not turn.ids:
            continue
        if not turn.prompt_ids:
            raise SharpenError(
                f"task {trajectory.task_id}: its policy returns no token ids, so there is nothing "
                "to train on; sample with a LocalPolicy"
            )
        if runs and _continues(runs[-1][-1], turn):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [_join_turns(run, trajectory.task_id) for run in runs]


def _continues(earlier: Turn, turn: Turn) -> bool:
    """Whether the prompt of a turn begins with the earlier turn's prompt and answer."""
    before = (*earlier.prompt_ids, *earlier.ids)
    return turn.prompt_ids[: len(before)] == before


def _join_turns(turns: Sequence[Turn], task_id: str) -> Datum:
    """One row of consecutive turns; the column `sampler` holds the sampler's log-probabilities."""
    last = turns[-1]
    ids = np.array([*last.prompt_ids, *last.ids], np.int32)
    mask = np.zeros(len(ids), bool)
    logprobs_T = np.zeros(len(ids), np.float32)
    has_logprobs = all(len(turn.logprobs) == len(turn.ids) for turn in turns)
    for turn in turns:
        start = len(turn.prompt_ids)
        end = start + len(turn.ids)
        mask[start:end] = True
        if has_logprobs:
            logprobs_T[start:end] = turn.logprobs
    columns = {"sampler": logprobs_T[mask]} if has_logprobs else {}
    return Datum(ids, mask, task_id, columns=columns)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """The training rows of a step's samples."""

    rows: list[Datum]
    sample_of_row: np.ndarray  # the number of the sample that each row belongs to
    tokens: np.ndarray  # trained tokens of each sample


def rows_of_groups(groups: Sequence[TrajectoryGroup]) -> SampleRows:
    """Returns the rows of all samples of all groups, in order."""
    rows: list[Datum] = []
    sample_of_row: list[int] = []
    tokens: list[int] = []
    for group in groups:
        for sample in group.samples:
            sample_rows = trajectory_to_datums(sample)
            sample_of_row += [len(tokens)] * len(sample_rows)
            tokens.append(sum(int(row.mask.sum()) for row in sample_rows))
            rows += sample_rows
    return SampleRows(rows, np.array(sample_of_row, np.int64), np.array(tokens, np.int64))


def merge_equal_rows(rows: Sequence[Datum]) -> list[Datum]:
    """Rows with the same ids, mask and advantage become one that weighs as much as all of them."""
    equal_rows: dict[_RowKey, list[Datum]] = {}
    for row in rows:
        key = (row.ids.tobytes(), row.mask.tobytes(), row.columns["advantage"].tobytes())
        equal_rows.setdefault(key, []).append(row)
    merged = []
    for same in equal_rows.values():
        merged.append(replace(same[0], weight=sum(row.weight for row in same)))
    return merged


def with_column(
    rows: Sequence[Datum], name: str, values: Sequence[np.ndarray] | np.ndarray
) -> list[Datum]:
    """Returns the rows with a further column. `values` has one array per row, or one number for
    all of a row's trained tokens."""
    extended = []
    for row, value in zip(rows, values, strict=True):
        column = np.broadcast_to(np.float32(value), int(row.mask.sum()))
        extended.append(replace(row, columns={**row.columns, name: column}))
    return extended


def sample_figures(groups: Sequence[TrajectoryGroup]) -> Json:
    """Returns what the metrics say of a step's samples."""
    samples = [sample for group in groups for sample in group.samples]
    dropped = [reason for group in groups for reason in group.dropped]
    if not samples:
        raise SharpenError(f"no sample of the step could be scored: {summarize_reasons(dropped)}")
    means = mean_scores(samples)
    figures: Json = {}
    for name, value in means.items():
        if name:
            figures[f"reward_{name}"] = value
    turns = sum(len(sample.turns) for sample in samples)
    lengths = [sum(len(turn.ids) for turn in sample.turns) for sample in samples]
    figures |= {
        "reward": means[""],
        "reward_std": float(np.std([sample.score.value for sample in samples if sample.score])),
        "samples": len(samples),
        "dropped": len(dropped),
        "turns": turns / len(samples),
        "length": float(np.mean(lengths)),
        "longest": max(lengths),
    }
    if dropped:
        figures["dropped_why"] = summarize_reasons(dropped)
    stops = Counter(sample.stop.value for sample in samples)
    for name, count in sorted(stops.items()):
        figures[f"stop_{name}"] = count
    return figures
