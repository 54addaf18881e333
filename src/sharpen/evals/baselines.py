"""Policies without a model: gold's own answers, which show that a benchmark can be solved and is
scored rightly; random choices, which show what chance scores; and matching words.

Each answer is rendered to ids and parsed back, as a model's is, and nothing else is different.
"""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from sharpen.evals.metrics import DECISIONS
from sharpen.render import Renderer
from sharpen.rewards.graphs import write_plan
from sharpen.rewards.trajectory import words
from sharpen.rewards.verifiable import VERIFIERS
from sharpen.rows import call_from_wire
from sharpen.types import Dialog, Json, Message, RowError, Sampling, Task, ToolCall, ToolSpec, Turn
from sharpen.world.gold import SAID, example, gold_trajectory

Outward = Callable[[str, Message], Message]  # a task's id and a message → as the policy says it
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
CODE = re.compile(r"\b(?=\w*\d)[\w-]*[A-Za-z-][\w-]*\b|\b[A-Z]\w+")  # ids and names
ASKING = "Which one do you mean? Please tell me more."


class Baseline(ABC):
    """Says what `message` gives for a dialog."""

    def __init__(self, tasks: Sequence[Task], outward: Outward):
        from sharpen.models.pico import byte_tokenizer

        self.renderer = Renderer(byte_tokenizer())
        self.tasks, self.outward = {task.id: task for task in tasks}, outward

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        return [self.turn(dialog, self.message(dialog, sampling.seed)) for dialog in dialogs]

    def turn(self, dialog: Dialog, message: Message) -> Turn:
        """The message as it comes back from its ids: those of the last trained run."""
        full = replace(dialog, messages=(*dialog.messages, message))
        (datum,) = self.renderer.render([full])
        end = int(datum.mask.nonzero()[0][-1]) + 1
        start = int((~datum.mask[:end]).nonzero()[0][-1]) + 1
        prompt, ids = tuple(datum.ids[:start].tolist()), tuple(datum.ids[start:end].tolist())
        return Turn(self.renderer.parse(ids), prompt_ids=prompt, ids=ids)

    @abstractmethod
    def message(self, dialog: Dialog, seed: int) -> Message:
        """What it says next."""


