"""Perturbed copies of tasks: the same task under other names, keys or candidates.

An evaluation tells skill from memory by them; training rewards the model for reading what is there.
Only what the policy is shown changes, and what it says is translated back. Tasks, tool worlds and
rewards stay as they are. A name that the policy was not shown stays unknown.

`sharpen.scored_rollout` plays tasks in a `PerturbedEnvironment`. The setting `perturb` of GRPO and
`sharpen evaluate --perturb` say what is changed. Function masking uses `Names` on dialogs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, get_args

from sharpen.calls import reports_failure
from sharpen.types import (
    Dialog,
    Environment,
    Message,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)

# rename: tools and parameters get numbers; reword: they get words of their descriptions;
# rekey: keys of records get other letters; shuffle: the tools get another order;
# distract: further tools are offered
PerturbationKind = Literal["rename", "reword", "rekey", "shuffle", "distract"]
PERTURBATION_KINDS: tuple[PerturbationKind, ...] = get_args(PerturbationKind)
_DISTRACTORS = 5  # further tools per task
_STOPWORDS = {
    "a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "in",
    "is", "it", "of", "on", "one", "or", "such", "that", "the", "to", "with",
}  # fmt: skip
_USUAL_SHAPE = "{letters}-{digits}"  # of a record's key, as in LN-7707
_DRAWN_SHAPES = (  # the new keys have one of them
    _USUAL_SHAPE,
    "{letters}{digits}",
    "{letters} {digits}",
    "{letters}/{digits}",
    "{digits}-{letters}",
    "{digits}/{letters}",
)
# stands before a name that the policy was not shown, so that the environment does not know it
_UNKNOWN_PREFIX = "unknown."


# Names and keys ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RecordKeys:
    """Replaces the keys of records by keys with other letters and perhaps another shape.

    Letters change places in pairs, and so do the usual shape and `shape`: the same change, made
    again, undoes the first one.
    """

    letters: Mapping[int, int] = field(default_factory=dict)  # as of `str.maketrans`
    shape: str = _USUAL_SHAPE

    def swap(self, value: Any) -> Any:
        """Returns a JSON value with every key in its texts replaced."""
        if not self.letters:
            return value
        if isinstance(value, str):
            return _key_pattern(self.shape).sub(self._swap_key, value)
        if isinstance(value, Mapping):
            return {name: self.swap(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.swap(inner) for inner in value]
        return value

    def _swap_key(self, match: re.Match[str]) -> str:
        if match["letters"]:
            letters = match["letters"].translate(self.letters)
            return self.shape.format(letters=letters, digits=match["digits"])
        letters = match["other_letters"].translate(self.letters)
        return _USUAL_SHAPE.format(letters=letters, digits=match["other_digits"])


@cache
def _key_pattern(shape: str = _USUAL_SHAPE) -> re.Pattern[str]:
    """The pattern of keys of the usual shape, and of keys of `shape`."""
    usual = _USUAL_SHAPE.format(letters="(?P<letters>[A-Z]{2,4})", digits=r"(?P<digits>\d{3,})")
    other = shape.format(
        letters="(?P<other_letters>[A-Z]{2,4})", digits=r"(?P<other_digits>\d{3,})"
    )
    return re.compile(rf"\b(?:{usual}|{other})\b")


@dataclass(frozen=True, slots=True)
class Names:
    """Other names of a task's tools and of their parameters, and other keys of records."""

    tools: Mapping[str, str]  # old name → new name
    arguments: Mapping[str, Mapping[str, str]]  # old name of a tool → its parameters, old → new
    keys: _RecordKeys = field(default_factory=_RecordKeys)

    def inverse(self) -> Names:
        """Returns the names that undo these."""
        arguments = {}
        for tool_name, parameters in self.arguments.items():
            arguments[self.tools[tool_name]] = _invert(parameters)
        return Names(_invert(self.tools), arguments, self.keys)

    def rename_message(self, message: Message, unknown_prefix: str = "") -> Message:
        """Returns the message with the new names. A called name without a new one gets the prefix.

        In running text only names with an underscore are replaced: others may be plain words.
        """
        calls = tuple(self._rename_call(call, unknown_prefix) for call in message.tool_calls)
        names_in_text = {old: new for old, new in self.tools.items() if "_" in old}
        text = self.keys.swap(_replace_words(message.content, names_in_text))
        name = self.tools.get(message.name, message.name)
        return replace(message, content=text, tool_calls=calls, name=name)

    def _rename_call(self, call: ToolCall, unknown_prefix: str) -> ToolCall:
        arguments = self.keys.swap(call.arguments)
        if not self.tools:  # only the keys change
            return ToolCall(call.name, arguments, call.id)
        parameters = self.arguments.get(call.name, {})
        renamed = {}
        for name, value in arguments.items():
            renamed[parameters.get(name, unknown_prefix + name)] = value
        name = self.tools.get(call.name, unknown_prefix + call.name)
        return ToolCall(name, renamed, call.id)

    def show_message(self, message: Message) -> Message:
        """Returns the message as the policy is shown it. Errors of tools speak of parameters, so
        the names of those are replaced in them too."""
        if reports_failure(message):
            parameters = self.arguments.get(message.name, {})
            text = message.content.replace(_UNKNOWN_PREFIX, "")
            message = replace(message, content=_replace_words(text, parameters))
        return self.rename_message(message)

    def tool(self, tool: ToolSpec) -> ToolSpec:
        """Returns the tool with its new names. Where a description is missing, the words of the old
        name stand in for it, so that the tool can still be understood."""
        new_names = self.arguments[tool.name]
        parameters = dict(tool.parameters)
        properties = {}
        for name, schema in _properties(tool).items():
            properties[new_names[name]] = {"description": _as_words(name), **(schema or {})}
        parameters["properties"] = properties
        if parameters.get("required"):
            required = [new_names.get(name, name) for name in parameters["required"]]
            parameters["required"] = required
        description = tool.description or _as_words(tool.name)
        return ToolSpec(self.tools[tool.name], description, parameters)


