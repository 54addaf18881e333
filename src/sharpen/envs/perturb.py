"""Perturbed copies of tasks: tools and arguments under other names (numbers, or words of what they
say of themselves), records under other keys, candidates in another order, more of them. In an
evaluation they tell skill from memory, in training they reward reading what is there.

Only what a policy sees is changed, and what it says is changed back: the tasks, the worlds they are
done in and the rewards stay as they are. A name that the policy was not shown stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, get_args

from sharpen.calls import failed
from sharpen.types import (
    Dialog,
    Environment,
    Message,
    Policy,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

Way = Literal["rename", "reword", "rekey", "shuffle", "distract"]
WAYS: tuple[Way, ...] = get_args(Way)
MORE = 5  # distractors
DULL = re.compile("an?|and|are|as|at|be|by|for|from|in|is|it|of|on|one|or|such|that|the|to|with")
KEY = "{a}-{n}"  # of a record: its letters and its number, as in LN-7707
SHAPES = (KEY, "{a}{n}", "{a} {n}", "{a}/{n}", "{n}-{a}", "{n}/{a}")
UNKNOWN = "unknown."


@dataclass(frozen=True, slots=True)
class Keys:
    """Other keys of records, in other letters and perhaps another shape. Whatever had that shape
    before takes the usual one: the same change again undoes it."""

    letters: Mapping[int, int] = field(default_factory=dict)  # pairs that change places
    shape: str = KEY

    def swapped(self, value: Any) -> Any:
        """With the other keys, wherever they stand."""
        if not self.letters:
            return value
        if isinstance(value, str):
            return keys_in(self.shape).sub(self.other, value)
        if isinstance(value, Mapping):
            return {name: self.swapped(inner) for name, inner in value.items()}
        return [*map(self.swapped, value)] if isinstance(value, list) else value

    def other(self, found: re.Match[str]) -> str:
        shape, letters = (self.shape, found["a"]) if found["a"] else (KEY, found["a2"])
        return shape.format(a=letters.translate(self.letters), n=found["n"] or found["n2"])


@cache
def keys_in(shape: str = KEY) -> re.Pattern[str]:
    """Those of the usual shape, and of this one."""
    usual = KEY.format(a="(?P<a>[A-Z]{2,4})", n=r"(?P<n>\d{3,})")
    other = shape.format(a="(?P<a2>[A-Z]{2,4})", n=r"(?P<n2>\d{3,})")
    return re.compile(rf"\b(?:{usual}|{other})\b")


@dataclass(frozen=True, slots=True)
class Names:
    """Other names of a task's tools, and by tool of their arguments; other keys of records."""

    tools: Mapping[str, str]
    arguments: Mapping[str, Mapping[str, str]]
    keys: Keys = field(default_factory=Keys)

    def back(self) -> Names:
        def inverse(names: Mapping[str, str]) -> dict[str, str]:
            return {new: old for old, new in names.items()}

        fields = {self.tools[tool]: inverse(names) for tool, names in self.arguments.items()}
        return Names(inverse(self.tools), fields, self.keys)

    def message(self, message: Message, unknown: str = "") -> Message:
        """With the other names; before one that has none stands `unknown`. Words that are names
        too stay what they are."""
        made = []
        for call in message.tool_calls:
            name, given = call.name, self.keys.swapped(call.arguments)
            if self.tools:
                fields = self.arguments.get(name, {})
                given = {fields.get(n, unknown + n): value for n, value in given.items()}
                name = self.tools.get(name, unknown + name)
            made.append(ToolCall(name, given, call.id))
        name = self.tools.get(message.name, message.name)
        named = {old: new for old, new in self.tools.items() if "_" in old}
        text = self.keys.swapped(swapped(message.content, named))
        return replace(message, content=text, tool_calls=tuple(made), name=name)

    def outward(self, message: Message) -> Message:
        """As it is said by these names; an error that a call met by those of its arguments too."""
        if failed(message):
            error, known = message.content, self.arguments.get(message.name, {})
            message = replace(message, content=swapped(error.replace(UNKNOWN, ""), known))
        return self.message(message)

    def tool(self, tool: ToolSpec) -> ToolSpec:
        """What a name said is kept where no description says it."""
        names, shape = self.arguments[tool.name], dict(tool.parameters)
        fields = (shape.get("properties") or {}).items()
        shape["properties"] = {names[n]: {"description": spelt(n), **(f or {})} for n, f in fields}
        if shape.get("required"):
            shape["required"] = [names.get(name, name) for name in shape["required"]]
        return ToolSpec(self.tools[tool.name], tool.description or spelt(tool.name), shape)


def swapped(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), text)


