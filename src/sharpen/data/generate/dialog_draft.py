"""A row while it is being written: the messages so far, and the episode in which calls are made.

`draw.py` creates one `DialogDraft` per row; the scenarios add messages to it. Every tool result in
a dialog is the real answer of the tool world.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from sharpen.calls import compact_json
from sharpen.data.generate.mistakes import make_mistake
from sharpen.data.generate.sets import RowKind, frames
from sharpen.data.generate.tool_pool import (
    ToolPool,
    tools_to_withhold,
)
from sharpen.types import Json, Message, ToolCall
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import FAULTS, Episode
from sharpen.world.fields import capitalize
from sharpen.world.phrases import fill, slots

NO_MISTAKE = -1
_T = TypeVar("_T")


class DrawFailed(Exception):
    """This draw of a row leads nowhere; the draw with the next number may work."""


def require_draw(value: _T | None) -> _T:
    """Returns the value, or raises `DrawFailed` if it is None, empty or false."""
    if not value:
        raise DrawFailed
    return value


class CallResult(NamedTuple):
    """A call that was made, with its tool and what the tool answered."""

    tool: Tool
    call: ToolCall
    result: Json


@dataclass(slots=True)
class DialogDraft:
    """One row in the making. Scenarios add messages; a task's scenario also sets `gold`."""

    pool: ToolPool
    episode: Episode
    rng: random.Random
    kind: RowKind
    tool: Tool  # what the user asks for
    phrasing: str  # in which words, with slots for the values
    level: int  # 0 is easy
    mistake_at: int = NO_MISTAKE  # the number of the call that is first made wrongly
    messages: list[Message] = field(default_factory=list)
    used_tools: dict[str, Tool] = field(default_factory=dict)
    withheld_tools: list[Tool] = field(default_factory=list)
    gold: Json = field(default_factory=dict)
    calls_nothing: bool = False  # no tool is called from the first message to the last
    last_result: tuple[Tool, Json] | None = None  # what the assistant last reported

    @property
    def domain(self) -> Domain:
        """The category of the tool that the user asks for."""
        return self.pool.world.domain(self.tool.category)

    def withhold_tool(self) -> None:
        """Do not offer the tool, nor any other that might serve instead."""
        self.withheld_tools = tools_to_withhold(self.tool, self.domain.tools.values())

    def add_user(self, text: str) -> None:
        """Append a message of the user."""
        self.messages.append(Message("user", capitalize(text)))

    def add_assistant(self, text: str) -> None:
        """Append a message of the assistant that calls no tool."""
        self.messages.append(Message("assistant", capitalize(text)))

    def draw_frame(self, name: str) -> Any:
        """Draw one of the split's phrases of this name from `frames.yaml`."""
        return self.rng.choice(frames(self.pool.split)[name])

    def sample_call(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """Draw a call of the tool that sets what the phrase mentions and has this outcome."""
        mentioned = mentioned_parameters(self.tool, phrase)
        return require_draw(self.episode.sample(self.tool, self.rng, mentioned, outcome))

    def request_call(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """Draw such a call, let the user ask for it, and return it."""
        call = self.sample_call(phrase, outcome)
        self.add_user(fill(phrase, call.arguments))
        return call

    def execute_calls(self, calls: Sequence[ToolCall], content: str = "") -> Json:
        """Make calls in one assistant turn and return the last answer.

        Calls that met a fault, or that were first made wrongly, are made again in another turn.
        """
        calls_so_far = sum(len(message.tool_calls) for message in self.messages)
        right_calls = []
        for number, call in enumerate(calls, calls_so_far + 1):
            right_calls.append(replace(call, id=f"call_{number}"))
        made_calls = self._with_mistake(right_calls, self.mistake_at - calls_so_far)
        # a turn with a mistake is there to be read; only its correction is trained
        trained = made_calls == right_calls
        self.messages.append(Message("assistant", content, tuple(made_calls), trained=trained))

        result: Json = {}
        repeated: list[ToolCall] = []
        excuse = ""
        for call, right_call in zip(made_calls, right_calls, strict=True):
            result = self.episode.call(call)
            tool = self.domain.tools.get(call.name)
            if tool:
                self.used_tools[call.name] = tool
            text = compact_json(result)
            self.messages.append(Message("tool", text, name=call.name, tool_call_id=call.id))
            if result.get("error") in FAULTS or call != right_call:
                repeated.append(right_call)
                excuse = excuse or frames("retry")[result["error"]]
        if repeated:
            return self.execute_calls(repeated, content=excuse)
        return result

    def _with_mistake(self, calls: list[ToolCall], position: int) -> list[ToolCall]:
        """Returns the calls, the one at `position` made wrongly if there is one."""
        calls = list(calls)
        if 0 <= position < len(calls):
            calls[position] = require_draw(make_mistake(calls[position], self.episode, self.rng))
        return calls

    def execute_and_report(self, call: ToolCall) -> None:
        """Make one call of the tool and tell the user its result."""
        result = self.execute_calls([call])
        self.report_results([CallResult(self.tool, call, result)])

    def report_results(self, results: Sequence[CallResult]) -> None:
        """Tell the user what the calls returned, in the tools' own phrases."""
        self.last_result = (results[-1].tool, results[-1].result)
        sentences = []
        for tool, call, result in results:
            template = self.rng.choice(tool.operation.say)
            sentences.append(fill(template, result, call.arguments))
        self.add_assistant(" ".join(sentences))


def mentioned_parameters(tool: Tool, phrase: str) -> list[str]:
    """Returns the tool's parameters that a phrase mentions."""
    return [name for name in slots(phrase) if name in tool.params]


def missing_parameters(tool: Tool, phrase: str) -> list[str]:
    """Returns the required parameters that a phrase leaves out, at least one."""
    mentioned = slots(phrase)
    return require_draw([name for name in tool.required if name not in mentioned])
