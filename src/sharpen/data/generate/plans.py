"""Plans over the tool world: calls of which some take what earlier calls returned.

The scenarios draw plans with `draw_plan`. Each step is really executed in a copy of the episode
before the next one is drawn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Any

from sharpen.data.generate.dialog_draft import (
    DialogDraft,
    DrawFailed,
    mentioned_parameters,
    require_draw,
)
from sharpen.types import Json, ToolCall
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import Episode, outcome_of
from sharpen.world.phrases import fill, follow_step

_TOOLS_TRIED = 14  # per step
_CALLS_TRIED = 4  # per tool, if the step takes something from an earlier one
_ORDERS_TRIED = 24
# operations that answer with one row, whose own references can be spoken of
_SINGLE_ROW_OPERATIONS = ("get", "lookup")
_PRONOUN = re.compile(r"\b(them|those|these|it|its|which)\b")
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True, slots=True)
class _Handle:
    """A key that a step returned, and how a request refers to it."""

    step: int
    path: str  # in the step's result: flights.0.flight_id
    key: str
    entity: str
    short_phrase: str
    full_phrase: str  # for where the short one is ambiguous


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a plan with its result. `links` are the parameters that an earlier step gives."""

    tool: Tool
    call: ToolCall
    result: Json
    links: dict[str, _Handle]


# Drawing a plan


def draw_plan(draft: DialogDraft) -> list[Step]:
    """Draw steps of one of the kind's shapes; one step writes if the kind says so."""
    kind = draft.kind
    for _ in range(kind.plan_attempts):
        with suppress(DrawFailed):
            shape = draft.rng.choice(kind.plan_shapes[draft.level])
            steps = _draw_steps(draft, shape)
            if not kind.must_write or any(not step.tool.read_only for step in steps):
                return steps
    raise DrawFailed


def _draw_steps(draft: DialogDraft, shape: str) -> list[Step]:
    """Draw steps of this shape that work in any order from the present state.

    A shape such as `- 0 01` names for each step the earlier steps that it takes something from.
    """
    scratch = draft.episode.fork()
    parents_of = []
    for digits in shape.split():
        parents_of.append([int(digit) for digit in digits if digit != "-"])

    steps: list[Step] = []
    handles_of: list[list[_Handle]] = []  # what each step offers to later ones
    for number, parents in enumerate(parents_of):
        is_parent = any(number in later for later in parents_of[number + 1 :])
        tools = _tools_for_step(draft.domain, steps, is_parent)
        parent_handles = [handles_of[parent] for parent in parents]
        step = _draw_step(scratch, tools, draft.rng, parent_handles)
        steps.append(step)
        handles: list[_Handle] = []
        if is_parent:
            handles = require_draw(_find_handles(draft.domain, step, number))
        handles_of.append(handles)
        scratch.call(step.call)
    require_draw(_works_in_any_order(draft.episode, steps))
    return steps


def _tools_for_step(domain: Domain, steps: Sequence[Step], is_parent: bool) -> list[Tool]:
    """Returns the unused tools; for a parent only those whose results can be referred to."""
    used_names = {step.tool.name for step in steps}
    tools = []
    for tool in domain.tools.values():
        if tool.name in used_names:
            continue
        operation = tool.operation
        can_be_parent = tool.yields and (operation.pick or operation.op in _SINGLE_ROW_OPERATIONS)
        if can_be_parent or not is_parent:
            tools.append(tool)
    return tools


def _draw_step(
    episode: Episode, tools: list[Tool], rng: random.Random, parent_handles: list[list[_Handle]]
) -> Step:
    """Draw one of the tools with a call that succeeds and uses a handle of every parent."""
    for tool in rng.sample(tools, min(_TOOLS_TRIED, len(tools))):
        with suppress(DrawFailed):
            links = _link_parameters(tool, parent_handles, rng)
            linked_values = {name: handle.key for name, handle in links.items()}
            mentioned = mentioned_parameters(tool, tool.operation.goal)
            for _ in range(_CALLS_TRIED if links else 1):
                call = require_draw(episode.sample(tool, rng, mentioned))
                call = replace(call, arguments=call.arguments | linked_values)
                result = episode.fork().call(call)
                if outcome_of(result) == "ok":
                    return Step(tool, call, result, links)
    raise DrawFailed


def _link_parameters(
    tool: Tool, parent_handles: list[list[_Handle]], rng: random.Random
) -> dict[str, _Handle]:
    """Choose for every parent one of its handles and a parameter that takes it."""
    mentioned = mentioned_parameters(tool, tool.operation.goal)
    entity_of = {}
    for name, entity in tool.takes.items():
        if name in mentioned and not tool.params[name].many:
            entity_of[name] = entity

    links: dict[str, _Handle] = {}
    for handles in parent_handles:
        fitting = []
        for name, entity in entity_of.items():
            if name not in links:
                fitting += [(name, handle) for handle in handles if handle.entity == entity]
        name, handle = rng.choice(require_draw(fitting))
        links[name] = handle
    return links


