"""What a task's gold says about the tool world: its episode, what the gold calls change and find
out, and a trajectory that does the task.

`Task.gold` is `{"categories": […], "seed": 7, "family": "train", "faults"?: {…}, "calls": [{"name",
"arguments"}, …]}`. The calls are one way to the gold end state, not the only one. The environment
and the agent reward both execute an assistant's messages by `CallExecutor`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sharpen.calls import compact_json
from sharpen.rows import call_from_wire
from sharpen.types import Json, Message, SharpenError, StopReason, Task, ToolCall, Trajectory, Turn
from sharpen.world.episode import FAULTS, Episode, Faults, World, error_result, shipped_world
from sharpen.world.phrases import missing_question
from sharpen.world.state import diff

MAX_CALLS = 16
# Decision → an answer in words that takes it.
DECISION_TEXTS = {
    "decline": "I cannot do that: none of the tools on offer fits.",
    "answer": "In words only: one of the tools on offer would do that, and nothing was changed.",
}


# Execution ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Executed:
    """A call that was run and what it answered."""

    call: ToolCall
    result: Json

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return "error" not in self.result

    @property
    def faulted(self) -> bool:
        """Whether an injected fault hit it: not the caller's mistake, and worth trying again."""
        return self.result.get("error") in FAULTS


class CallExecutor:
    """Executes messages in an episode. All calls, broken ones too, count towards `max_calls`."""

    def __init__(
        self, episode: Episode, offered: Container[str] | None = None, max_calls: int = MAX_CALLS
    ):
        self.episode = episode
        self.offered = offered
        self.max_calls = max_calls
        self.executed: list[Executed] = []
        self.attempts = 0

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """Execute the message's calls in order; a message without calls is the answer."""
        if not message.tool_calls and not message.unparsed:
            return (), StopReason.ANSWERED
        results = [self._answer(call) for call in message.tool_calls]
        for broken in message.unparsed:
            self.attempts += 1
            text = f"the call could not be read ({broken.reason})"
            results.append(Message("tool", compact_json(error_result("invalid_call", text))))
        stop = StopReason.TURNS if self.attempts > self.max_calls else None
        return tuple(results), stop

    def _answer(self, call: ToolCall) -> Message:
        self.attempts += 1
        if self.attempts > self.max_calls:
            text = f"no more than {self.max_calls} calls are allowed"
            result = error_result("call_limit", text)
        else:
            result = self.episode.call(call, self.offered)
            self.executed.append(Executed(call, result))
        return Message("tool", compact_json(result), name=call.name, tool_call_id=call.id)


def start_episode(world: World, where: str, gold: Json) -> Episode:
    """Start the episode that a task's gold describes; `where` names the task in errors."""
    try:
        fault_settings = dict(gold.get("faults") or {})
        at = fault_settings.get("at", {})
        fault_settings["at"] = {int(number): kind for number, kind in at.items()}
        faults = Faults(**fault_settings)
        return world.episode(gold["categories"], gold["seed"], gold["family"], faults)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SharpenError(f"task {where}: gold does not describe an episode: {reason}") from None


def gold_calls(task: Task) -> list[ToolCall]:
    """Returns the gold calls of a task; there may be none."""
    calls = task.gold.get("calls") or []
    return [call_from_wire(call, task.id, f"gold.calls[{i}]") for i, call in enumerate(calls)]


# The gold outcome ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the gold calls change, and `reads`: the gold calls whose answers a run must find out."""

    changes: Json
    reads: tuple[Executed, ...]

    def missing(self, run: CallExecutor) -> list[str]:
        """Returns one line for everything that a run should have changed or found out.

        A gold read was found out if the same call succeeded, or one of the same tool with the same
        answer.
        """
        lines = diff(run.episode.changes(), self.changes)
        successes = [executed for executed in run.executed if executed.ok]
        for read in self.reads:
            if not any(_finds_out(executed, read) for executed in successes):
                lines.append(f"not found out: {read.call.name}")
        return lines


def _finds_out(executed: Executed, read: Executed) -> bool:
    if executed.call.name != read.call.name:
        return False
    return executed.result == read.result or executed.call == read.call


