"""Rows from what is at hand: single samples, ReAct text, logs, scored trajectories, and renamed
copies of dialogs. Nothing is written that does not fit its tool's schema.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sharpen.rewards.calls import call_problems
from sharpen.rows import dialog_to_row, tools_from_wire
from sharpen.tools import check_call
from sharpen.types import (
    Dialog,
    Json,
    Message,
    Preference,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)


class ToolCallDataGenerator:
    """Tool-call samples over one set of tools. Tools go beside the messages, where the renderer
    puts them into the prompt; `system` is a further instruction."""

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
        """Question → call → result → answer."""
        step = {"tool": expected_tool, "args": expected_args, "result": tool_result}
        return self.generate_multi_tool_sample(
            user_query, [step | {"final_response": final_response}]
        )

    def generate_multi_tool_sample(self, user_query: str, tool_sequence: list[Json]) -> Json:
        """Steps `{"tool", "args", "result", "reasoning"?}` one after the other; the last one has
        `final_response`."""
        messages = []
        for number, step in enumerate(tool_sequence, 1):
            call = self.checked(step["tool"], step["args"], f"call_{number}")
            messages.append(Message("assistant", step.get("reasoning", ""), (call,)))
            messages.append(Message("tool", step["result"], name=call.name, tool_call_id=call.id))
        if not tool_sequence or not tool_sequence[-1].get("final_response"):
            raise SharpenError(f"{user_query!r}: the last step needs a final_response")
        return self.row(user_query, messages, tool_sequence[-1]["final_response"])

    def generate_no_tool_sample(self, user_query: str, final_response: str) -> Json:
        """The tools are there and none is needed."""
        return self.row(user_query, [], final_response)

    def generate_retry_sample(
        self,
        user_query: str,
        failures: list[Json],
        tool_sequence: list[Json],
        reasoning: str = "That failed, so I try again.",
    ) -> Json:
        """Calls that fail (`{"tool", "args", "error"}`), then those that work."""
        failed = [step | {"result": json.dumps({"error": step["error"]})} for step in failures]
        told = [{"reasoning": reasoning} | step for step in [*failed[1:], tool_sequence[0]]]
        return self.generate_multi_tool_sample(user_query, [*failed[:1], *told, *tool_sequence[1:]])

    def checked(self, name: str, arguments: Json, call_id: str) -> ToolCall:
        spec = next((tool for tool in self.tools if tool.name == name), None)
        if spec is None:
            raise SharpenError(f"no tool {name!r}; there are {', '.join(self.tool_names)}")
        call = ToolCall(name, arguments, call_id)
        if problems := check_call(call, spec):
            raise SharpenError(f"call of {name!r}: {'; '.join(problems)}")
        return call

    def row(self, query: str, messages: Sequence[Message], answer: str) -> Json:
        system = (Message("system", self.system),) if self.system else ()
        ends = (Message("user", query), *messages, Message("assistant", answer))
        return dialog_to_row(Dialog((*system, *ends), self.tools))


class ReActDataGenerator:
    """Thought, Action, Action Input, Observation, Final Answer as text."""

    def generate_react_trajectory(self, question: str, trajectory: list[Json]) -> str:
        lines = []
        for number, step in enumerate(trajectory, 1):
            wanted = ("action", "action_input", "observation") if "action" in step else ()
            missing = [key for key in ("thought", *wanted) if key not in step]
            if missing or not (wanted or "final_answer" in step):
                lack = missing[0] if missing else "action or final_answer"
                raise SharpenError(f"{question!r}: step {number} has no {lack}")
            lines.append(f"Thought: {step['thought']}")
            if wanted:
                lines.append(f"Action: {step['action']}")
                lines.append(f"Action Input: {as_text(step['action_input'])}")
                lines.append(f"Observation: {as_text(step['observation'])}")
            else:
                lines.append(f"Final Answer: {step['final_answer']}")
        return "\n".join(lines) + "\n"

    def generate_from_logs(self, interaction_logs: list[Json]) -> list[Json]:
        """Rows from the logs that say `success`."""
        return [
            {
                "question": log["question"],
                "react_trajectory": self.generate_react_trajectory(
                    log["question"], log["trajectory"]
                ),
                "tools_used": log.get("tools_used")
                or list(dict.fromkeys(s["action"] for s in log["trajectory"] if "action" in s)),
            }
            for log in interaction_logs
            if log.get("success", False)
        ]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# Trajectories ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filters:
    """Which trajectories are fit to learn from."""

    min_score: float = 1.0
    max_turns: int = 12
    valid_calls: bool = True  # every call parses, is offered and fits its schema
    answered: bool = True  # the episode ended with an answer, not with a limit


def trajectory_to_dialog(task: Task, trajectory: Trajectory) -> Dialog:
    messages = list(task.messages)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.results]
    score = {"score": trajectory.score.value} if trajectory.score else {}
    return Dialog(tuple(messages), task.tools, task.id, task.kind, trajectory.metadata | score)


def rejected_because(task: Task, trajectory: Trajectory, filters: Filters) -> str:
    """Why a trajectory is not kept; empty if it is."""
    if not trajectory.turns:
        return "no turn"
    if trajectory.score is None or trajectory.score.value < filters.min_score:
        return "score"
    if len(trajectory.turns) > filters.max_turns:
        return "turns"
    if filters.answered and trajectory.stop != StopReason.ANSWERED:
        return f"stopped by {trajectory.stop}"
    speaking = [t.message for t in trajectory.turns if t.message.tool_calls or t.message.unparsed]
    if filters.valid_calls and any(call_problems(m, task.tools) for m in speaking):
        return "invalid call"
    return ""


def sft_from_trajectories(
    pairs: Iterable[tuple[Task, Trajectory]], filters: Filters | None = None
) -> tuple[list[Dialog], Counter[str]]:
    """Dialogs to learn from, each once, and how many were left out for which reason."""
    kept: dict[str, Dialog] = {}
    reasons: Counter[str] = Counter()
    for task, trajectory in pairs:
        reason = rejected_because(task, trajectory, filters or Filters())
        dialog = trajectory_to_dialog(task, trajectory)
        key = repr(dialog.messages)
        reason = reason or ("duplicate" if key in kept else "")
        if reason:
            reasons[reason] += 1
        else:
            kept[key] = dialog
    return list(kept.values()), reasons


def preference_pair(
    task: Task, trajectories: Sequence[Trajectory], margin: float = 0.0
) -> Preference | None:
    """The best against the worst of one task's trajectories; None when they tie."""
    scored = [t for t in trajectories if t.score is not None and t.turns]
    if len(scored) < 2:
        return None
    best = max(scored, key=lambda t: t.score.value if t.score else 0.0)
    worst = min(scored, key=lambda t: t.score.value if t.score else 0.0)
    high, low = (t.score.value if t.score else 0.0 for t in (best, worst))
    if high - low <= margin:
        return None
    said = [trajectory_to_dialog(task, t).messages[len(task.messages) :] for t in (best, worst)]
    return Preference(task.messages, said[0], said[1], task.tools, task.id, high, low)


