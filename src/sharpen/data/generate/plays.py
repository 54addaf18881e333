"""What happens in a row, by the names that `sets.yaml` uses. A dialog has a main request, solved
with real calls, and goes on with `follow` until it has six to twelve messages. A task is what the
user says last, with the gold answer to it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from sharpen.data.generate.plans import ask_for, find_steps, plan_to_gold, written
from sharpen.data.generate.scene import Fruitless, Scene, lacking, must, using
from sharpen.data.generate.splits import look_alikes
from sharpen.types import ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, outcome_of
from sharpen.world.phrases import fill, missing_question, slots, spoken

FEWEST, MOST = 6, 12  # messages
LONGEST = 4400  # characters of everything but the tools: about 1,300 tokens
QUIET, LONGER = 0.6, 0.2  # shares: of dialogs about nothing to do, and of one more turn

# Main requests of dialogs ----------------------------------------------------------------------


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
    finders = [(t, path) for t in scene.domain.tools.values() if (path := listing(t, entity))]
    finder, path = scene.rng.choice(must(finders))
    listed = scene.episode.fork().call(ToolCall(finder.name))
    right = [row[key] for row in listed.get(path, ()) if key in row]
    calls = [replace(wrong, arguments=wrong.arguments | {key: value}) for value in right]
    good = must([c for c in calls if outcome_of(scene.episode.fork().call(c)) == "ok"])
    named = f"{scene.domain.entities[entity].noun} {wrong.arguments[key]}"
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


def planned(scene: Scene) -> None:
    """Several steps of one request: independent ones at once, others in turn."""
    steps = find_steps(scene)
    ask_for(scene, steps)
    if scene.kind.frame == "both":
        scene.perform(*(step.call for step in steps))
    else:
        names = [f"{at}. {step.tool.name}" for at, step in enumerate(steps, 1)]
        for at, step in enumerate(steps):
            scene.perform(step.call, content="" if at else f"Plan: {', '.join(names)}.")
    scene.last = steps[-1].tool, steps[-1].result
    scene.say(" ".join(scene.answer(step.tool, step.result, step.call) for step in steps))


def missing(scene: Scene) -> None:
    """Something is left out: the assistant asks, the user tells, the call follows."""
    tool, vague = scene.tool, must(scene.tool.operation.vague)
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
        scene.barred = look_alikes(scene.domain.tools.values(), scene.tool)
    call, goal = scene.request(scene.text), scene.tool.operation.goal
    told = all(name in call.arguments for name in slots(goal))
    wanted = fill(goal, call.arguments) if told else "do that"
    scene.say(f"None of the tools I have here can {wanted}, so I have to leave it.")


# How a dialog goes on --------------------------------------------------------------------------


def follow(scene: Scene) -> None:
    """Go on until the dialog is long enough, and now and then a little longer."""
    turns = [another, another, recall, general, thanks]
    turns = [another_question, another_question, general] if scene.quiet else turns
    turn, said = None, scene.messages
    while turn is not thanks and (
        len(said) < FEWEST or (len(said) + 4 <= MOST and scene.rng.random() < LONGER)
    ):
        turn = scene.rng.choice(turns)
        try:
            turn(scene)
        except Fruitless:
            turns[0](scene)
    if not FEWEST <= len(said) <= MOST or sum(len(m.content) for m in said) > LONGEST:
        raise Fruitless


def another(scene: Scene) -> None:
    for tool in unused(scene):
        scene.tool, scene.text = tool, scene.rng.choice(tool.operation.ask)
        with suppress(Fruitless):
            return single(scene)
    raise Fruitless


def unused(scene: Scene) -> list[Tool]:
    """A few tools of the category that did not occur yet."""
    free = [t for t in scene.domain.tools.values() if t.name not in scene.used]
    free = [t for t in free if t not in scene.barred]
    return scene.rng.sample(free, min(4, len(free)))


def another_question(scene: Scene) -> None:
    """One more request that is not to be acted on."""
    if scene.barred:
        scene.tool = scene.rng.choice(scene.barred)
        scene.text = scene.rng.choice(scene.tool.operation.ask)
        return no_suitable(scene)
    scene.tool = must(unused(scene))[0]
    explain(scene)


def recall(scene: Scene) -> None:
    """Something that the last answer already said: one of its described single values."""
    tool, result = scene.last or (scene.tool, {})
    about = {n: p.get("description", "") for n, p in tool.outputs()["properties"].items()}
    values = {n: value for n, value in result.items() if type(value) in (str, int, float)}
    found = must([(about[n], value) for n, value in values.items() if about.get(n)])
    name, value = scene.rng.choice(found)
    name = name[:1].lower() + name[1:]
    scene.user(scene.frame("recall").format(about=name))
    scene.say(f"The {name} is {spoken(value)}.")


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


# Tasks -----------------------------------------------------------------------------------------


def select(scene: Scene) -> None:
    scene.gold = {"tools": [scene.tool.name], "calls": written(scene.request(scene.text))}


def act(scene: Scene) -> None:
    scene.gold["decision"] = "call"


def ask(scene: Scene) -> None:
    """The tool's own vague request, or its goal with one key left in the dark."""
    tool, phrase = scene.tool, scene.tool.operation.vague
    named = [n for n in using(tool, tool.operation.goal) if n in tool.required]
    keys = [n for n in named if n in tool.takes and not tool.params[n].many]
    if keys and (scene.level or not phrase):
        name = scene.rng.choice(keys)
        noun = scene.domain.entities[tool.takes[name]].noun
        goal = tool.operation.goal.replace(f"{{{name}}}", scene.frame("someone").format(noun=noun))
        phrase = scene.frame("one").replace("{goal}", goal)
    scene.request(must(phrase))
    scene.gold = {"decision": "ask", "tools": [tool.name], "missing": lacking(tool, phrase)}


def answered(scene: Scene) -> None:
    """No call is needed: what was said last is the answer."""
    said = scene.messages.pop().content
    scene.gold = {"decision": "answer"} | ({"answer": said} if scene.kind.known else {})


def decline(scene: Scene) -> None:
    scene.request(scene.text)
    scene.barred = look_alikes(scene.domain.tools.values(), scene.tool)
    scene.gold = {"decision": "decline"}


def plan(scene: Scene) -> None:
    steps = find_steps(scene)
    ask_for(scene, steps)
    scene.gold = plan_to_gold(steps)


def accomplish(scene: Scene) -> None:
    """One change, or steps of which one changes something; hard ones meet a fault on the way."""
    if not scene.level:
        return select(scene)
    steps = find_steps(scene)
    scene.gold = {"calls": written(*(step.call for step in steps))}
    if scene.level == 2:
        at = str(scene.rng.randrange(len(steps)))
        scene.gold["faults"] = {"at": {at: scene.rng.choice(list(FAULTS))}}
    ask_for(scene, steps)
