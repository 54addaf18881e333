"""Dialogs of `agent_sft`: a main request of one kind, solved with real calls, and whatever follows
until the dialog has six to twelve messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from sharpen.data.generate.plans import CHAIN, LONG, PAIR, TRIPLE, ask_for, find_steps
from sharpen.data.generate.scene import Fruitless, Scene, lacking
from sharpen.data.generate.splits import Shelf, look_alikes
from sharpen.types import Dialog, ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, Faults, outcome_of
from sharpen.world.phrases import fill, missing_question, slots, spoken
from sharpen.world.state import seeded

FEWEST, MOST = 6, 12  # messages
LONGEST = 4400  # characters of everything but the tools: about 1,300 tokens
QUIET, LONGER = 0.6, 0.2  # shares: of dialogs about nothing to do, and of one more turn
TRIES = 8


def single(scene: Scene) -> None:
    scene.serve(scene.request(scene.text))


def refused(scene: Scene) -> None:
    """The state forbids it: the assistant says so and does not try again."""
    for outcome in scene.rng.sample(["conflict", "permission", "empty"], 3):
        with suppress(Fruitless):
            result = scene.perform(scene.request(scene.text, outcome))[0]
            scene.say(f"I could not do that: {result.get('message', 'nothing matches that')}.")
            return
    raise Fruitless


def recovery(scene: Scene) -> None:
    """The key is wrong: the assistant looks the right ones up, asks, and goes on."""
    tool, wrong = scene.tool, scene.request(scene.text, "not_found")
    key = next((n for n in tool.takes if n in tool.required and not tool.params[n].many), "")
    entity = tool.takes.get(key, "")
    finders = [(t, path) for t in scene.tools.values() if (path := listing(t, entity))]
    if not finders:
        raise Fruitless
    finder, path = scene.rng.choice(finders)
    listed = scene.episode.fork().call(ToolCall(finder.name))
    right = [row[key] for row in listed.get(path, ()) if key in row]
    calls = [replace(wrong, arguments=wrong.arguments | {key: value}) for value in right]
    good = [c for c in calls if outcome_of(scene.episode.fork().call(c)) == "ok"]
    if not good:
        raise Fruitless
    named = f"{scene.shelf.entity(tool, entity).noun} {wrong.arguments[key]}"
    scene.perform(wrong)
    scene.perform(ToolCall(finder.name), content=f"There is no {named}; I look for it.")
    scene.say(f"I found no {named}. There are {spoken(right)}. Which one do you mean?")
    scene.user(scene.frame("confirm").format(key=good[0].arguments[key]))
    scene.serve(good[0])


def listing(tool: Tool, entity: str) -> str:
    """Where a tool that is called with nothing shows keys of this entity; empty if it does not."""
    if not tool.read_only or tool.required:
        return ""
    paths = (path for path, shown in tool.yields.items() if shown == entity)
    return next((path.split("[]")[0] for path in paths if path.count("[]") == 1), "")


def planned(shapes: tuple[str, ...], frame: str, scene: Scene) -> None:
    """Several steps of one request: independent ones at once, others in turn."""
    steps = find_steps(scene, shapes, TRIES)
    ask_for(scene, steps, frame)
    if frame == "both":
        scene.perform(*(step.call for step in steps))
    else:
        names = [f"{at}. {step.tool.name}" for at, step in enumerate(steps, 1)]
        for at, step in enumerate(steps):
            scene.perform(step.call, content="" if at else f"Plan: {', '.join(names)}.")
    scene.last = steps[-1].tool, steps[-1].result
    scene.say(" ".join(scene.answer(step.tool, step.result, step.call) for step in steps))


def missing(scene: Scene) -> None:
    """Something is left out: the assistant asks, the user tells, the call follows."""
    tool, vague = scene.tool, scene.tool.operation.vague
    if not vague:
        raise Fruitless
    call, names = scene.request(vague), lacking(tool, vague)
    scene.say(" ".join(missing_question(tool, name) for name in names))
    frame = scene.frame("given") if len(names) == 1 else scene.shelf.frames["given"][0]
    told = [(tool.params[name].field.about, spoken(call.arguments[name])) for name in names]
    scene.user("; ".join(frame.format(about=about, value=value) for about, value in told) + ".")
    scene.serve(call)


def no_tool(scene: Scene) -> None:
    """The user wants to know, not to act; the request itself may come afterwards."""
    scene.quiet = scene.rng.random() < QUIET
    call = explain(scene)
    if not scene.quiet and scene.rng.random() < 0.5:
        goal = fill(scene.tool.operation.goal, call.arguments)
        scene.user(scene.frame("one").format(goal=goal))
        scene.serve(call)


def explain(scene: Scene) -> ToolCall:
    """Say which tool would do it and with what, and leave it at that."""
    name, about, goal = scene.tool.name, scene.tool.operation.about, scene.tool.operation.goal
    call = scene.sample(goal)
    scene.user(scene.frame("explain").format(goal=fill(goal, call.arguments)))
    given = [f"{n.replace('_', ' ')} {spoken(v)}" for n, v in call.arguments.items()]
    told = f"I would pass {', '.join(given) or 'nothing'}; nothing has been done yet."
    scene.say(f"With {name}: {about[:1].lower()}{about[1:-1]}. {told}")
    scene.used[name] = scene.tool
    return call


def no_suitable(scene: Scene) -> None:
    """Nothing on offer does it, from the first such request on."""
    if not scene.barred:
        scene.quiet = scene.rng.random() < QUIET
        scene.barred = look_alikes(scene.shelf, scene.tool)
    call, goal = scene.request(scene.text), scene.tool.operation.goal
    told = all(name in call.arguments for name in slots(goal))
    wanted = fill(goal, call.arguments) if told else "do that"
    scene.say(f"None of the tools I have here can {wanted}, so I have to leave it.")


def another(scene: Scene) -> None:
    for tool in unused(scene):
        scene.tool, scene.text = tool, scene.rng.choice(tool.operation.ask)
        with suppress(Fruitless):
            return single(scene)
    raise Fruitless


def unused(scene: Scene) -> list[Tool]:
    """A few tools of the category that did not occur yet."""
    free = [t for t in scene.tools.values() if t.name not in scene.used and t not in scene.barred]
    return scene.rng.sample(free, min(4, len(free)))


def another_question(scene: Scene) -> None:
    """One more request that is not to be acted on."""
    if scene.barred:
        scene.tool = scene.rng.choice(scene.barred)
        scene.text = scene.rng.choice(scene.tool.operation.ask)
        return no_suitable(scene)
    tools = unused(scene)
    if not tools:
        raise Fruitless
    scene.tool = tools[0]
    explain(scene)


def recall(scene: Scene) -> None:
    """Something that the last answer already said: one of its described single values."""
    tool, result = scene.last or (scene.tool, {})
    properties = tool.outputs()["properties"]
    found = []
    for name, value in result.items():
        about = properties.get(name, {}).get("description", "")
        if about and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            found.append((about[:1].lower() + about[1:], spoken(value)))
    if not found:
        raise Fruitless
    about, value = scene.rng.choice(found)
    scene.user(scene.frame("recall").format(about=about))
    scene.say(f"The {about} is {value}.")


def general(scene: Scene) -> None:
    text, kind = scene.frame("general")
    a, b = scene.rng.randrange(5, 95, 5), scene.rng.randrange(20, 900, 20)
    a = scene.rng.randrange(2, 30) if kind == "minutes" else a
    value = {"percent": a * b / 100, "minutes": a * 60, "sum": a + b}[kind]
    scene.user(text.format(a=a, b=b))
    scene.say(f"That is {value:g}{' minutes' if kind == 'minutes' else ''}.")


def thanks(scene: Scene) -> None:
    scene.user(scene.frame("thanks"))
    scene.say("You're welcome.")


def follow(scene: Scene) -> None:
    """Go on until the dialog is long enough, and now and then a little longer."""
    turns = [another, another, recall, general, thanks]
    turns = [another_question, another_question, general] if scene.quiet else turns
    turn = None
    while turn is not thanks and (
        len(scene.messages) < FEWEST
        or (len(scene.messages) + 4 <= MOST and scene.rng.random() < LONGER)
    ):
        turn = scene.rng.choice(turns)
        try:
            turn(scene)
        except Fruitless:
            turns[0](scene)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of dialog: how it is played, its task type, its share, its number of tools."""

    play: Callable[[Scene], None]
    task_type: str
    share: float
    tools: tuple[int, int] = (3, 5)
    faults: tuple[int, ...] = ()  # numbers of the calls that fail once