# Function masking ------------------------------------------------------------------------------


def mask_functions(dialog: Dialog, seed: int = 0) -> Dialog:
    """The same dialog with meaningless tool and parameter names, so that a model has to read the
    descriptions."""
    rng = random.Random(f"{seed}|{dialog.id}|{[t.name for t in dialog.tools]}")
    names = {
        tool.name: f"func_{rng.randrange(16**4):04x}_{i}" for i, tool in enumerate(dialog.tools)
    }
    fields = {
        tool.name: {n: f"arg_{i}" for i, n in enumerate(tool.parameters.get("properties", {}), 1)}
        for tool in dialog.tools
    }
    pattern = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in names) or r"(?!)")

    def spec(tool: ToolSpec) -> ToolSpec:
        schema, new = dict(tool.parameters), fields[tool.name]
        if "properties" in schema:
            schema["properties"] = {new[n]: s for n, s in schema["properties"].items()}
        if "required" in schema:
            schema["required"] = [new.get(n, n) for n in schema["required"]]
        return ToolSpec(names[tool.name], tool.description, schema)

    def call(made: ToolCall) -> ToolCall:
        new = fields.get(made.name, {})
        arguments = {new.get(n, n): value for n, value in made.arguments.items()}
        return ToolCall(names.get(made.name, made.name), arguments, made.id)

    def message(said: Message) -> Message:
        content = said.content
        if said.role == "assistant":
            content = pattern.sub(lambda found: names[found[0]], content)
        calls = tuple(map(call, said.tool_calls))
        return replace(
            said, content=content, tool_calls=calls, name=names.get(said.name, said.name)
        )

    metadata: Json = dialog.metadata | {"masked": True}
    if isinstance(metadata.get("target_tools"), list):
        metadata["target_tools"] = [names.get(n, n) for n in metadata["target_tools"]]
    return replace(
        dialog,
        messages=tuple(map(message, dialog.messages)),
        tools=tuple(map(spec, dialog.tools)),
        id=f"{dialog.id}-masked" if dialog.id else "",
        metadata=metadata,
    )
