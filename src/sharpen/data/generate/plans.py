"""Plans over the tool world: steps of which some take what earlier ones returned. Each step is
really executed in a copy of the episode before the next one is drawn. A plan that was written down
is executed again, and refused if it does not reach its recorded end state."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, permutations
from typing import Any

from sharpen.data.generate.dialog_draft import DialogDraft, DrawFailed, require_draw, using
from sharpen.types import Json, SharpenError, ToolCall
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import Episode, World, outcome_of
from sharpen.world.phrases import fill, go

TOOLS_TRIED, CALLS_TRIED, ORDERS_TRIED = 14, 4, 24
DETAILS = ("get", "lookup")  # they answer with one row, whose own references can be spoken of
POINTING = re.compile(r"\b(them|those|these|it|its|which)\b")
ORDINAL = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True, slots=True)
class Handle:
    """A key that a step returned, and how to speak of it."""

    step: int
    path: str  # flights.0.flight_id
    key: str
    entity: str
    phrase: str
    full: str  # where that might be taken for something else


@dataclass(frozen=True, slots=True)
class Step:
    tool: Tool
    call: ToolCall
    result: Json
    links: dict[str, Handle]


def find_steps(scene: DialogDraft) -> list[Step]:
    """Steps of one of the kind's shapes, of which one changes something if the kind says so."""
    for _ in range(scene.kind.tries):
        with suppress(DrawFailed):
            steps = grow(scene, scene.rng.choice(scene.kind.shapes[scene.level]))
            if not scene.kind.writes or any(not step.tool.read_only for step in steps):
                return steps
    raise DrawFailed


def ask_for(scene: DialogDraft, steps: Sequence[Step]) -> None:
    """The user wants the steps, as verb phrases in which linked values are only pointed at."""
    goals = []
    for at, step in enumerate(steps):
        text = step.tool.operation.goal
        for name, handle in step.links.items():
            between = steps[handle.step + 1 : at]
            like = handle.entity in (e for step in between for e in step.tool.yields.values())
            vague = like or (between and POINTING.search(handle.phrase))
            text = text.replace(f"{{{name}}}", handle.full if vague else handle.phrase)
        goals.append(fill(text, step.call.arguments))
    frame = scene.kind.frame or ("chain" if any(step.links for step in steps) else "both")
    opening, between, last, end = scene.frame(frame)
    scene.user(opening + between.join(goals[:-1]) + last + goals[-1] + end)
    scene.used = {step.tool.name: step.tool for step in steps}


def grow(scene: DialogDraft, shape: str) -> list[Step]:
    """Steps of this shape that work in any order from the present state."""
    scratch, steps, handles = scene.episode.fork(), list[Step](), list[list[Handle]]()
    parents = [[int(digit) for digit in step if digit != "-"] for step in shape.split()]
    for at, mine in enumerate(parents):
        gives = any(at in later for later in parents[at + 1 :])
        used = {step.tool.name for step in steps}
        pool = [t for t in scene.domain.tools.values() if t.name not in used]
        if gives:
            pool = [t for t in pool if t.yields and (t.operation.pick or t.operation.op in DETAILS)]
        steps.append(next_step(scratch, pool, scene.rng, [handles[parent] for parent in mine]))
        handles.append(require_draw(handles_of(scene.domain, steps[at], at)) if gives else [])
        scratch.call(steps[at].call)
    require_draw(in_any_order(scene.episode, steps))
    return steps


def next_step(
    episode: Episode, tools: list[Tool], rng: random.Random, handles: list[list[Handle]]
) -> Step:
    for tool in rng.sample(tools, min(TOOLS_TRIED, len(tools))):
        with suppress(DrawFailed):
            links = match(tool, handles, rng)
            given = {name: handle.key for name, handle in links.items()}
            for _ in range(CALLS_TRIED if links else 1):
                call = require_draw(episode.sample(tool, rng, using(tool, tool.operation.goal)))
                call = replace(call, arguments=call.arguments | given)
                result = episode.fork().call(call)
                if outcome_of(result) == "ok":
                    return Step(tool, call, result, links)
    raise DrawFailed


def match(tool: Tool, handles: list[list[Handle]], rng: random.Random) -> dict[str, Handle]:
    """One parameter for one handle of every parent."""
    links: dict[str, Handle] = {}
    named = using(tool, tool.operation.goal)
    takes = {n: e for n, e in tool.takes.items() if n in named and not tool.params[n].many}
    for offered in handles:
        free = [(name, entity) for name, entity in takes.items() if name not in links]
        fits = [(name, h) for name, entity in free for h in offered if entity == h.entity]
        name, handle = rng.choice(require_draw(fits))
        links[name] = handle
    return links


