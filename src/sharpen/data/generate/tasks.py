"""Tasks of `agent_benchmark`: choose a tool, plan, decide what to do now, and do it end to end.
Every gold answer names the episode it was executed in, so that anybody can execute it again.

Timing knows four decisions: `call` (all that is needed was said), `ask` (the right tool is there,
but the request leaves out something it requires), `answer` (no call: it was said before, or the
user wants to know how and not to act), `decline` (nothing on offer can do it).
"""

from __future__ import annotations

from collections.abc import Callable

from sharpen.data.generate import dialogs, plans
from sharpen.data.generate.scene import Fruitless, Scene, lacking, using
from sharpen.data.generate.splits import Shelf, look_alikes
from sharpen.types import Task
from sharpen.world.episode import FAULTS
from sharpen.world.state import seeded

# What follows is by level.
LEVELS = ("easy", "medium", "hard")
SHAPES = (plans.EASY, plans.MEDIUM, plans.HARD)
SAME = (0.5, 0.8, 1.0)  # share of distractors from the same category
OFFERED = {
    "selection": (6, 8, 11),
    "planning": (5, 6, 8),
    "timing": (3, 5, 6),
    "end_to_end": (4, 6, 7),
}
TRIES = 30
Play = Callable[[Scene], None]


def draw_task(shelf: Shelf, part: str, variant: str, seed: int | str, index: int) -> Task | None:
    """The task of this part, variant and number, or None: what the user says last in a scene."""
    level, rng = index % len(LEVELS), seeded(part, seed, shelf.split, variant, index)
    start = seeded("start", part, variant).randrange(1 << 20)
    tool, text = shelf.ask(start + index, writing=part == "end_to_end")
    episode = shelf.world.episode([tool.category], rng.randrange(1 << 30), shelf.split)
    scene = Scene(shelf, episode, rng, tool, text, level)
    try:
        PARTS[part][variant][0](scene)
    except Fruitless:
        return None
    needed = list(scene.used.values()) or ([] if scene.barred else [tool])
    count = max(OFFERED[part][level], len(needed) + 1)
    offered = shelf.candidates(needed, count, rng, scene.barred, SAME[level])
    categories = sorted({t.category for t in (*offered, *needed)})
    where = {"categories": categories, "seed": episode.seed, "family": shelf.split}
    *context, asked = scene.messages
    if "calls" in scene.gold:
        run = plans.replay(shelf.world, scene.gold | where, asked.content)
        if part == "end_to_end" and not run.changes():
            return None  # doing nothing would be as good
        scene.gold["state"] = run.digest()
    specs = tuple(t.spec for t in offered)
    about = {"category": tool.category, "variant": variant}
    return Task(
        "", asked.content, specs, scene.gold | where, part, LEVELS[level], tuple(context), about
    )


def select(scene: Scene) -> None:
    scene.gold = {"tools": [scene.tool.name]} | plans.gold_calls([scene.request(scene.text)])


def act(scene: Scene) -> None:
    select(scene)
    scene.gold["decision"] = "call"


def ask(scene: Scene) -> None:
    """The tool's own vague request, or its goal with one key left in the dark."""
    tool, phrase = scene.tool, scene.tool.operation.vague
    named = [n for n in using(tool, tool.operation.goal) if n in tool.required]
    keys = [n for n in named if n in tool.takes and not tool.params[n].many]
    if keys and (scene.level or not phrase):
        name = scene.rng.choice(keys)
        hidden = scene.frame("someone").format(noun=scene.shelf.entity(tool, tool.takes[name]).noun)
        goal = tool.operation.goal.replace(f"{{{name}}}", hidden)
        phrase = scene.frame("one").replace("{goal}", goal)
    if not phrase:
        raise Fruitless
    scene.request(phrase)
    scene.gold = {"decision": "ask", "tools": [tool.name], "missing": lacking(tool, phrase)}


def answer(*plays: Callable[[Scene], object], known: bool = True) -> Play:
    """No call is needed: the last play ends with the answer, which is gold where it is `known`."""

    def play(scene: Scene) -> None:
        for one in plays:
            one(scene)
        said = scene.messages.pop().content
        scene.gold = {"decision": "answer"} | ({"answer": said} if known else {})

    return play


def decline(scene: Scene) -> None:
    scene.request(scene.text)
    scene.barred = look_alikes(scene.shelf, scene.tool)
    scene.gold = {"decision": "decline"}


def plan(scene: Scene) -> None:
    steps = plans.find_steps(scene, SHAPES[scene.level], TRIES)
    want(scene, steps)
    scene.gold = plans.plan_to_gold(steps) | scene.gold


def want(scene: Scene, steps: list[plans.Step]) -> None:
    plans.ask_for(scene, steps)
    scene.used = {step.tool.name: step.tool for step in steps}
    scene.gold = plans.gold_calls([step.call for step in steps]) | scene.gold


def accomplish(scene: Scene) -> None:
    """One change, or steps of which one changes something; hard ones meet a fault on the way."""
    if not scene.level:
        return select(scene)
    steps = plans.find_steps(scene, SHAPES[scene.level - 1], TRIES, writes=True)
    if LEVELS[scene.level] == "hard":
        at = str(scene.rng.randrange(len(steps)))
        scene.gold["faults"] = {"at": {at: scene.rng.choice(list(FAULTS))}}
    want(scene, steps)


PARTS: dict[str, dict[str, tuple[Play, float]]] = {  # part → variant, with its share
    "selection": {"select": (select, 1.0)},
    "planning": {"plan": (plan, 1.0)},
    "timing": {
        "call": (act, 0.28),
        "ask": (ask, 0.26),
        "explain": (answer(dialogs.explain, known=False), 0.14),
        "remember": (answer(dialogs.single, dialogs.recall), 0.10),
        "reckon": (answer(dialogs.general), 0.01),
        "decline": (decline, 0.21),
    },
    "end_to_end": {"accomplish": (accomplish, 1.0)},
}
