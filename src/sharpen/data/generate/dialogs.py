"""Dialogs of `agent_sft`: a main request of one kind, solved with real calls, and whatever follows
until the dialog has six to twelve messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sharpen.calls import compact_json
from sharpen.data.generate.plans import CHAIN, LONG, PAIR, TRIPLE, Shape, goals, grow, using
from sharpen.data.generate.splits import Shelf, look_alikes
from sharpen.types import Dialog, Json, Message, ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, Episode, Faults, outcome_of
from sharpen.world.phrases import fill, missing_question, slots
from sharpen.world.phrases import spoken as spoken_value
from sharpen.world.state import seeded

MESSAGES = (6, 12)
LONGEST = 4400  # characters of everything but the tools: about 1,300 tokens
QUIET, LONGER = 0.6, 0.2  # shares: of dialogs about nothing to do, and of one more turn
RETRY = {
    "timeout": "The service did not answer, so I try again.",
    "rate_limit": "The service is busy, so I try once more.",
}


@dataclass(slots=True)
class Scene:
    """One dialog while it is being played."""

    shelf: Shelf
    category: str
    rng: random.Random
    episode: Episode
    messages: list[Message] = field(default_factory=list)
    used: dict[str, Tool] = field(default_factory=dict)
    barred: list[Tool] = field(default_factory=list)
    quiet: bool = False  # nothing is called from first to last
    last: tuple[Tool, Json] | None = None

    def user(self, text: str) -> None:
        self.messages.append(Message("user", text[:1].upper() + text[1:]))

    def say(self, text: str) -> None:
        self.messages.append(Message("assistant", text[:1].upper() + text[1:]))

    def perform(self, *calls: ToolCall, content: str = "") -> list[Json]:
        """Make calls, all at once, and make those again that a fault hit; the last answers."""
        results: dict[int, Json] = {}
        waiting = dict(enumerate(calls))
        while waiting:
            number = sum(len(m.tool_calls) for m in self.messages)
            made = [replace(c, id=f"call_{number + i}") for i, c in enumerate(waiting.values(), 1)]
            self.messages.append(Message("assistant", content, tuple(made)))
            for index, call in zip(waiting, made, strict=True):
                results[index] = self.episode.call(call)
                self.used[call.name] = self.tool(call.name)
                text = compact_json(results[index])
                self.messages.append(Message("tool", text, name=call.name, tool_call_id=call.id))
            waiting = {i: c for i, c in waiting.items() if results[i].get("error") in FAULTS}
            content = RETRY[next(iter(results[i]["error"] for i in waiting))] if waiting else ""
        return [results[index] for index in range(len(calls))]

    def tool(self, name: str) -> Tool:
        return self.shelf.world.domain(self.category).tools[name]

    def serve(self, tool: Tool, call: ToolCall) -> bool:
        """Call and answer."""
        result = self.perform(call)[0]
        self.last = tool, result
        self.say(fill(self.rng.choice(tool.operation.say), result, call.arguments))
        return outcome_of(result) == "ok"

    def frame(self, kind: str) -> Any:
        return self.rng.choice(self.shelf.frames[kind])


def joined(frame: list[str], goals: list[str]) -> str:
    opening, between, last, end = frame
    text = opening + goals[0] + "".join(between + goal for goal in goals[1:-1])
    text += (last + goals[-1] if len(goals) > 1 else "") + end
    return text[:1].upper() + text[1:]


# Kinds of main request -------------------------------------------------------------------------


def single(scene: Scene, tool: Tool, text: str) -> bool:
    call = scene.episode.sample(tool, scene.rng, using(tool, text))
    if call is None:
        return False
    scene.user(fill(text, call.arguments))
    return scene.serve(tool, call)


def refused(scene: Scene, tool: Tool, text: str) -> bool:
    """The state forbids it: the assistant says so and does not try again."""
    for outcome in scene.rng.sample(["conflict", "permission", "empty"], 3):
        call = scene.episode.sample(tool, scene.rng, using(tool, text), outcome)
        if call is not None:
            scene.user(fill(text, call.arguments))
            result = scene.perform(call)[0]
            scene.say(f"I could not do that: {result.get('message', 'nothing matches that')}.")
            return True
    return False


def recovery(scene: Scene, tool: Tool, text: str) -> bool:
    """The key is wrong: the assistant looks the right ones up, asks, and goes on."""
    wrong = scene.episode.sample(tool, scene.rng, using(tool, text), "not_found")
    key = next((n for n in tool.takes if n in tool.required and not tool.params[n].many), "")
    finders = [t for t in scene.shelf.siblings(tool) if lists(t, tool.takes.get(key, ""))]
    if wrong is None or not key or not finders:
        return False
    finder = scene.rng.choice(finders)
    path = next(p for p, e in finder.yields.items() if e == tool.takes[key]).split("[]")[0]
    listed = scene.episode.fork().call(ToolCall(finder.name))
    right = [row[key] for row in listed.get(path, ()) if key in row]
    calls = [replace(wrong, arguments=wrong.arguments | {key: value}) for value in right]
    good = [c for c in calls if outcome_of(scene.episode.fork().call(c)) == "ok"]
    if not good:
        return False
    named = f"{scene.shelf.entity(tool, tool.takes[key]).noun} {wrong.arguments[key]}"
    scene.user(fill(text, wrong.arguments))
    scene.perform(wrong)
    scene.perform(ToolCall(finder.name), content=f"There is no {named}; I look for it.")
    found = f"I found no {named}. There are {spoken_value(right)}."
    scene.say(f"{found} Which one do you mean?")
    scene.user(scene.frame("confirm").format(key=good[0].arguments[key]))
    return scene.serve(tool, good[0])


def lists(tool: Tool, entity: str) -> bool:
    """Can `tool` be called with nothing to see keys of this entity?"""
    paths = [p for p, e in tool.yields.items() if e == entity and p.count("[]") == 1]
    return bool(entity) and tool.read_only and not tool.required and bool(paths)


def planned(shapes: tuple[Shape, ...], frame: str, together: bool, scene: Scene, *_: Any) -> bool:
    """Several steps of one request: independent ones at once, dependent ones in turn."""
    place, rng = (scene.episode, scene.shelf, scene.category), scene.rng
    tries = (grow(*place, rng, rng.choice(shapes)) for _ in range(8))
    steps = next((steps for steps in tries if steps), None)
    if steps is None:
        return False
    scene.user(joined(scene.frame(frame), goals(steps)))
    if together:
        scene.perform(*(step.call for step in steps))
    else:
        names = [f"{at}. {step.tool.name}" for at, step in enumerate(steps, 1)]
        content = f"Plan: {', '.join(names)}."
        for step in steps:
            scene.perform(step.call, content=content)
            content = ""
    scene.last = steps[-1].tool, steps[-1].result
    scene.say(" ".join(step.answer(scene.rng) for step in steps))
    return True


def missing(scene: Scene, tool: Tool, text: str) -> bool:
    """Something is left out: the assistant asks, the user tells, the call follows."""
    vague = tool.operation.vague
    call = scene.episode.sample(tool, scene.rng, using(tool, vague)) if vague else None
    if call is None:
        return False
    scene.user(fill(vague, call.arguments))
    lacking = [name for name in tool.required if name not in slots(vague)]
    if not lacking:
        return False
    scene.say(" ".join(missing_question(tool, name) for name in lacking))
    frames = scene.shelf.frames["given"]
    frame = scene.rng.choice(frames) if len(lacking) == 1 else frames[0]
    told = [
        frame.format(about=tool.params[n].field.about, value=spoken_value(call.arguments[n]))
        for n in lacking
    ]
    scene.user("; ".join(told) + ".")
    return scene.serve(tool, call)


def no_tool(scene: Scene, tool: Tool, text: str) -> bool:
    """The user wants to know, not to act; the request itself may come afterwards."""
    scene.quiet = scene.rng.random() < QUIET
    call = explain(scene, tool)
    if call is None:
        return False
    goal = fill(tool.operation.goal, call.arguments)
    if not scene.quiet and scene.rng.random() < 0.5:
        scene.user(scene.frame("one").format(goal=goal))
        return scene.serve(tool, call)
    return True


def explain(scene: Scene, tool: Tool) -> ToolCall | None:
    """Say which tool would do it and with what, and leave it at that."""
    call = scene.episode.sample(tool, scene.rng, using(tool, tool.operation.goal))
    if call is None:
        return None
    scene.user(scene.frame("explain").format(goal=fill(tool.operation.goal, call.arguments)))
    about = tool.operation.about
    given = [f"{n.replace('_', ' ')} {spoken_value(v)}" for n, v in call.arguments.items()]
    scene.say(
        f"With {tool.name}: {about[:1].lower()}{about[1:-1]}. I would pass "
        f"{', '.join(given) or 'nothing'}; nothing has been done yet."
    )
    scene.used[tool.name] = tool
    return call


def no_suitable(scene: Scene, tool: Tool, text: str) -> bool:
    """Nothing on offer does it: the assistant says so."""
    scene.quiet = scene.rng.random() < QUIET
    scene.barred += look_alikes(scene.shelf, tool)
    return decline(scene, tool, text)


def decline(scene: Scene, tool: Tool, text: str) -> bool:
    call = scene.episode.sample(tool, scene.rng, using(tool, text))
    if call is None:
        return False
    scene.user(fill(text, call.arguments))
    wanted = fill(tool.operation.goal, call.arguments) if call_covers(tool, call) else "do that"
    scene.say(f"None of the tools I have here can {wanted}, so I have to leave it.")
    return True


def call_covers(tool: Tool, call: ToolCall) -> bool:
    return all(name in call.arguments for name in slots(tool.operation.goal))


# What follows ----------------------------------------------------------------------------------


def another(scene: Scene) -> bool:
    tools = unused(scene)
    return any(single(scene, tool, scene.rng.choice(tool.operation.ask)) for tool in tools)


def unused(scene: Scene) -> list[Tool]:
    """A few tools of the category that did not occur yet."""
    out = {*scene.used, *(t.name for t in scene.barred)}
    tools = scene.shelf.world.domain(scene.category).tools.values()
    free = [tool for tool in tools if tool.name not in out]
    return scene.rng.sample(free, min(4, len(free)))


def another_question(scene: Scene) -> bool:
    """One more request that is not to be acted on."""
    if scene.barred:
        tool = scene.rng.choice(scene.barred)
        return decline(scene, tool, scene.rng.choice(tool.operation.ask))
    return any(explain(scene, tool) for tool in unused(scene)[:1])


def recall(scene: Scene) -> bool:
    """Something that the last answer already said."""
    found = recallable(*scene.last) if scene.last else []
    if not found:
        return False
    about, value = scene.rng.choice(found)
    scene.user(scene.frame("recall").format(about=about))
    scene.say(f"The {about} is {value}.")
    return True


def recallable(tool: Tool, result: Json) -> list[tuple[str, str]]:
    """What can be asked again: the described single values of an answer."""
    properties = tool.outputs()["properties"]
    found = []
    for name, value in result.items():
        about = properties.get(name, {}).get("description", "")
        if about and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            found.append((about[:1].lower() + about[1:], spoken_value(value)))
    return found


def general(scene: Scene) -> bool:
    text, kind = scene.rng.choice(scene.shelf.frames["general"])
    question, answer = general_question(text, kind, scene.rng)
    scene.user(question)
    scene.say(answer)
    return True


def general_question(text: str, kind: str, rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(5, 95, 5), rng.randrange(20, 900, 20)
    a = rng.randrange(2, 30) if kind == "minutes" else a
    value = {"percent": a * b / 100, "minutes": a * 60, "sum": a + b}[kind]
    unit = " minutes" if kind == "minutes" else ""
    return text.format(a=a, b=b), f"That is {value:g}{unit}."


def thanks(scene: Scene) -> bool:
    scene.user(scene.frame("thanks"))
    scene.say("You're welcome.")
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of dialog: how it is played, its task type, its share, its number of tools."""

    play: Callable[[Scene, Tool, str], bool]
    task_type: str
    share: float
    tools: tuple[int, int] = (3, 5)
    faults: tuple[int, ...] = ()  # numbers of the calls that fail once


