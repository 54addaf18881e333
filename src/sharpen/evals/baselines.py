"""Policies without a model. Gold's own answers show that a benchmark can be solved and is scored
rightly; random choices show what chance scores; the third matches words.

Each answer is rendered to ids and parsed back, as a model's is.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from sharpen.kinds import gold_messages
from sharpen.policy.find import PolicySource, find_policy
from sharpen.render import Renderer
from sharpen.rewards.decisions import DECISIONS
from sharpen.rewards.trajectory import words
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
from sharpen.world.gold import DECISION_TEXTS

# a task's id and a message → the message in the words that the policy was shown
_ShowMessage = Callable[[str, Message], Message]
_PREFIX = "baseline:"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ID_OR_NAME = re.compile(r"\b(?=\w*\d)[\w-]*[A-Za-z-][\w-]*\b|\b[A-Z]\w+")
_QUESTION = "Which one do you mean? Please tell me more."
_DECISION_KINDS = ("timing", "decision")


class _Baseline(ABC):
    """A policy that says what `message` returns for a dialog."""

    def __init__(self, tasks: Sequence[Task], show_message: _ShowMessage):
        from sharpen.models.pico import byte_tokenizer

        self.renderer = Renderer(byte_tokenizer())
        self.tasks = {task.id: task for task in tasks}
        self.show_message = show_message

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return [self.turn(dialog, self.message(dialog, sampling.seed)) for dialog in dialogs]

    def turn(self, dialog: Dialog, message: Message) -> Turn:
        """Returns the message as it comes back from its ids: the last trained run of the dialog."""
        full = replace(dialog, messages=(*dialog.messages, message))
        (datum,) = self.renderer.render([full])
        end = int(datum.mask.nonzero()[0][-1]) + 1
        start = int((~datum.mask[:end]).nonzero()[0][-1]) + 1
        prompt_ids = tuple(datum.ids[:start].tolist())
        ids = tuple(datum.ids[start:end].tolist())
        return Turn(self.renderer.parse(ids), prompt_ids=prompt_ids, ids=ids)

    @abstractmethod
    def message(self, dialog: Dialog, seed: int) -> Message:
        """Returns what the baseline says next."""


class Gold(_Baseline):
    """Turn by turn what the task's gold does and says."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        task = self.tasks[dialog.id]
        script = gold_messages(task)
        spoken = sum(m.role == "assistant" for m in dialog.messages)
        spoken -= sum(m.role == "assistant" for m in task.context)
        return self.show_message(task.id, script[min(spoken, len(script) - 1)])


class Random(_Baseline):
    """A decision, a tool, arguments and answers by chance."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        rng = random.Random(f"{seed} {dialog.id}")
        last = dialog.messages[-1]
        decision = "call"
        if dialog.task_type in _DECISION_KINDS:
            decision = rng.choice(DECISIONS)
        if last.role == "tool" or not dialog.tools or decision != "call":
            return Message("assistant", self._text(dialog, decision, rng))
        tool = rng.choice(dialog.tools)
        arguments = {}
        for name, field in _required_fields(tool):
            arguments[name] = _choose_value(field, last.content, rng.choice, by_words=False)
        return Message("assistant", tool_calls=(ToolCall(tool.name, arguments),))

    def _text(self, dialog: Dialog, decision: str, rng: random.Random) -> str:
        """Words that take the decision, or an answer of the kind that is asked for."""
        numbers = _NUMBER.findall(dialog.messages[-1].content) or ["0"]
        letter = rng.choice("ABCDE")
        number = rng.choice(numbers)
        if decision == "ask":
            return _QUESTION
        if decision in DECISION_TEXTS:
            return DECISION_TEXTS[decision]
        return {"choice": letter, "math": number}.get(dialog.task_type, "Done.")


class _Keyword(_Baseline):
    """The tool that shares most words with the request, filled with what looks like values."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        last = dialog.messages[-1]
        if last.role == "tool" or not dialog.tools:
            return Message("assistant", (_NUMBER.findall(last.content) or ["Done."])[-1])
        request_words = words(last.content)

        def similarity(tool: ToolSpec) -> float:
            tool_words = words(f"{tool.name} {tool.description}".replace("_", " "))
            return len(request_words & tool_words) / (len(tool_words) or 1) ** 0.5

        best = max(dialog.tools, key=similarity)
        if not similarity(best):
            return Message("assistant", DECISION_TEXTS["decline"])
        texts = cycle(_ID_OR_NAME.findall(last.content) or last.content.split() or [""])
        arguments = {}
        for name, field in _required_fields(best):
            arguments[name] = _choose_value(field, last.content, lambda _: next(texts))
        return Message("assistant", tool_calls=(ToolCall(best.name, arguments),))


def _required_fields(tool: ToolSpec) -> list[tuple[str, Json]]:
    """Name and schema of each required argument."""
    fields = tool.parameters.get("properties") or {}
    return [(name, fields.get(name) or {}) for name in tool.parameters.get("required") or ()]


def _choose_value(
    field: Json, text: str, choose: Callable[[Any], Any], by_words: bool = True
) -> Any:
    """A value of a field's type: an option (the one that the text has), a number, a word."""
    options = field.get("enum") or []
    if options and not by_words:
        return choose(options)
    if options:
        named = [option for option in options if str(option).lower() in text.lower()]
        return (named or options)[0]
    type_name = str(field.get("type"))
    numbers = _NUMBER.findall(text) or ["1"]
    if type_name == "integer":
        return int(float(numbers[0]))
    if type_name == "number":
        return float(numbers[0])
    value = choose(text.split() or [""])
    return {"boolean": True, "array": [value], "object": {}}.get(type_name, value)


_BASELINES: dict[str, type[_Baseline]] = {"random": Random, "keyword": _Keyword, "gold": Gold}


def find_player(
    model: Any, tokenizer: Any, api_key_env: str, tasks: Sequence[Task], show_message: _ShowMessage
) -> PolicySource:
    """Returns who is evaluated: `baseline:NAME`, which knows the tasks, or any policy."""
    name = str(model) if isinstance(model, str) else ""
    if not name.startswith(_PREFIX):
        return find_policy(model, tokenizer, api_key_env)
    kind = name.removeprefix(_PREFIX)
    if kind not in _BASELINES:
        raise SharpenError(f"{name}: expected {_PREFIX} and one of {', '.join(_BASELINES)}")

    def open_baseline() -> Policy:
        return _BASELINES[kind](tasks, show_message)

    return PolicySource(name, name, open_baseline)
