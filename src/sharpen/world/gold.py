"""What a task's gold says about the tool world: its episode, what the gold calls leave behind and
find out, and a trajectory that does the task. The environment and the agent reward both execute an
assistant's messages by `CallExecutor`.

`Task.gold` is `{"categories": […], "seed": 7, "family": "train", "faults"?: {…}, "calls": [{"name",
"arguments"}, …]}`; the calls are one way to the wanted end state, not the only one."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sharpen.calls import compact_json
from sharpen.rows import call_from_wire
from sharpen.types import Json, Message, SharpenError, StopReason, Task, ToolCall, Trajectory, Turn
from sharpen.world.episode import FAULTS, Episode, Faults, World, failure, shipped_world
from sharpen.world.phrases import missing_question
from sharpen.world.state import diff

MAX_CALLS = 16
SAID = {
    "decline": "I cannot do that: none of the tools on offer fits.",
    "answer": "In words only: one of the tools on offer would do that, and nothing was changed.",
}


@dataclass(frozen=True, slots=True)
class Executed:
    """A call that was run and what it answered."""

    call: ToolCall
    result: Json

    @property
    def ok(self) -> bool:
        return "error" not in self.result

    @property
    def faulted(self) -> bool:
        """Hit by an injected failure: to be tried again, and nobody's mistake."""
        return self.result.get("error") in FAULTS


class CallExecutor:
    """Messages executed in an episode; all calls, broken ones too, count towards `max_calls`."""

    def __init__(
        self, episode: Episode, offered: Container[str] | None = None, max_calls: int = MAX_CALLS
    ):
        self.episode, self.offered, self.max_calls = episode, offered, max_calls
        self.executed: list[Executed] = []
        self.attempts = 0

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """CallExecutor the message's calls in order; one without calls is the answer."""
        if not message.tool_calls and not message.unparsed:
            return (), StopReason.ANSWERED
        results = [self.answer(call) for call in message.tool_calls]
        for broken in message.unparsed:
            self.attempts += 1
            text = f"the call could not be read ({broken.reason})"
            results.append(Message("tool", compact_json(failure("invalid_call", text))))
        return tuple(results), StopReason.TURNS if self.attempts > self.max_calls else None

    def answer(self, call: ToolCall) -> Message:
        self.attempts += 1
        if self.attempts > self.max_calls:
            result = failure("call_limit", f"no more than {self.max_calls} calls are allowed")
        else:
            result = self.episode.call(call, self.offered)
            self.executed.append(Executed(call, result))
        return Message("tool", compact_json(result), name=call.name, tool_call_id=call.id)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the gold calls change, and those that change nothing: their answers are wanted."""

    changes: Json
    reads: tuple[Executed, ...]

    def missing(self, run: CallExecutor) -> list[str]:
        """What a run did not change or find out as it should have. Something was found out when the
        same call succeeded, or one of the same tool with the same answer."""
        lines = diff(run.episode.changes(), self.changes)
        done = [ran for ran in run.executed if ran.ok]
        for read in self.reads:
            same = [ran for ran in done if ran.call.name == read.call.name]
            if not any(read.result == r.result or read.call == r.call for r in same):
                lines.append(f"not found out: {read.call.name}")
        return lines


def start(world: World, where: str, gold: Json) -> Episode:
    """The episode that a task's gold describes."""
    try:
        faults = gold.get("faults") or {}
        at = {int(number): kind for number, kind in faults.get("at", {}).items()}
        injected = Faults(**{**faults, "at": at})
        return world.episode(gold["categories"], gold["seed"], gold["family"], injected)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SharpenError(f"task {where}: gold does not describe an episode: {reason}") from None


def gold_calls(task: Task) -> list[ToolCall]:
    found = task.gold.get("calls") or []
    return [call_from_wire(c, task.id, f"gold.calls[{i}]") for i, c in enumerate(found)]


def gold_outcome(world: World, task: Task) -> Outcome:
    return executed_gold(world, task.id, compact_json(task.gold), task.instruction)


@lru_cache(maxsize=8192)
def executed_gold(world: World, where: str, gold_text: str, instruction: str) -> Outcome:
    """The gold calls, executed once for all samples of a task. An answer that a later call takes up
    is vouched for by the end state."""
    gold = json.loads(gold_text)
    episode, ran = start(world, where, gold | {"faults": {}}), list[tuple[Executed, bool]]()
    for call in gold_calls(Task(where, instruction, gold=gold)):
        before = episode.changes()
        done = Executed(call, episode.call(call))
        ran.append((done, episode.changes() == before))
    changes, asked, later = episode.changes(), list[Executed](), set[str]()
    for done, still in reversed(ran):
        used = any(text in later and text not in instruction for text in texts(done.result))
        if (still or not changes) and not used:  # a plan may also undo what it did
            asked.append(done)
        later |= set(texts(done.call.arguments))
    return Outcome(changes, tuple(asked))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


def gold_trajectory(task: Task, world: World | None = None) -> Trajectory | None:
    """One that does the task, a call a turn, faulted ones again; None if gold does not say how."""
    gold, calls = task.gold, gold_calls(task)
    if gold.get("match") == "allowed":
        calls = [ToolCall(c.name, example(c.arguments)) for c in calls]
    turns: list[Turn] = []
    if calls and "categories" in gold:
        run = CallExecutor(start(world or shipped_world(), task.id, gold))
        while calls and run.attempts < MAX_CALLS:
            message = Message("assistant", tool_calls=(calls[0],))
            turns.append(Turn(message, results=run.step(message)[0]))
            calls = calls if run.executed[-1].faulted else calls[1:]
    elif calls:
        turns.append(Turn(Message("assistant", tool_calls=tuple(calls))))
    said = gold_words(task, world) or ("Done." if turns else "")
    if said:
        turns.append(Turn(Message("assistant", said)))
    return Trajectory(task.id, tuple(turns), StopReason.ANSWERED) if turns else None


def gold_words(task: Task, world: World | None = None) -> str:
    """What is to be said: the gold answer, or a text that takes the gold decision."""
    gold, missing = task.gold, task.gold.get("missing") or ["missing value"]
    if gold.get("decision") != "ask":
        silent = "decline" if gold.get("calls") == [] else ""
        return str(gold.get("answer") or SAID.get(gold.get("decision", silent), ""))
    if "categories" not in gold:
        return f"What is the {' and the '.join(missing)}?"
    tools = (world or shipped_world()).tools(gold["categories"])
    tool = next(tool for tool in tools if tool.name == gold["tools"][0])
    return " ".join(missing_question(tool, name) for name in missing)


def example(allowed: Any) -> Any:
    """Arguments with lists of allowed values → the first of each that is not left out."""
    if isinstance(allowed, list):
        return [example(value) for value in allowed]
    if not isinstance(allowed, dict):
        return allowed
    chosen = {n: next((v for v in values if v != ""), "") for n, values in allowed.items()}
    return {name: example(value) for name, value in chosen.items() if value != ""}