PAIRS, CHAINS = (PAIR, PAIR, TRIPLE), (CHAIN, CHAIN, LONG)
SELECTION, PLANNING, TIMING = "tool_selection", "multi_step_planning", "timing_decision"
KINDS = {
    "single": Kind(single, SELECTION, 0.17, (3, 6)),
    "parallel": Kind(partial(planned, PAIRS, "both", True), SELECTION, 0.08),
    "retry": Kind(single, SELECTION, 0.05, faults=(0,)),
    "refused": Kind(refused, SELECTION, 0.05),
    "chain": Kind(partial(planned, CHAINS, "chain", False), PLANNING, 0.17),
    "sequence": Kind(partial(planned, PAIRS, "chain", False), PLANNING, 0.07),
    "chain_retry": Kind(partial(planned, (CHAIN,), "chain", False), PLANNING, 0.03, faults=(0, 1)),
    "recovery": Kind(recovery, PLANNING, 0.03),
    "missing": Kind(missing, TIMING, 0.08),
    "no_tool": Kind(no_tool, TIMING, 0.06),
    "no_suitable": Kind(no_suitable, TIMING, 0.06, (4, 5)),
    "retrieval": Kind(single, "tool_retrieval", 0.15, (8, 11)),
}


def draw_dialog(shelf: Shelf, name: str, seed: int, index: int) -> Dialog | None:
    """The dialog of this kind and number, or None if it did not come about."""
    kind, rng = KINDS[name], seeded("sft", seed, shelf.split, name, index)
    start = seeded("start", name).randrange(1 << 20)
    tool, text = shelf.ask(start + index)
    at = {rng.choice(kind.faults): rng.choice(list(FAULTS))} if kind.faults else {}
    episode = shelf.world.episode(
        [tool.category], rng.randrange(1 << 30), shelf.split, Faults(at=at)
    )
    scene = Scene(shelf, tool.category, rng, episode)
    if not kind.play(scene, tool, text) or not follow(scene):
        return None
    count = max(rng.randint(*kind.tools), len(scene.used) + 1)
    same = 0.6 if name == "retrieval" else 1.0
    needed = list(scene.used.values())
    offered = shelf.candidates(needed, count, rng, scene.barred, same)
    if sum(len(m.content) for m in scene.messages) > LONGEST:
        return None
    called = list(dict.fromkeys(c.name for m in scene.messages for c in m.tool_calls))
    metadata = {"kind": name, "category": tool.category, "target_tools": called}
    metadata |= {"seed": episode.seed, "faults": {"at": {str(n): f for n, f in at.items()}}}
    specs = tuple(t.spec for t in offered)
    return Dialog(tuple(scene.messages), specs, task_type=kind.task_type, metadata=metadata)


def follow(scene: Scene) -> bool:
    """Go on until the dialog is long enough, and now and then a little longer."""
    low, high = MESSAGES
    turns = [another, another, recall, general, thanks]
    turns = [another_question, another_question, general] if scene.quiet else turns
    while len(scene.messages) < low or (
        len(scene.messages) + 4 <= high and scene.rng.random() < LONGER
    ):
        turn = scene.rng.choice(turns)
        if not turn(scene) and not turns[0](scene):
            return False
        if turn is thanks:
            break
    return low <= len(scene.messages) <= high
