"""Scenarios of training dialogs: the main request, solved with real calls.

`draw.py` runs the one that `sets.yaml` names and then lets `follow_ups.py` go on with the dialog.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from sharpen.data.generate.dialog_draft import (
    CallResult,
    DialogDraft,
    DrawFailed,
    missing_parameters,
    require_draw,
)
from sharpen.data.generate.plans import draw_plan, request_plan
from sharpen.data.generate.scenarios import scenario
from sharpen.data.generate.sets import frames
from sharpen.types import ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import outcome_of
from sharpen.world.phrases import fill, missing_question, slots, speak_value

_NO_CALL_SHARE = 0.6  # of the dialogs whose main request needs no call: none is made later either
_ACT_AFTERWARDS_SHARE = 0.5  # of the others: the user then asks for the call
_REFUSALS = ("conflict", "permission", "empty")


@scenario("single_call")
def request_single_call(draft: DialogDraft) -> None:
    """One request, one call, its result."""
    call = draft.request_call(draft.phrasing)
    draft.execute_and_report(call)


@scenario("refused_call")
def _request_refused_call(draft: DialogDraft) -> None:
    """The state forbids the call: the assistant says so and does not try again."""
    for outcome in draft.rng.sample(_REFUSALS, len(_REFUSALS)):
        with suppress(DrawFailed):
            call = draft.request_call(draft.phrasing, outcome)
            result = draft.execute_calls([call])
            reason = result.get("message", "nothing matches that")
            draft.add_assistant(f"I could not do that: {reason}.")
            return
    raise DrawFailed


@scenario("wrong_key")
def _request_with_wrong_key(draft: DialogDraft) -> None:
    """The user's key does not exist: the assistant lists the existing ones, asks, and goes on."""
    wrong_call = draft.request_call(draft.phrasing, "not_found")
    key_name = _find_key_parameter(draft.tool)
    entity_name = draft.tool.takes.get(key_name, "")
    listings = []
    for tool in draft.domain.tools.values():
        path = _find_listed_keys(tool, entity_name)
        if path:
            listings.append((tool, path))
    listing_tool, path = draft.rng.choice(require_draw(listings))
    listing_call = ToolCall(listing_tool.name)

    listed = draft.episode.fork().call(listing_call)
    keys = [row[key_name] for row in listed.get(path, ()) if key_name in row]
    right_call = _find_working_call(draft, wrong_call, key_name, keys)
    missing_row = f"{draft.domain.entities[entity_name].noun} {wrong_call.arguments[key_name]}"
    draft.execute_calls([wrong_call])
    draft.execute_calls([listing_call], content=f"There is no {missing_row}; I look for it.")
    draft.add_assistant(
        f"I found no {missing_row}. There are {speak_value(keys)}. Which one do you mean?"
    )
    draft.add_user(draft.draw_frame("confirm").format(key=right_call.arguments[key_name]))
    draft.execute_and_report(right_call)


def _find_key_parameter(tool: Tool) -> str:
    """Returns the first required parameter that takes one key; empty if there is none."""
    for name in tool.takes:
        if name in tool.required and not tool.params[name].many:
            return name
    return ""


def _find_listed_keys(tool: Tool, entity_name: str) -> str:
    """Returns where a tool called without arguments lists keys of the entity; empty if nowhere."""
    if not tool.read_only or tool.required:
        return ""
    for path, listed_entity in tool.yields.items():
        if listed_entity == entity_name and path.count("[]") == 1:
            return path.split("[]")[0]
    return ""


def _find_working_call(
    draft: DialogDraft, wrong_call: ToolCall, key_name: str, keys: list[str]
) -> ToolCall:
    """Returns the call with the first of the keys that makes it succeed."""
    for key in keys:
        call = replace(wrong_call, arguments=wrong_call.arguments | {key_name: key})
        if outcome_of(draft.episode.fork().call(call)) == "ok":
            return call
    raise DrawFailed


@scenario("parallel_calls")
def _request_parallel_calls(draft: DialogDraft) -> None:
    """Several independent steps, all called in one turn."""
    steps = draw_plan(draft)
    request_plan(draft, steps)
    draft.execute_calls([step.call for step in steps])
    draft.report_results([CallResult(step.tool, step.call, step.result) for step in steps])


@scenario("calls_in_sequence")
def _request_calls_in_sequence(draft: DialogDraft) -> None:
    """Several steps, called one after the other; the assistant says its plan first."""
    steps = draw_plan(draft)
    request_plan(draft, steps)
    names = [f"{number}. {step.tool.name}" for number, step in enumerate(steps, 1)]
    content = f"Plan: {', '.join(names)}."
    for step in steps:
        draft.execute_calls([step.call], content=content)
        content = ""
    draft.report_results([CallResult(step.tool, step.call, step.result) for step in steps])


@scenario("missing_value")
def _request_with_missing_value(draft: DialogDraft) -> None:
    """The request leaves something out: the assistant asks, the user tells, the call follows."""
    tool = draft.tool
    vague_phrase = require_draw(tool.operation.vague)
    call = draft.request_call(vague_phrase)
    names = missing_parameters(tool, vague_phrase)
    draft.add_assistant(" ".join(missing_question(tool, name) for name in names))
    if len(names) == 1:
        frame = draft.draw_frame("missing_value")
    else:
        # only the first one names what each value is
        frame = frames(draft.pool.split)["missing_value"][0]
    answers = []
    for name in names:
        about = tool.params[name].field.about
        answers.append(frame.format(about=about, value=speak_value(call.arguments[name])))
    draft.add_user("; ".join(answers) + ".")
    draft.execute_and_report(call)


@scenario("question_about_tools")
def _ask_about_tools(draft: DialogDraft) -> None:
    """The user wants to know, not to act; the request itself may come afterwards."""
    draft.calls_nothing = draft.rng.random() < _NO_CALL_SHARE
    call = explain_tool(draft)
    if not draft.calls_nothing and draft.rng.random() < _ACT_AFTERWARDS_SHARE:
        goal = fill(draft.tool.operation.goal, call.arguments)
        draft.add_user(draft.draw_frame("goal_request").format(goal=goal))
        draft.execute_and_report(call)


def explain_tool(draft: DialogDraft) -> ToolCall:
    """Let the assistant say which tool it would call and how, and return that call."""
    tool = draft.tool
    call = draft.sample_call(tool.operation.goal)
    goal = fill(tool.operation.goal, call.arguments)
    draft.add_user(draft.draw_frame("explain").format(goal=goal))
    about = tool.operation.about
    purpose = about[:1].lower() + about[1:-1]
    values = speak_value(call.arguments) or "nothing"
    draft.add_assistant(
        f"With {tool.name}: {purpose}. I would pass {values}; nothing has been done yet."
    )
    draft.used_tools[tool.name] = tool
    return call


@scenario("no_suitable_tool")
def request_without_suitable_tool(draft: DialogDraft) -> None:
    """No tool on offer can do it; the first such request of a dialog withholds the tool."""
    if not draft.withheld_tools:
        draft.calls_nothing = draft.rng.random() < _NO_CALL_SHARE
        draft.withhold_tool()
    call = draft.request_call(draft.phrasing)
    goal = draft.tool.operation.goal
    can_be_named = all(name in call.arguments for name in slots(goal))
    wish = fill(goal, call.arguments) if can_be_named else "do that"
    draft.add_assistant(f"None of the tools I have here can {wish}, so I have to leave it.")