def handles_of(domain: Domain, step: Step, at: int) -> list[Handle]:
    """The keys in a step's answer that were not among what it was given."""
    operation = step.tool.operation
    own = getattr(operation, "into", "") or operation.entity
    found = []
    for pattern, entity in step.tool.yields.items():
        path = pattern.replace("[]", ".0")
        key = value_at(step.result, path.split("."))
        if not isinstance(key, str) or key in step.call.arguments.values():
            continue
        known, last = domain.entities[entity], pattern.removesuffix("[]").split(".")[-1]
        phrase = ""
        if entity == own and last == known.key:
            phrase = operation.pick
        elif operation.op in DETAILS and last.endswith("_id") and entity != own:
            phrase = f"its {last.removesuffix('_id').replace('_', ' ')}"
        if phrase:
            full = f"the {known.noun} of the {ORDINAL[at]} step"
            found.append(Handle(at, path, key, entity, phrase, full))
    return found


def value_at(value: Any, path: Sequence[str]) -> Any:
    try:
        return reduce(go, path, value)
    except (LookupError, TypeError):
        return None


def edges(steps: Sequence[Step]) -> list[tuple[int, int]]:
    return sorted({(h.step, at) for at, step in enumerate(steps) for h in step.links.values()})


def in_any_order(episode: Episode, steps: list[Step]) -> bool:
    """Does every order that respects the dependencies give the same answers and the same end?"""
    before, ends, every = edges(steps), [], permutations(range(len(steps)))
    right = (o for o in every if all(o.index(a) < o.index(b) for a, b in before))
    for order in islice(right, ORDERS_TRIED):
        run = episode.fork()
        if any(run.call(steps[at].call) != steps[at].result for at in order):
            return False
        ends.append(run.changes())
    return all(end == ends[0] for end in ends)


def written(*calls: ToolCall) -> list[Json]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def plan_to_gold(steps: Sequence[Step]) -> Json:
    """`{"steps": [{"id", "tool", "arguments"}], "edges": [[a, b]], "calls": […]}`; an argument that
    an earlier step gives is `{"$from": "s1.flights.0.flight_id"}`."""
    plan = []
    for at, step in enumerate(steps, 1):
        linked = {n: {"$from": f"s{h.step + 1}.{h.path}"} for n, h in step.links.items()}
        arguments = step.call.arguments | linked
        plan.append({"id": f"s{at}", "tool": step.tool.name, "arguments": arguments})
    pairs = [[f"s{a + 1}", f"s{b + 1}"] for a, b in edges(steps)]
    return {"steps": plan, "edges": pairs, "calls": written(*(step.call for step in steps))}


def run_gold(world: World, gold: Json, where: str) -> tuple[Episode, list[Json]]:
    """The fresh episode of a task after its gold steps, or else its gold calls, all of which must
    succeed; and the calls, with earlier answers put where steps ask for them."""
    episode = world.episode(gold["categories"], gold["seed"], gold["family"])
    results: dict[str, Json] = {}
    calls = []
    for step in gold.get("steps") or gold["calls"]:
        given = {n: resolve(value, results, where) for n, value in step["arguments"].items()}
        call = ToolCall(step["tool"] if "id" in step else step["name"], given)
        result = results[step.get("id", "")] = episode.call(call)
        if outcome_of(result) != "ok":
            raise SharpenError(f"{where}: the gold call of {call.name} fails: {result}")
        calls.append(call)
    return episode, written(*calls)


def resolve(value: Any, results: dict[str, Json], where: str) -> Any:
    if not (isinstance(value, dict) and "$from" in value):
        return value
    step, *path = value["$from"].split(".")
    found = value_at(results.get(step, {}), path)
    if found is None:
        raise SharpenError(f"{where}: {value['$from']} is not there")
    return found


def verify_gold(world: World, gold: Json, where: str) -> None:
    """What a task says is right must succeed and end where the task says it does."""
    if "calls" in gold:
        episode, calls = run_gold(world, gold, where)
        if calls != gold["calls"] or episode.digest() != gold["state"]:
            raise SharpenError(f"{where}: the gold calls do not reach the recorded end state")