def spelt(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")


class Perturbation:
    """What `ways` make of the dialogs of these tasks, drawn by the task's id and the seed."""

    def __init__(self, tasks: Sequence[Task], ways: Sequence[str] = (), seed: int = 0):
        if wrong := [way for way in ways if way not in WAYS]:
            raise SharpenError(f"perturb {wrong[0]!r}: expected {', '.join(WAYS)}")
        if {"rename", "reword"} <= {*ways}:
            raise SharpenError("perturb: rename or reword, a tool has one name")
        self.tasks, self.ways, self.seed = {task.id: task for task in tasks}, set(ways), seed
        if ways and len(self.tasks) < len(tasks):
            raise SharpenError("perturb: tasks need ids of their own")
        texts = (message.content for task in tasks for message in task.messages)
        if "rekey" in ways and tasks and not any(map(keys_in().search, texts)):
            raise SharpenError("perturb 'rekey': no task names a key such as LN-7707")
        self.pool = [(tool, category(task)) for task in tasks for tool in task.tools]
        self.shown: dict[str, tuple[tuple[ToolSpec, ...], Names, Names]] = {}  # there and back

    def dialog(self, dialog: Dialog) -> Dialog:
        if not self.ways or dialog.id not in self.tasks or not dialog.tools:
            return dialog
        if dialog.id not in self.shown:
            tools, names = self.draw(self.tasks[dialog.id], dialog.tools)
            self.shown[dialog.id] = tools, names, names.back()
        messages = tuple(self.outward(dialog.id, message) for message in dialog.messages)
        return replace(dialog, tools=self.shown[dialog.id][0], messages=messages)

    def outward(self, task_id: str, message: Message) -> Message:
        """What one who knows the task, or a tool, says in the words of the perturbed copy."""
        if task_id not in self.shown:
            return message
        return self.shown[task_id][1].outward(message)

    def inward(self, task_id: str, message: Message) -> Message:
        *_, back = self.shown.get(task_id, (Names({}, {}),))
        return back.message(message, UNKNOWN)

    def meant(self, made: Trajectory) -> Trajectory:
        """With what was said as a reward knows it; ids stay as they were sampled."""
        turns = [
            replace(
                turn,
                message=self.inward(made.task_id, turn.message),
                results=tuple(self.inward(made.task_id, result) for result in turn.results),
            )
            for turn in made.turns
        ]
        return replace(made, turns=tuple(turns)) if made.task_id in self.shown else made

    def draw(self, task: Task, tools: Sequence[ToolSpec]) -> tuple[tuple[ToolSpec, ...], Names]:
        chance, names = Random(f"{self.seed} {task.id}"), Names({}, {})
        if "distract" in self.ways:
            tools = [*tools, *self.distractors(task, tools, chance)]
        if "shuffle" in self.ways:
            tools = chance.sample(tools, len(tools))
        if "rename" in self.ways:
            numbers = chance.sample(range(100, 1000), len(tools))
            own = {tool.name: f"tool_{n}" for tool, n in zip(tools, numbers, strict=True)}
            names = Names(own, {tool.name: fields_of(tool) for tool in tools})
            tools = [*map(names.tool, tools)]
        elif "reword" in self.ways:
            said = {tool.name: tool.description for tool in tools}
            names = Names(
                reworded(said, chance), {t.name: reworded_fields(t, chance) for t in tools}
            )
            tools = [*map(names.tool, tools)]
        if "rekey" in self.ways:
            mixed = "".join(chance.sample(ascii_uppercase, len(ascii_uppercase)))
            letters = str.maketrans(mixed, mixed[::-1])
            names = replace(names, keys=Keys(letters, chance.choice(SHAPES)))
        return tuple(tools), names

    def distractors(self, task: Task, tools: Sequence[ToolSpec], chance: Random) -> list[ToolSpec]:
        """Tools of other categories; none where it is right that no tool fits."""
        if task.gold.get("decision") == "decline" or task.gold.get("calls") == []:
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


def reworded_fields(tool: ToolSpec, chance: Random) -> dict[str, str]:
    fields = (tool.parameters.get("properties") or {}).items()
    return reworded({name: str((of or {}).get("description", "")) for name, of in fields}, chance)


def reworded(said: Mapping[str, str], chance: Random) -> dict[str, str]:
    """Other names, each the first and some further words of its description, or without one of its
    own name."""
    found: dict[str, str] = {}
    for name, text in said.items():
        words = re.findall("[a-z]+", (text or spelt(name)).lower())
        first, *others = [word for word in words if not DULL.fullmatch(word)] or [name]
        places = chance.sample(range(len(others)), min(chance.randint(1, 3), len(others)))
        new = "_".join([first, *(others[at] for at in sorted(places))])
        names = chain([new], (f"{new}_{number}" for number in range(2, 999)))
        found[name] = next(n for n in names if n not in {*found.values(), *said})
    return found


class PerturbedEnvironment:
    """An environment whose tools a policy is shown perturbed, and which hears what it meant."""

    def __init__(self, inner: Environment, changed: Perturbation):
        self.inner, self.changed, self.task = inner, changed, ""
        self.inline = getattr(inner, "inline", False)

    def reset(self, task: Task) -> Dialog:
        self.task = task.id
        return self.changed.dialog(self.inner.reset(task))

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        results, stop = self.inner.step(self.changed.inward(self.task, message))
        return tuple(self.changed.outward(self.task, result) for result in results), stop


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