def _invert(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def _replace_words(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda match: names.get(match[0], match[0]), text)


def _as_words(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")


def _properties(tool: ToolSpec) -> Mapping[str, Any]:
    """A tool's parameters with their schemas. A foreign tool may have null for either."""
    return tool.parameters.get("properties") or {}


def number_parameters(tool: ToolSpec) -> dict[str, str]:
    """Returns a numbered name for each parameter of a tool: `arg_1`, `arg_2`, …"""
    return {name: f"arg_{number}" for number, name in enumerate(_properties(tool), 1)}


# Perturbation ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PerturbedTask:
    """What was drawn for one task."""

    tools: tuple[ToolSpec, ...]  # as the policy is shown them
    names: Names  # from the task's names to the shown ones
    names_back: Names


class Perturbation:
    """Perturbs the dialogs of `tasks` in the given ways. The task's id and the seed decide how.

    What a policy is shown goes through `dialog` and `outward`; what it says, through `inward`.
    """

    def __init__(self, tasks: Sequence[Task], ways: Sequence[str] = (), seed: int = 0):
        unknown = [way for way in ways if way not in PERTURBATION_KINDS]
        if unknown:
            raise SharpenError(f"perturb {unknown[0]!r}: expected {', '.join(PERTURBATION_KINDS)}")
        if "rename" in ways and "reword" in ways:
            raise SharpenError(
                "perturb: rename or reword, not both: each gives every tool a new name"
            )
        self.tasks = {task.id: task for task in tasks}
        self._ways = set(ways)
        self._seed = seed
        if ways and len(self.tasks) < len(tasks):
            raise SharpenError("perturb: tasks need ids of their own; two have the same")
        if "rekey" in ways and tasks and not _any_key_in(tasks):
            raise SharpenError(
                "perturb 'rekey': no task names a key such as LN-7707; leave rekey out"
            )
        self._tool_pool: list[tuple[ToolSpec, str]] = []  # every task's tools with its category
        for task in tasks:
            category = _category(task)
            self._tool_pool += [(tool, category) for tool in task.tools]
        self._perturbed: dict[str, _PerturbedTask] = {}  # by task id

    def dialog(self, dialog: Dialog) -> Dialog:
        """Returns the dialog as the policy is shown it. A dialog of another task, or one without
        tools, stays as it is."""
        if not self._ways or dialog.id not in self.tasks or not dialog.tools:
            return dialog
        if dialog.id not in self._perturbed:
            self._perturbed[dialog.id] = self._draw(self.tasks[dialog.id], dialog.tools)
        messages = tuple(self.show_message(dialog.id, message) for message in dialog.messages)
        return replace(dialog, tools=self._perturbed[dialog.id].tools, messages=messages)

    def show_message(self, task_id: str, message: Message) -> Message:
        """Returns a message in the task's own names as the policy is shown it."""
        if task_id not in self._perturbed:
            return message
        return self._perturbed[task_id].names.show_message(message)

    def restore_message(self, task_id: str, message: Message) -> Message:
        """Returns a message of the policy in the task's own names."""
        if task_id not in self._perturbed:
            return message
        return self._perturbed[task_id].names_back.rename_message(message, _UNKNOWN_PREFIX)

    def restore_trajectory(self, trajectory: Trajectory) -> Trajectory:
        """Returns the trajectory in the task's own names, as its reward knows them. The ids stay as
        they were sampled."""
        task_id = trajectory.task_id
        if task_id not in self._perturbed:
            return trajectory
        turns = []
        for turn in trajectory.turns:
            message = self.restore_message(task_id, turn.message)
            results = tuple(self.restore_message(task_id, result) for result in turn.results)
            turns.append(replace(turn, message=message, results=results))
        return replace(trajectory, turns=tuple(turns))

    def _draw(self, task: Task, tools: Sequence[ToolSpec]) -> _PerturbedTask:
        rng = Random(f"{self._seed} {task.id}")
        names = Names({}, {})
        if "distract" in self._ways:
            tools = [*tools, *self._draw_distractors(task, tools, rng)]
        if "shuffle" in self._ways:
            tools = rng.sample(tools, len(tools))
        if "rename" in self._ways:
            names = _draw_numbered_names(tools, rng)
            tools = [names.tool(tool) for tool in tools]
        elif "reword" in self._ways:
            names = _draw_reworded_names(tools, rng)
            tools = [names.tool(tool) for tool in tools]
        if "rekey" in self._ways:
            names = replace(names, keys=_draw_keys(rng))
        return _PerturbedTask(tuple(tools), names, names.inverse())

    def _draw_distractors(
        self, task: Task, tools: Sequence[ToolSpec], rng: Random
    ) -> list[ToolSpec]:
        """Tools of other tasks and categories. None where the right answer is that no tool fits:
        one of them might."""
        if task.gold.get("decision") == "decline" or task.gold.get("calls") == []:
            return []
        offered_names = {tool.name for tool in tools}
        task_category = _category(task)
        candidates = {}
        for tool, category in self._tool_pool:
            other_category = not task_category or category != task_category
            if tool.name not in offered_names and other_category:
                candidates[tool.name] = tool
        return rng.sample(list(candidates.values()), min(_DISTRACTORS, len(candidates)))


def _any_key_in(tasks: Sequence[Task]) -> bool:
    pattern = _key_pattern()
    texts = []
    for task in tasks:
        texts += [message.content for message in task.messages]
    return any(pattern.search(text) for text in texts)


def _category(task: Task) -> str:
    """The category of a task of the tool world, "" for other tasks. Tools of one category may do
    each other's work."""
    if "categories" not in task.gold:
        return ""
    return str(task.metadata.get("category", ""))


def _draw_numbered_names(tools: Sequence[ToolSpec], rng: Random) -> Names:
    numbers = rng.sample(range(100, 1000), len(tools))
    tool_names = {}
    parameter_names = {}
    for tool, number in zip(tools, numbers, strict=True):
        tool_names[tool.name] = f"tool_{number}"
        parameter_names[tool.name] = number_parameters(tool)
    return Names(tool_names, parameter_names)


def _draw_reworded_names(tools: Sequence[ToolSpec], rng: Random) -> Names:
    tool_names = _reword({tool.name: tool.description for tool in tools}, rng)
    parameter_names = {}
    for tool in tools:
        descriptions = {}
        for name, schema in _properties(tool).items():
            descriptions[name] = str((schema or {}).get("description", ""))
        parameter_names[tool.name] = _reword(descriptions, rng)
    return Names(tool_names, parameter_names)


def _reword(descriptions: Mapping[str, str], rng: Random) -> dict[str, str]:
    """Each name → another one: the first word of its description and one to three further ones. A
    name without a description is made of its own words."""
    new_names: dict[str, str] = {}
    for name, description in descriptions.items():
        text = description or _as_words(name)
        words = [word for word in re.findall("[a-z]+", text.lower()) if word not in _STOPWORDS]
        first, *others = words or [name]
        count = min(rng.randint(1, 3), len(others))
        places = rng.sample(range(len(others)), count)
        chosen_words = [first, *(others[place] for place in sorted(places))]
        taken = {*new_names.values(), *descriptions}
        new_names[name] = _unused_name("_".join(chosen_words), taken)
    return new_names


def _unused_name(name: str, taken: set[str]) -> str:
    """The name, with a number added if it is taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _draw_keys(rng: Random) -> _RecordKeys:
    mixed = "".join(rng.sample(ascii_uppercase, len(ascii_uppercase)))
    letters = str.maketrans(mixed, mixed[::-1])  # first and last change places, and so on
    return _RecordKeys(letters, rng.choice(_DRAWN_SHAPES))


# Environment -------------------------------------------------------------------------------------


class PerturbedEnvironment:
    """Shows the policy a perturbed copy of another environment.

    The model can do what the other environment allows, under the names that it is shown. The other
    environment runs the calls under their own names and ends the episode.
    """

    def __init__(self, environment: Environment, perturbation: Perturbation):
        self.environment = environment
        self.perturbation = perturbation
        self.task_id = ""
        self.inline = getattr(environment, "inline", False)

    def reset(self, task: Task) -> Dialog:
        self.task_id = task.id
        return self.perturbation.dialog(self.environment.reset(task))

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        original = self.perturbation.restore_message(self.task_id, message)
        results, stop = self.environment.step(original)
        shown = tuple(self.perturbation.show_message(self.task_id, result) for result in results)
        return shown, stop
