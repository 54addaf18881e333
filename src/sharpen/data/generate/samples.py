"""Training rows from what is at hand: hand-written samples, ReAct steps, logs and trajectories.

Users call these from their own scripts: `from sharpen import ToolCallDataGenerator`. Data that a
policy writes is in `policy_samples.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# `sharpen` and `evals/benchmarks.py` take these two from here
from sharpen.data.generate.policy_samples import (  # noqa: F401
    LongContextDataGenerator,
    ReasoningDataGenerator,
)
from sharpen.envs.perturb import Names, fields_of
from sharpen.rewards.calls import call_problems
from sharpen.rows import dialog_to_row, tools_from_wire
from sharpen.types import (
    Dialog,
    Json,
    Message,
    Preference,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)


class ToolCallDataGenerator:
    """Makes rows over one set of tools. Every call has to fit the schema of its tool."""

    def __init__(self, tools: list[Json], system: str = ""):
        self.tools = tools_from_wire(tools, "tools")
        self.tool_names = [tool.name for tool in self.tools]
        self.system = system

    def generate_sft_sample(
        self,
        user_query: str,
        expected_tool: str,
        expected_args: Json,
        tool_result: str,
        final_response: str,
    ) -> Json:
        """Returns a row with one call: question, call, result, answer."""
        step = {
            "tool": expected_tool,
            "args": expected_args,
            "result": tool_result,
            "final_response": final_response,
        }
        return self.generate_multi_tool_sample(user_query, [step])

    def generate_multi_tool_sample(self, user_query: str, tool_sequence: list[Json]) -> Json:
        """Returns a row with several calls.

        Steps are `{"tool", "args", "result", "reasoning"?}`; the last one has `final_response`.
        """
        messages = []
        for number, step in enumerate(tool_sequence, 1):
            call = ToolCall(step["tool"], step["args"], f"call_{number}")
            call_message = Message("assistant", step.get("reasoning", ""), (call,))
            problems = call_problems(call_message, self.tools)
            if problems:
                raise SharpenError(f"{user_query!r}: step {number}: {'; '.join(problems)}")
            messages.append(call_message)
            messages.append(Message("tool", step["result"], name=call.name, tool_call_id=call.id))
        if not tool_sequence or not tool_sequence[-1].get("final_response"):
            raise SharpenError(f"{user_query!r}: the last step has no final_response; add one")
        return self._to_row(user_query, messages, tool_sequence[-1]["final_response"])

    def generate_no_tool_sample(self, user_query: str, final_response: str) -> Json:
        """Returns a row in which tools are offered and none is called."""
        return self._to_row(user_query, [], final_response)

    def generate_retry_sample(
        self,
        user_query: str,
        failures: list[Json],
        tool_sequence: list[Json],
        reasoning: str = "That failed, so I try again.",
    ) -> Json:
        """Returns a row with calls that fail (`{"tool", "args", "error"}`) before those that work.

        Every call after a failure is introduced by `reasoning`, unless it has its own.
        """
        steps: list[Json] = []
        for failure in failures:
            step = failure | {"result": json.dumps({"error": failure["error"]})}
            if steps:
                step = {"reasoning": reasoning} | step
            steps.append(step)
        steps.append({"reasoning": reasoning} | tool_sequence[0])
        steps += tool_sequence[1:]
        return self.generate_multi_tool_sample(user_query, steps)

    def _to_row(self, query: str, messages: Sequence[Message], answer: str) -> Json:
        """Returns the row of a dialog between the question and the answer."""
        dialog_messages = [Message("user", query), *messages, Message("assistant", answer)]
        if self.system:
            dialog_messages.insert(0, Message("system", self.system))
        return dialog_to_row(Dialog(tuple(dialog_messages), self.tools))


class ReActDataGenerator:
    """Makes ReAct text: Thought, Action, Action Input, Observation, Final Answer."""

    def generate_react_trajectory(self, question: str, trajectory: list[Json]) -> str:
        """Returns the text of the steps; a step has an `action` or a `final_answer`."""
        lines = []
        for number, step in enumerate(trajectory, 1):
            keys = ["thought", "final_answer"]
            if "action" in step:
                keys = ["thought", "action", "action_input", "observation"]
            for key in keys:
                if key not in step:
                    raise SharpenError(f"{question!r}: step {number} has no {key}")
                text = step[key]
                if not isinstance(text, str):
                    text = json.dumps(text, ensure_ascii=False)
                lines.append(f"{key.replace('_', ' ').title()}: {text}")
        return "\n".join(lines) + "\n"

    def generate_from_logs(self, interaction_logs: list[Json]) -> list[Json]:
        """Returns a row for every log with `success`."""
        rows = []
        for log in interaction_logs:
            if not log.get("success", False):
                continue
            steps = log["trajectory"]
            actions = [step["action"] for step in steps if "action" in step]
            text = self.generate_react_trajectory(log["question"], steps)
            row = {
                "question": log["question"],
                "react_trajectory": text,
                "tools_used": log.get("tools_used") or list(dict.fromkeys(actions)),
            }
            rows.append(row)
        return rows


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
        parameter_names[tool.name] = fields_of(tool)
    names = Names(masked_names, parameter_names)

    messages = []
    for message in dialog.messages:
        messages.append(message if message.role == "user" else names.outward(message))
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