class Gold(Baseline):
    """Turn by turn what the task's gold does and says."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        task = self.tasks[dialog.id]
        script = gold_messages(task)
        said = sum(m.role == "assistant" for m in dialog.messages)
        said -= sum(m.role == "assistant" for m in task.context)
        return self.outward(task.id, script[min(said, len(script) - 1)])


def gold_messages(task: Task) -> list[Message]:
    """What a right answer says, turn by turn."""
    gold, text = task.gold, ""
    if "nodes" in gold:
        text = write_plan(gold)
    elif task.kind == "code":
        text = f"```python\n{task.metadata['code']}\n```"
    elif "actions" in gold:
        calls = tuple(call_from_wire(call, task.id) for call in gold["actions"] or ())
        told = gold.get("outputs") or gold.get("communicate_info") or ()
        last = Message("assistant", " ".join(map(str, told)) or SAID["decline"])
        return [Message("assistant", tool_calls=calls), last] if calls else [last]
    elif task.kind in VERIFIERS:
        answer = gold.get("answer") or gold.get("answers") or gold.get("sql") or ""
        text = "; ".join(map(str, answer)) if task.kind == "set" else str(first(answer))
        text = json.dumps(gold["json"]) if task.kind == "json" else text
    elif gold.get("language"):
        fields = {f["name"]: f["parameters"]["properties"] for f in task.metadata["functions"]}
        wanted = [call_from_wire(call, task.id) for call in gold["calls"]]
        made = tuple(in_language(c, fields[c.name], gold["language"]) for c in wanted)
        return [Message("assistant", tool_calls=made)]
    elif "calls" not in gold and gold.get("decision", "call") == "call":
        names = gold.get("tools") or [task.tools[0].name]  # where any call is right
        return [Message("assistant", tool_calls=tuple(map(ToolCall, names)))]
    else:
        found = gold_trajectory(task)
        return [turn.message for turn in found.turns] if found else []
    if not text:
        raise RowError(task.id, f"gold of kind {task.kind!r} does not say what is right")
    return [Message("assistant", text)]


def first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) else answer


def in_language(call: ToolCall, fields: Json, language: str) -> ToolCall:
    """Allowed values as source text of a language."""
    given = example(call.arguments).items()
    return replace(call, arguments={n: literal(v, fields[n], language) for n, v in given})


def literal(value: Any, field: Json, language: str) -> str:
    kind, java = str(field.get("type")), language == "java"
    if isinstance(value, list):
        text = json.dumps(value)[1:-1]
        listed = f"new ArrayList<>(Arrays.asList({text}))" if kind == "ArrayList" else ""
        return (listed or f"new int[]{{{text}}}") if java else f"[{text}]"
    if isinstance(value, dict):
        puts = " ".join(f"put({json.dumps(k)}, {json.dumps(v)});" for k, v in value.items())
        return f"new HashMap<>() {{{{ {puts} }}}}" if java else json.dumps(value)
    if isinstance(value, str):
        return value
    ends = {"long": "L", "float": "f" * java, "Bigint": "n"}
    return json.dumps(value) + ends.get(kind, "")


class Random(Baseline):
    """A decision, a tool, arguments and answers by chance."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        chance, asked = random.Random(f"{seed} {dialog.id}"), dialog.messages[-1]
        decision = chance.choice(DECISIONS) if dialog.task_type == "timing" else "call"
        if asked.role == "tool" or not dialog.tools or decision != "call":
            numbers = NUMBER.findall(asked.content) or ["0"]
            said = {"choice": chance.choice("ABCDE"), "math": chance.choice(numbers)}
            spoken = {"ask": ASKING, "call": said.get(dialog.task_type, "Done."), **SAID}
            return Message("assistant", spoken[decision])
        tool, text = chance.choice(dialog.tools), asked.content
        given = {n: chosen(f, text, chance.choice, by_words=False) for n, f in required(tool)}
        return Message("assistant", tool_calls=(ToolCall(tool.name, given),))


class Keyword(Baseline):
    """The tool that shares most words with the request, filled with what looks like values."""

    def message(self, dialog: Dialog, seed: int) -> Message:
        asked = dialog.messages[-1]
        if asked.role == "tool" or not dialog.tools:
            return Message("assistant", (NUMBER.findall(asked.content) or ["Done."])[-1])
        request = words(asked.content)

        def shared(tool: ToolSpec) -> float:
            about = words(f"{tool.name} {tool.description}".replace("_", " "))
            return len(request & about) / (len(about) or 1) ** 0.5

        best = max(dialog.tools, key=shared)
        if not shared(best):
            return Message("assistant", SAID["decline"])
        texts = cycle(CODE.findall(asked.content) or asked.content.split() or [""])
        given = {n: chosen(f, asked.content, lambda _: next(texts)) for n, f in required(best)}
        return Message("assistant", tool_calls=(ToolCall(best.name, given),))


def required(tool: ToolSpec) -> list[tuple[str, Json]]:
    fields = tool.parameters.get("properties") or {}
    return [(name, fields.get(name) or {}) for name in tool.parameters.get("required") or ()]


def chosen(field: Json, text: str, choose: Callable[[Any], Any], by_words: bool = True) -> Any:
    """A value of a field's type: an option (the one that the text has), a number, a word."""
    options, kind = field.get("enum") or [], str(field.get("type"))
    named = [option for option in options if str(option).lower() in text.lower()]
    numbers = NUMBER.findall(text) or ["1"]
    if options:
        return (named or options)[0] if by_words else choose(options)
    if kind in ("integer", "number"):
        return int(float(numbers[0])) if kind == "integer" else float(numbers[0])
    value = choose(text.split() or [""])
    return {"boolean": True, "array": [value], "object": {}}.get(kind, value)


BASELINES: dict[str, type[Baseline]] = {"random": Random, "keyword": Keyword, "gold": Gold}
