"""The tool world as an environment: a task names its categories, seed and family, the assistant's
calls are really executed, and the end state tells whether the task was done.

`Task.gold` is `{"categories": […], "seed": 7, "family": "train", "faults"?: {…}, "calls": [{"name",
"arguments"}, …]}`; the calls are one way to the wanted end state, not the only one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from sharpen.calls import compact_json
from sharpen.types import Dialog, Json, Message, SharpenError, StopReason, Task, ToolCall
from sharpen.world.episode import Episode, Faults, World, failure, shipped_world
from sharpen.world.state import diff

MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class Executed:
    """A call that was run and what it answered."""

    call: ToolCall
    result: Json

    @property
    def ok(self) -> bool:
        return "error" not in self.result


class ToolWorld:
    """One episode at a time. Every call counts towards `max_calls`, broken ones too; what exceeds
    them is not run and ends the episode."""

    def __init__(self, world: World | None = None, max_calls: int = MAX_CALLS):
        self.world = world or shipped_world()
        self.max_calls, self.attempts = max_calls, 0
        self.current: Episode | None = None

    def reset(self, task: Task) -> Dialog:
        episode = start(self.world, task.id, task.gold)
        offered = task.tools or tuple(tool.spec for tool in episode.tools())
        strange = [spec.name for spec in offered if episode.tool(spec.name) is None]
        if strange:
            categories = ", ".join(episode.domains)
            raise SharpenError(f"task {task.id}: tool {strange[0]!r} is not of {categories}")
        self.current, self.task = episode, task
        self.offered = {spec.name for spec in offered}
        self.executed: list[Executed] = []
        self.attempts = 0
        return Dialog(task.messages, offered, task.id, task.kind, task.metadata)

    @property
    def episode(self) -> Episode:
        if self.current is None:
            raise SharpenError("the tool world has no episode yet: call reset(task) first")
        return self.current

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """Run the message's calls in order; one without calls is the answer."""
        if not message.tool_calls and not message.unparsed:
            return (), StopReason.ANSWERED
        results = [self.answer(call) for call in message.tool_calls]
        for broken in message.unparsed:
            self.attempts += 1
            text = f"the call could not be read ({broken.reason})"
            results.append(Message("tool", compact_json(failure("invalid_call", text))))
        return tuple(results), StopReason.TURNS if self.attempts > self.max_calls else None

    def answer(self, call: ToolCall) -> Message:
        episode, self.attempts = self.episode, self.attempts + 1
        if self.attempts > self.max_calls:
            result = failure("call_limit", f"no more than {self.max_calls} calls are allowed")
        else:
            result = episode.call(call, self.offered)
            self.executed.append(Executed(call, result))
        return Message("tool", compact_json(result), name=call.name, tool_call_id=call.id)

    def end_state_reached(self) -> bool:
        """Whether everything is now as after the gold calls, whichever way it came to be so."""
        return self.episode.changes() == self.wanted()

    def differences(self) -> list[str]:
        """What is not as the gold calls leave it, one readable line each."""
        return diff(self.episode.changes(), self.wanted())

    def wanted(self) -> Json:
        return gold_changes(self.world, self.task.id, compact_json(self.task.gold))


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


@lru_cache(maxsize=8192)
def gold_changes(world: World, where: str, gold_text: str) -> Json:
    """What the gold calls change, worked out once for all samples of a task."""
    gold = json.loads(gold_text)
    episode = start(world, where, gold | {"faults": {}})
    for call in gold.get("calls", []):
        episode.call(ToolCall(call["name"], call["arguments"]))
    return episode.changes()
