"""Perturbed copies of a benchmark, to tell skill from memory: tools and arguments under other
names, candidates in another order, more of them.

Only what a policy sees is changed, and what it says is changed back: the tasks, the worlds they are
done in and the rewards stay as they are. A name that the policy was not shown stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from sharpen.types import (
    Dialog,
    Json,
    Message,
    Policy,
    Sampling,
    SharpenError,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
)

WAYS = ("rename", "shuffle", "distract")
MORE = 5  # distractors


@dataclass(frozen=True)
class Names:
    """Other names of a task's tools and of their arguments."""

    tools: Mapping[str, str]
    arguments: Mapping[str, Mapping[str, str]]  # by the tool's own name

    @cached_property
    def back(self) -> Names:
        own = {new: old for old, new in self.tools.items()}
        fields = {
            self.tools[tool]: {new: old for old, new in names.items()}
            for tool, names in self.arguments.items()
        }
        return Names(own, fields)

    def call(self, call: ToolCall) -> ToolCall:
        """A call under the other names; one that has none is nobody's."""
        if not self.tools:
            return call
        fields = self.arguments.get(call.name, {})
        given = {fields.get(n, f"unknown.{n}"): value for n, value in call.arguments.items()}
        return replace(
            call, name=self.tools.get(call.name, f"unknown.{call.name}"), arguments=given
        )

    def message(self, message: Message) -> Message:
        calls = tuple(map(self.call, message.tool_calls))
        name = self.tools.get(message.name, message.name)
        return replace(message, tool_calls=calls, name=name)

    def tool(self, tool: ToolSpec) -> ToolSpec:
        """What a name said is kept where the description says nothing."""
        fields = self.arguments.get(tool.name, {})
        shape = renamed(tool.parameters, fields)
        text = tool.description or tool.name.replace("_", " ").replace(".", " ")
        return ToolSpec(self.tools[tool.name], text, shape)


def renamed(schema: Json, names: Mapping[str, str]) -> Json:
    fields = schema.get("properties") or {}
    described = {
        names[name]: {"description": name.replace("_", " "), **field}
        if isinstance(field, dict)
        else field
        for name, field in fields.items()
    }
    out = schema | {"properties": described}
    if schema.get("required"):
        out["required"] = [names.get(name, name) for name in schema["required"]]
    return out


class Perturbation:
    """What `ways` make of the dialogs of these tasks, drawn by the task's id and the seed."""

    def __init__(self, tasks: Sequence[Task], ways: Sequence[str] = (), seed: int = 0):
        if wrong := [way for way in ways if way not in WAYS]:
            raise SharpenError(f"perturb {wrong[0]!r}: expected {', '.join(WAYS)}")
        self.tasks, self.ways, self.seed = {task.id: task for task in tasks}, set(ways), seed
        self.pool = [(tool, category(task)) for task in tasks for tool in task.tools]
        self.shown: dict[str, tuple[tuple[ToolSpec, ...], Names]] = {}

    def dialog(self, dialog: Dialog) -> Dialog:
        if not self.ways or dialog.id not in self.tasks or not dialog.tools:
            return dialog
        tools, names = self.tools_of(dialog.id, dialog.tools)
        messages = tuple(map(names.message, dialog.messages))
        return replace(dialog, tools=tools, messages=messages)

    def outward(self, task_id: str, message: Message) -> Message:
        """What one who knows the task says, in the words of the perturbed copy."""
        _, names = self.shown.get(task_id, ((), Names({}, {})))
        return names.message(message)

    def inward(self, task_id: str, message: Message) -> Message:
        _, names = self.shown.get(task_id, ((), Names({}, {})))
        return names.back.message(message)

    def tools_of(
        self, task_id: str, tools: tuple[ToolSpec, ...]
    ) -> tuple[tuple[ToolSpec, ...], Names]:
        if task_id in self.shown:
            return self.shown[task_id]
        chance, names = Random(f"{self.seed} {task_id}"), Names({}, {})
        if "distract" in self.ways:
            tools = (*tools, *self.distractors(self.tasks[task_id], tools, chance))
        if "shuffle" in self.ways:
            tools = tuple(chance.sample(tools, len(tools)))
        if "rename" in self.ways:
            numbers = chance.sample(range(100, 1000), len(tools))
            own = {tool.name: f"tool_{n}" for tool, n in zip(tools, numbers, strict=True)}
            names = Names(own, {tool.name: fields_of(tool) for tool in tools})
            tools = tuple(map(names.tool, tools))
        self.shown[task_id] = tools, names
        return tools, names

    def distractors(self, task: Task, tools: Sequence[ToolSpec], chance: Random) -> list[ToolSpec]:
        """Tools of other categories; none where it is right that no tool fits."""
        if task.gold.get("decision") in ("decline", "refuse") or task.gold.get("calls") == []:
            return []
        known, own = {tool.name for tool in tools}, category(task)
        others = {
            t.name: t for t, of in self.pool if t.name not in known and (not own or of != own)
        }
        return chance.sample([*others.values()], min(MORE, len(others)))


def category(task: Task) -> str:
    """Of the tool world, where tools of one category may stand in for each other."""
    return str(task.metadata.get("category", "")) if "categories" in task.gold else ""


def fields_of(tool: ToolSpec) -> dict[str, str]:
    return {name: f"arg_{n}" for n, name in enumerate(tool.parameters.get("properties") or {}, 1)}


class Perturbed:
    """A policy that sees perturbed dialogs, and is understood as if it had seen the others."""

    def __init__(self, policy: Policy, changed: Perturbation):
        self.policy, self.changed = policy, changed

    @property
    def engine(self) -> Any:
        return getattr(self.policy, "engine", None)

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        turns = self.policy.respond([self.changed.dialog(d) for d in dialogs], sampling)
        return [
            replace(turn, message=self.changed.inward(dialog.id, turn.message))
            for dialog, turn in zip(dialogs, turns, strict=True)
        ]