PAIRS, CHAINS = (PAIR, PAIR, TRIPLE), (CHAIN, CHAIN, LONG)
SELECTION, PLANNING, TIMING = "tool_selection", "multi_step_planning", "timing_decision"
KINDS = {
    "single": Kind(single, SELECTION, 0.17, (3, 6)),
    "parallel": Kind(partial(planned, PAIRS, "both"), SELECTION, 0.08),
    "retry": Kind(single, SELECTION, 0.05, faults=(0,)),
    "refused": Kind(refused, SELECTION, 0.05),
    "chain": Kind(partial(planned, CHAINS, "chain"), PLANNING, 0.17),
    "sequence": Kind(partial(planned, PAIRS, "chain"), PLANNING, 0.07),
    "chain_retry": Kind(partial(planned, (CHAIN,), "chain"), PLANNING, 0.03, faults=(0, 1)),
    "recovery": Kind(recovery, PLANNING, 0.03),
    "missing": Kind(missing, TIMING, 0.08),
    "no_tool": Kind(no_tool, TIMING, 0.06),
    "no_suitable": Kind(no_suitable, TIMING, 0.06, (4, 5)),
    "retrieval": Kind(single, "tool_retrieval", 0.15, (8, 11)),
}


def draw_dialog(shelf: Shelf, name: str, seed: int, index: int) -> Dialog | None:
    """The dialog of this kind and number, or None if it did not come about."""
    kind, rng = KINDS[name], seeded("sft", seed, shelf.split, name, index)
    tool, text = shelf.ask(seeded("start", name).randrange(1 << 20) + index)
    at = {rng.choice(kind.faults): rng.choice(list(FAULTS))} if kind.faults else {}
    place = [tool.category], rng.randrange(1 << 30), shelf.split
    scene = Scene(shelf, shelf.world.episode(*place, Faults(at=at)), rng, tool, text)
    try:
        kind.play(scene)
        follow(scene)
    except Fruitless:
        return None
    said = scene.messages
    if not FEWEST <= len(said) <= MOST or sum(len(m.content) for m in said) > LONGEST:
        return None
    count = max(rng.randint(*kind.tools), len(scene.used) + 1)
    same = 0.6 if name == "retrieval" else 1.0
    offered = shelf.candidates([*scene.used.values()], count, rng, scene.barred, same)
    called = list(dict.fromkeys(c.name for m in said for c in m.tool_calls))
    metadata = {"kind": name, "category": tool.category, "target_tools": called}
    metadata |= {"seed": scene.episode.seed, "faults": {"at": {str(n): f for n, f in at.items()}}}
    specs = tuple(t.spec for t in offered)
    return Dialog(tuple(said), specs, task_type=kind.task_type, metadata=metadata)