def _find_handles(domain: Domain, step: Step, number: int) -> list[_Handle]:
    """Returns the keys in a step's result that were not among its arguments."""
    handles = []
    for pattern, entity_name in step.tool.yields.items():
        path = pattern.replace("[]", ".0")
        key = value_at(step.result, path.split("."))
        if not isinstance(key, str) or key in step.call.arguments.values():
            continue
        short_phrase = _refer_to_key(domain, step.tool, pattern, entity_name)
        if short_phrase:
            noun = domain.entities[entity_name].noun
            full_phrase = f"the {noun} of the {_ORDINALS[number]} step"
            handles.append(_Handle(number, path, key, entity_name, short_phrase, full_phrase))
    return handles


def _refer_to_key(domain: Domain, tool: Tool, pattern: str, entity_name: str) -> str:
    """Returns a phrase for a key in the tool's result; empty if there is none."""
    operation = tool.operation
    own_entity = getattr(operation, "into", "") or operation.entity
    field_name = pattern.removesuffix("[]").split(".")[-1]
    if entity_name == own_entity:
        if field_name == domain.entities[entity_name].key:
            return operation.pick
    elif operation.op in _SINGLE_ROW_OPERATIONS and field_name.endswith("_id"):
        return f"its {field_name.removesuffix('_id').replace('_', ' ')}"
    return ""


def value_at(value: Any, path: Sequence[str]) -> Any:
    """Returns the value at a path into lists and objects, or None if there is none."""
    try:
        for key in path:
            value = follow_step(value, key)
    except (LookupError, TypeError):
        return None
    return value


# Orders of the steps


def _edges(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Returns which step has to come before which."""
    pairs = set()
    for number, step in enumerate(steps):
        for handle in step.links.values():
            pairs.add((handle.step, number))
    return sorted(pairs)


def _works_in_any_order(episode: Episode, steps: Sequence[Step]) -> bool:
    """Returns whether every allowed order gives the same answers and the same end state."""
    end_states = []
    for order in islice(_allowed_orders(steps), _ORDERS_TRIED):
        run = episode.fork()
        for number in order:
            if run.call(steps[number].call) != steps[number].result:
                return False
        end_states.append(run.changes())
    return all(state == end_states[0] for state in end_states)


def _allowed_orders(steps: Sequence[Step]) -> Iterator[tuple[int, ...]]:
    """All orders of the steps in which every step comes after those that it depends on."""
    edges = _edges(steps)
    for order in permutations(range(len(steps))):
        if all(order.index(before) < order.index(after) for before, after in edges):
            yield order


# Asking for a plan, and writing it down


def request_plan(draft: DialogDraft, steps: Sequence[Step]) -> None:
    """Let the user ask for the steps, in verb phrases that only point at linked values."""
    goals = [_phrase_goal(steps, number) for number in range(len(steps))]
    frame = draft.kind.plan_frame
    if not frame:
        frame = "in_sequence" if any(step.links for step in steps) else "in_parallel"
    opening, between, before_last, end = draft.draw_frame(frame)
    draft.add_user(opening + between.join(goals[:-1]) + before_last + goals[-1] + end)
    draft.used_tools = {step.tool.name: step.tool for step in steps}


def _phrase_goal(steps: Sequence[Step], number: int) -> str:
    """Returns the step's goal, with phrases for values that earlier steps return."""
    step = steps[number]
    text = step.tool.operation.goal
    for name, handle in step.links.items():
        between = steps[handle.step + 1 : number]
        phrase = handle.short_phrase
        if _is_ambiguous(handle, between):
            phrase = handle.full_phrase
        text = text.replace(f"{{{name}}}", phrase)
    return fill(text, step.call.arguments)


def _is_ambiguous(handle: _Handle, steps_between: Sequence[Step]) -> bool:
    """Returns whether the short phrase might refer to one of the steps in between."""
    for step in steps_between:
        if handle.entity in step.tool.yields.values():
            return True
    return bool(steps_between) and bool(_PRONOUN.search(handle.short_phrase))


def calls_to_json(*calls: ToolCall) -> list[Json]:
    """Returns the calls as a task's gold answer holds them."""
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def plan_to_gold(steps: Sequence[Step]) -> Json:
    """Returns `{"steps": [{"id", "tool", "arguments"}], "edges": [[a, b]], "calls": […]}`.

    An argument that an earlier step gives is `{"$from": "s1.flights.0.flight_id"}`.
    """
    rows = []
    for number, step in enumerate(steps, 1):
        arguments = dict(step.call.arguments)
        for name, handle in step.links.items():
            arguments[name] = {"$from": f"s{handle.step + 1}.{handle.path}"}
        rows.append({"id": f"s{number}", "tool": step.tool.name, "arguments": arguments})
    edges = [[f"s{before + 1}", f"s{after + 1}"] for before, after in _edges(steps)]
    calls = [step.call for step in steps]
    return {"steps": rows, "edges": edges, "calls": calls_to_json(*calls)}
