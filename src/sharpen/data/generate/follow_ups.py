"""How a training dialog goes on after its main request.

`draw.py` calls `continue_dialog` on every dialog, so that all have several turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sharpen.data.generate.dialog_draft import DialogDraft, DrawFailed, require_draw
from sharpen.data.generate.dialog_scenarios import (
    explain_tool,
    request_single_call,
    request_without_suitable_tool,
)
from sharpen.types import Json
from sharpen.world.domain import Tool
from sharpen.world.phrases import speak_value

_MIN_MESSAGES = 6
_MAX_MESSAGES = 12
_LONGEST_FOLLOW_UP = 4  # messages
_MAX_CHARACTERS = 4400  # of everything but the tools: about 1,300 tokens
_ONE_MORE_SHARE = 0.2  # of the dialogs that are long enough but have room
_TOOLS_TRIED = 4

_FollowUp = Callable[[DialogDraft], None]


def continue_dialog(draft: DialogDraft) -> None:
    """Add follow-ups until the dialog is long enough, and sometimes one more."""
    if draft.calls_nothing:
        follow_ups: list[_FollowUp] = [_ask_without_call, _ask_without_call, ask_for_calculation]
    else:
        follow_ups = [
            _request_another_call,
            _request_another_call,
            ask_for_reported_value,
            ask_for_calculation,
            _say_thanks,
        ]
    follow_up = None
    while follow_up is not _say_thanks and _needs_more(draft):
        follow_up = draft.rng.choice(follow_ups)
        try:
            follow_up(draft)
        except DrawFailed:
            follow_ups[0](draft)
    characters = sum(len(message.content) for message in draft.messages)
    has_right_length = _MIN_MESSAGES <= len(draft.messages) <= _MAX_MESSAGES
    if not has_right_length or characters > _MAX_CHARACTERS:
        raise DrawFailed


def _needs_more(draft: DialogDraft) -> bool:
    """Returns whether another follow-up is added; above the minimum length a draw decides."""
    messages = len(draft.messages)
    if messages < _MIN_MESSAGES:
        return True
    if messages + _LONGEST_FOLLOW_UP > _MAX_MESSAGES:
        return False
    return draft.rng.random() < _ONE_MORE_SHARE


def _request_another_call(draft: DialogDraft) -> None:
    """Ask for a call of a tool that has not occurred yet."""
    for tool in _draw_unused_tools(draft):
        draft.tool = tool
        draft.phrasing = draft.rng.choice(tool.operation.ask)
        with suppress(DrawFailed):
            request_single_call(draft)
            return
    raise DrawFailed


def _ask_without_call(draft: DialogDraft) -> None:
    """Ask something else that leads to no call."""
    if draft.withheld_tools:
        draft.tool = draft.rng.choice(draft.withheld_tools)
        draft.phrasing = draft.rng.choice(draft.tool.operation.ask)
        request_without_suitable_tool(draft)
    else:
        draft.tool = require_draw(_draw_unused_tools(draft))[0]
        explain_tool(draft)


def _draw_unused_tools(draft: DialogDraft) -> list[Tool]:
    """Draw a few tools of the category that have not occurred yet."""
    excluded = {*draft.used_tools}
    excluded.update(tool.name for tool in draft.withheld_tools)
    unused = [tool for name, tool in draft.domain.tools.items() if name not in excluded]
    return draft.rng.sample(unused, min(_TOOLS_TRIED, len(unused)))


def ask_for_reported_value(draft: DialogDraft) -> None:
    """Ask for one of the described single values that the last result already contains."""
    tool = draft.tool
    result: Json = {}
    if draft.last_result:
        tool, result = draft.last_result
    schemas = tool.outputs()["properties"]
    described_values = []
    for field, value in result.items():
        description = schemas.get(field, {}).get("description", "")
        if description and type(value) in (str, int, float):
            described_values.append((description, value))
    description, value = draft.rng.choice(require_draw(described_values))
    about = description[:1].lower() + description[1:]
    draft.add_user(draft.draw_frame("recall").format(about=about))
    draft.add_assistant(f"The {about} is {speak_value(value)}.")


def ask_for_calculation(draft: DialogDraft) -> None:
    """Ask for a bit of arithmetic that needs no tool."""
    text, operation = draft.draw_frame("calculation")
    a = draft.rng.randrange(5, 95, 5)
    b = draft.rng.randrange(20, 900, 20)
    unit = ""
    if operation == "percent":
        value = a * b / 100
    elif operation == "minutes":
        a = draft.rng.randrange(2, 30)
        value = a * 60
        unit = " minutes"
    else:
        value = a + b
    draft.add_user(text.format(a=a, b=b))
    draft.add_assistant(f"That is {value:g}{unit}.")


def _say_thanks(draft: DialogDraft) -> None:
    """End the dialog politely."""
    draft.add_user(draft.draw_frame("thanks"))
    draft.add_assistant("You're welcome.")