def gold_outcome(world: World, task: Task) -> Outcome:
    """Returns what the gold calls of a task change and find out."""
    return _execute_gold(world, task.id, compact_json(task.gold), task.instruction)


@lru_cache(maxsize=8192)
def _execute_gold(world: World, where: str, gold_text: str, instruction: str) -> Outcome:
    """Execute the gold calls, once for all samples of a task.

    A call that changes nothing is a read, unless a later call uses its answer: then the end state
    shows that it was found out.
    """
    gold = json.loads(gold_text)
    episode = start_episode(world, where, gold | {"faults": {}})
    steps: list[tuple[Executed, bool]] = []  # with whether the state stayed the same
    for call in gold_calls(Task(where, instruction, gold=gold)):
        before = episode.changes()
        executed = Executed(call, episode.call(call))
        steps.append((executed, episode.changes() == before))
    changes = episode.changes()
    reads: list[Executed] = []
    later_arguments: set[str] = set()
    for executed, is_unchanged in reversed(steps):
        is_used_later = any(
            text in later_arguments and text not in instruction
            for text in _texts_in(executed.result)
        )
        # A plan may also undo what it did; then its writes must be found in the run, too.
        if (is_unchanged or not changes) and not is_used_later:
            reads.append(executed)
        later_arguments |= set(_texts_in(executed.call.arguments))
    return Outcome(changes, tuple(reads))


def _texts_in(value: Any) -> Iterator[str]:
    """Yields every text in a JSON value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)


# Gold trajectories --------------------------------------------------------------------------------


def gold_trajectory(task: Task, world: World | None = None) -> Trajectory | None:
    """Returns a trajectory that does the task, or None if gold does not say how.

    In the tool world it makes one call per turn and repeats a call that an injected fault hit.
    """
    calls = gold_calls(task)
    if task.gold.get("match") == "allowed":
        calls = [ToolCall(call.name, first_allowed(call.arguments)) for call in calls]
    turns: list[Turn] = []
    if calls and "categories" in task.gold:
        turns += _execute_in_turns(
            start_episode(world or shipped_world(), task.id, task.gold), calls
        )
    elif calls:
        turns.append(Turn(Message("assistant", tool_calls=tuple(calls))))
    answer = _gold_answer(task, world)
    if not answer and turns:
        answer = "Done."
    if answer:
        turns.append(Turn(Message("assistant", answer)))
    if not turns:
        return None
    return Trajectory(task.id, tuple(turns), StopReason.ANSWERED)


def _execute_in_turns(episode: Episode, calls: list[ToolCall]) -> list[Turn]:
    executor = CallExecutor(episode)
    turns: list[Turn] = []
    while calls and executor.attempts < MAX_CALLS:
        message = Message("assistant", tool_calls=(calls[0],))
        results, _ = executor.step(message)
        turns.append(Turn(message, results=results))
        if not executor.executed[-1].faulted:
            calls = calls[1:]
    return turns


def _gold_answer(task: Task, world: World | None = None) -> str:
    """Returns what is to be said: the gold answer, or a text that takes the gold decision."""
    gold = task.gold
    if gold.get("decision") == "ask":
        return _gold_question(gold, world)
    if gold.get("answer"):
        return str(gold["answer"])
    default_decision = "decline" if gold.get("calls") == [] else ""
    return DECISION_TEXTS.get(gold.get("decision", default_decision), "")


def _gold_question(gold: Json, world: World | None) -> str:
    missing = gold.get("missing") or ["missing value"]
    if "categories" not in gold:
        return f"What is the {' and the '.join(missing)}?"
    tools = (world or shipped_world()).tools(gold["categories"])
    tool = next(tool for tool in tools if tool.name == gold["tools"][0])
    return " ".join(missing_question(tool, name) for name in missing)


def first_allowed(allowed: Any) -> Any:
    """Returns arguments with the first value of every list of allowed values.

    An empty text among the allowed values means that the argument may be left out.
    """
    if isinstance(allowed, list):
        return [first_allowed(value) for value in allowed]
    if not isinstance(allowed, dict):
        return allowed
    arguments: Json = {}
    for name, values in allowed.items():
        value = next((value for value in values if value != ""), "")
        if value != "":
            arguments[name] = first_allowed(value)
    return arguments
