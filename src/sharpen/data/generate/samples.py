"""Training rows from scored trajectories, and dialogs with the tools' names masked.

Users call these from their own scripts: `from sharpen import preference_pair`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sharpen.envs.perturb import Names, number_parameters
from sharpen.rewards.calls import call_problems
from sharpen.types import (
    Dialog,
    Json,
    Message,
    Preference,
    StopReason,
    Task,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which trajectories are good enough to learn from."""

    min_score: float = 1.0
    max_turns: int = 12
    valid_calls: bool = True  # every call parses, is offered and fits its schema
    answered: bool = True  # the episode ended with an answer, not with a limit

    def reason(self, task: Task, trajectory: Trajectory) -> str:
        """Returns why a trajectory is left out; empty if it is kept."""
        score = trajectory.score
        if not trajectory.turns:
            return "no turn"
        if score is None or score.value < self.min_score:
            return "score"
        if len(trajectory.turns) > self.max_turns:
            return "turns"
        if self.answered and trajectory.stop != StopReason.ANSWERED:
            return f"stopped by {trajectory.stop}"
        if self.valid_calls and _has_invalid_call(task, trajectory):
            return "invalid call"
        return ""


def _has_invalid_call(task: Task, trajectory: Trajectory) -> bool:
    """Returns whether a turn makes a call that is broken, not offered or does not fit."""
    for turn in trajectory.turns:
        message = turn.message
        makes_calls = message.tool_calls or message.unparsed
        if makes_calls and call_problems(message, task.tools):
            return True
    return False


def sft_from_trajectories(
    pairs: Iterable[tuple[Task, Trajectory]], filters: Filters | None = None
) -> tuple[list[Dialog], Counter[str]]:
    """Returns different dialogs to learn from, and how many were left out for which reason."""
    filters = filters or Filters()
    dialogs: dict[str, Dialog] = {}
    reasons: Counter[str] = Counter()
    for task, trajectory in pairs:
        reason = filters.reason(task, trajectory)
        if reason:
            reasons[reason] += 1
            continue
        dialog = _trajectory_to_dialog(task, trajectory)
        key = repr(dialog.messages)
        if key in dialogs:
            reasons["duplicate"] += 1
        else:
            dialogs[key] = dialog
    return list(dialogs.values()), reasons


def _trajectory_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """Returns what the assistant and the tools said, in order."""
    messages = []
    for turn in trajectory.turns:
        messages.append(turn.message)
        messages += turn.results
    return tuple(messages)


def _trajectory_to_dialog(task: Task, trajectory: Trajectory) -> Dialog:
    """Returns the task's messages and those of the trajectory as one dialog."""
    messages = (*task.messages, *_trajectory_messages(trajectory))
    metadata = dict(trajectory.metadata)
    if trajectory.score:
        metadata["score"] = trajectory.score.value
    return Dialog(messages, task.tools, task.id, task.kind, metadata)


def preference_pair(
    task: Task, trajectories: Sequence[Trajectory], margin: float = 0.0
) -> Preference | None:
    """Returns the best and the worst of a task's trajectories as a pair.

    None if their scores differ by no more than `margin`, or if fewer than two have a score.
    """
    scored = []
    for trajectory in trajectories:
        if trajectory.score is not None and trajectory.turns:
            scored.append((trajectory.score.value, trajectory))
    if len(scored) < 2:
        return None
    best_score, best = max(scored, key=lambda pair: pair[0])
    worst_score, worst = min(scored, key=lambda pair: pair[0])
    if best_score - worst_score <= margin:
        return None
    return Preference(
        prompt=task.messages,
        chosen=_trajectory_messages(best),
        rejected=_trajectory_messages(worst),
        tools=task.tools,
        id=task.id,
        chosen_score=best_score,
        rejected_score=worst_score,
    )


def mask_functions(dialog: Dialog, seed: int = 0) -> Dialog:
    """Returns the dialog with meaningless names of tools and parameters.

    A model trained on it has to read the descriptions. The user's words stay as they are.
    """
    tool_names = [tool.name for tool in dialog.tools]
    rng = random.Random(f"{seed}|{dialog.id}|{tool_names}")
    masked_names = {}
    parameter_names = {}
    for number, tool in enumerate(dialog.tools):
        masked_names[tool.name] = f"func_{rng.randrange(16**4):04x}_{number}"
        parameter_names[tool.name] = number_parameters(tool)
    names = Names(masked_names, parameter_names)

    messages = []
    for message in dialog.messages:
        messages.append(message if message.role == "user" else names.show_message(message))
    metadata: Json = dialog.metadata | {"masked": True}
    targets = metadata.get("target_tools")
    if isinstance(targets, list):
        metadata["target_tools"] = [masked_names.get(name, name) for name in targets]
    return replace(
        dialog,
        messages=tuple(messages),
        tools=tuple(names.tool(tool) for tool in dialog.tools),
        id=f"{dialog.id}-masked" if dialog.id else "",
        metadata=metadata,
    )
