"""Scenarios of benchmark tasks: what the user finally says, and the gold answer.

`draw.py` runs the one that `sets.yaml` names. The last message is the instruction, the messages
before it are the context; `draft.gold` is what rewards compare with.
"""

from __future__ import annotations

from sharpen.data.generate.dialog_draft import (
    DialogDraft,
    mentioned_parameters,
    missing_parameters,
    require_draw,
)
from sharpen.data.generate.dialog_scenarios import explain_tool, request_single_call
from sharpen.data.generate.follow_ups import ask_for_calculation, ask_for_reported_value
from sharpen.data.generate.plans import calls_to_json, draw_plan, plan_to_gold, request_plan
from sharpen.data.generate.scenarios import scenario
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS

_EASY_LEVEL = 0
_HARD_LEVEL = 2


@scenario("select_tool")
def _select_tool(draft: DialogDraft) -> None:
    """Selection: one request; gold is the tool and the call."""
    call = draft.request_call(draft.phrasing)
    draft.gold = {"tools": [draft.tool.name], "calls": calls_to_json(call)}


@scenario("plan_steps")
def _plan_steps(draft: DialogDraft) -> None:
    """Planning: several steps; gold is the plan with its dependencies."""
    steps = draw_plan(draft)
    request_plan(draft, steps)
    draft.gold = plan_to_gold(steps)


@scenario("reach_state")
def _reach_state(draft: DialogDraft) -> None:
    """End to end: one change, or steps of which one is a change; a hard task meets a fault."""
    if draft.level == _EASY_LEVEL:
        _select_tool(draft)
        return
    steps = draw_plan(draft)
    draft.gold = {"calls": calls_to_json(*(step.call for step in steps))}
    if draft.level == _HARD_LEVEL:
        call_number = str(draft.rng.randrange(len(steps)))
        fault = draft.rng.choice(list(FAULTS))
        draft.gold["faults"] = {"at": {call_number: fault}}
    request_plan(draft, steps)


@scenario("decide_to_call")
def _decide_to_call(draft: DialogDraft) -> None:
    """Timing: everything is known, so the right decision is to call."""
    _select_tool(draft)
    draft.gold["decision"] = "call"


@scenario("decide_to_ask")
def _decide_to_ask(draft: DialogDraft) -> None:
    """Timing: a required value is missing, so the right decision is to ask for it."""
    tool = draft.tool
    phrase = tool.operation.vague
    key_names = _keys_in_goal(tool)
    if key_names and (draft.level > _EASY_LEVEL or not phrase):
        phrase = _hide_key(draft, draft.rng.choice(key_names))
    phrase = require_draw(phrase)
    draft.request_call(phrase)
    missing = missing_parameters(tool, phrase)
    draft.gold = {"decision": "ask", "tools": [tool.name], "missing": missing}


def _keys_in_goal(tool: Tool) -> list[str]:
    """Returns the required parameters in the tool's goal that take one key."""
    names = []
    for name in mentioned_parameters(tool, tool.operation.goal):
        if name in tool.required and name in tool.takes and not tool.params[name].many:
            names.append(name)
    return names


def _hide_key(draft: DialogDraft, name: str) -> str:
    """Returns a request for the tool's goal that mentions the key's entity but not the key."""
    tool = draft.tool
    noun = draft.domain.entities[tool.takes[name]].noun
    unnamed = draft.draw_frame("unnamed_entity").format(noun=noun)
    goal = tool.operation.goal.replace(f"{{{name}}}", unnamed)
    return draft.draw_frame("goal_request").replace("{goal}", goal)


@scenario("decide_to_decline")
def _decide_to_decline(draft: DialogDraft) -> None:
    """Timing: no tool on offer can do it, so the right decision is to decline."""
    draft.request_call(draft.phrasing)
    draft.withhold_tool()
    draft.gold = {"decision": "decline"}


@scenario("answer_explanation")
def _answer_with_explanation(draft: DialogDraft) -> None:
    """Timing: the user only wants to know how; the wording of the answer is free."""
    explain_tool(draft)
    draft.messages.pop()
    draft.gold = {"decision": "answer"}


@scenario("answer_from_context")
def _answer_from_context(draft: DialogDraft) -> None:
    """Timing: the answer is in an earlier result."""
    request_single_call(draft)
    ask_for_reported_value(draft)
    _take_answer(draft)


@scenario("answer_calculation")
def _answer_calculation(draft: DialogDraft) -> None:
    """Timing: a bit of arithmetic that needs no tool."""
    ask_for_calculation(draft)
    _take_answer(draft)


def _take_answer(draft: DialogDraft) -> None:
    """Move the assistant's last message into the gold answer."""
    answer = draft.messages.pop()
    draft.gold = {"decision": "answer", "answer": answer.content}
