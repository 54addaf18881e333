"""Preference pairs from a policy's own samples: the best and the worst answer to each task. DPO
samples its rounds with it, and `sharpen.generate_preference_pairs` is it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from sharpen.calls import assistant_text
from sharpen.kinds import KindEnvironment
from sharpen.progress import progress
from sharpen.render import Renderer
from sharpen.scored_rollout import PlaySettings, TrajectoryGroup, play_and_score
from sharpen.train.preference_rows import ids_to_row, tokenizer_hash
from sharpen.train.rl_data import trajectory_to_datums
from sharpen.types import (
    Json,
    MakeEnvironment,
    Message,
    Policy,
    Preference,
    Reward,
    Sampling,
    SharpenError,
    Task,
    Trajectory,
)

_TASKS_AT_ONCE = 256  # whose episodes are under way together


class NoPairs(SharpenError):
    """No task has samples that differ in their score."""


class _RenderingPolicy(Policy, Protocol):
    """A policy that knows how its dialogs become ids."""

    renderer: Renderer


@dataclass(slots=True)
class _Counts:
    """What became of the tasks, for the summary."""

    without_pair: Counter[str] = field(default_factory=Counter)  # reason → tasks
    dropped: Counter[str] = field(default_factory=Counter)  # reason → samples
    scores: list[float] = field(default_factory=list)


def generate_preference_pairs(
    policy: _RenderingPolicy,
    tasks: Sequence[Task],
    reward: Reward,
    make_environment: MakeEnvironment = KindEnvironment,
    samples: int = 4,
    sampling: Sampling = Sampling(temperature=1.0),  # noqa: B008 - frozen
    max_turns: int = 0,
) -> list[Preference]:
    """Returns the best and the worst of `samples` of each task, by the reward against the task's
    own gold. Tasks whose samples are all equally good give no pair.

    `policy` gives ids (`LocalPolicy`). `max_turns` of 0 takes the limit of each task's kind.
    """
    how = PlaySettings(
        reward,
        sampling,
        make_environment,
        max_turns,
        samples,
    )
    tokenizer = tokenizer_hash(policy.renderer.tokenizer)
    counts = _Counts()
    pairs: list[Preference] = []
    with progress("sampling pairs", len(tasks)) as advance:
        for start in range(0, len(tasks), _TASKS_AT_ONCE):
            part = tasks[start : start + _TASKS_AT_ONCE]
            part_sampling = replace(sampling, seed=sampling.seed + start)
            for group in play_and_score(policy, part, replace(how, sampling=part_sampling)):
                counts.dropped.update(group.dropped)
                counts.scores += group.rewards.tolist()
                pair = _pair_from_group(group, make_environment, tokenizer)
                if isinstance(pair, str):
                    counts.without_pair[pair] += 1
                else:
                    pairs.append(pair)
            advance(len(part))
    summary = _summarize(len(tasks), samples, len(pairs), counts)
    if not pairs:
        advice = "raise num_samples or temperature" if counts.scores else "look at the reward"
        raise NoPairs(f"no preference pair {summary}; {advice}")
    print(summary)
    return pairs


def _summarize(tasks: int, samples: int, pairs: int, counts: _Counts) -> str:
    outcomes = [f"{pairs} pairs"]
    for reason, count in counts.without_pair.items():
        outcomes.append(f"{count} {reason}")
    summary = f"of {tasks} tasks with {samples} samples each: {', '.join(outcomes)}"
    if counts.scores:
        summary += f", mean score {np.mean(counts.scores):.2f}"
    for reason, count in counts.dropped.most_common(1):
        total = counts.dropped.total()
        summary += f"; {total} samples have no score, {count} of them by {reason}"
    return summary


def _pair_from_group(
    group: TrajectoryGroup, make_environment: MakeEnvironment, tokenizer: str
) -> Preference | str:
    """The pair, or why there is none."""
    if len(group.samples) < 2:
        return "without two scored samples"
    if group.flat:
        return "ties"
    best = group.samples[int(group.rewards.argmax())]
    worst = group.samples[int(group.rewards.argmin())]
    best_rows = trajectory_to_datums(best)
    worst_rows = trajectory_to_datums(worst)
    if len(best_rows) != 1 or len(worst_rows) != 1:
        return "with turns that are not one row of ids"
    if np.array_equal(best_rows[0].ids, worst_rows[0].ids):  # the reward contradicts itself
        return "ties"
    task = group.task
    ids: Json = {
        "tokenizer": tokenizer,
        "chosen": ids_to_row(best_rows[0]),
        "rejected": ids_to_row(worst_rows[0]),
    }
    opening = make_environment().reset(task)
    return Preference(
        opening.messages,
        _answer_messages(best),
        _answer_messages(worst),
        opening.tools,
        task.id,
        float(group.rewards.max()),
        float(group.rewards.min()),
        {"kind": task.kind, "sampled": ids},
    )


def _answer_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """What was said, up to the last answer; a broken call as it was written."""
    messages: list[Message] = []
    turns = [turn for turn in trajectory.turns if turn.ids]
    for turn in turns:
        text = assistant_text(replace(turn.message, tool_calls=()), trajectory.task_id)
        messages.append(replace(turn.message, content=text, unparsed=()))
        messages.extend(turn.results)
    return tuple(messages[: len(messages) - len(turns[-1].results)])
