"""Tasks of `agent_benchmark`: choose a tool, plan, decide what to do now, and do it end to end.

Every gold answer names the episode it was executed in, so that anybody can execute it again.

Timing knows four decisions: `call` (all that is needed was said), `ask` (the right tool is there,
but the request leaves out something it requires), `answer` (no call: it was said before, or the
user wants to know how and not to act), `decline` (nothing on offer can do it).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sharpen.data.generate.dialogs import (
    Scene,
    general_question,
    joined,
    recall,
    single,
)
from sharpen.data.generate.plans import (
    EASY,
    HARD,
    MEDIUM,
    Shape,
    Step,
    goals,
    grow,
    plan_to_gold,
    using,
)
from sharpen.data.generate.splits import Shelf, look_alikes
from sharpen.types import Json, Message, Task, ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, Episode
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded

LEVELS = ("easy", "medium", "hard")
SHAPES: dict[str, tuple[Shape, ...]] = {"easy": EASY, "medium": MEDIUM, "hard": HARD}
OFFERED = {  # candidate tools by difficulty
    "selection": {"easy": 6, "medium": 8, "hard": 11},
    "planning": {"easy": 5, "medium": 6, "hard": 8},
    "timing": {"easy": 3, "medium": 5, "hard": 6},
    "end_to_end": {"easy": 4, "medium": 6, "hard": 7},
}
SAME = {"easy": 0.5, "medium": 0.8, "hard": 1.0}  # share of distractors from the same category
TRIES = 30
Made = tuple[str, list[Tool], list[Tool], Json, tuple[Message, ...]]


def draw_task(shelf: Shelf, part: str, variant: str, seed: int, index: int) -> Task | None:
    """The task of this part, variant and number, or None if it did not come about."""
    level = LEVELS[index % len(LEVELS)]
    rng = seeded(part, seed, shelf.split, variant, index)
    start = seeded("start", part, variant).randrange(1 << 20)
    tool, text = shelf.ask(start + index, writing=part == "end_to_end")
    episode = shelf.world.episode([tool.category], rng.randrange(1 << 30), shelf.split)
    made = PARTS[part][variant](shelf, tool, text, episode, rng, level)
    if made is None:
        return None
    instruction, needed, barred, gold, context = made
    count = max(OFFERED[part][level], len(needed) + 1)
    same = SAME[level]
    offered = shelf.candidates(needed, count, rng, barred, same)
    where = {
        "categories": sorted({t.category for t in (*offered, *needed)}),
        "seed": episode.seed,
        "family": shelf.split,
    }
    if "calls" in gold:
        run = shelf.world.episode(where["categories"], episode.seed, shelf.split)
        for call in gold["calls"]:
            run.call(ToolCall(call["name"], call["arguments"]))
        gold |= {"state": run.digest()}
    instruction = instruction[:1].upper() + instruction[1:]
    specs = tuple(t.spec for t in offered)
    metadata = {"category": tool.category, "variant": variant}
    return Task("", instruction, specs, gold | where, part, level, context, metadata)


def gold_calls(calls: Sequence[ToolCall]) -> list[Json]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


# Selection and timing --------------------------------------------------------------------------


def select(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    call = episode.sample(tool, rng, using(tool, text))
    if call is None:
        return None
    gold = {"tools": [tool.name], "calls": gold_calls([call])}
    return fill(text, call.arguments), [tool], [], gold, ()


def act(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    made = select(shelf, tool, text, episode, rng, level)
    return made and (*made[:3], made[3] | {"decision": "call"}, made[4])


def ask(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    """A request that lacks something: the tool's own vague one, or its goal with one key left in
    the dark."""
    vague = tool.operation.vague
    keys = [n for n in using(tool, tool.operation.goal) if n in tool.takes and n in tool.required]
    keys = [n for n in keys if not tool.params[n].many]
    if vague and (level == "easy" or not keys):
        phrase = vague
    elif keys:
        name = rng.choice(keys)
        noun = shelf.entity(tool, tool.takes[name]).noun
        hidden = rng.choice(shelf.frames["someone"]).format(noun=noun)
        goal = tool.operation.goal.replace(f"{{{name}}}", hidden)
        phrase = rng.choice(shelf.frames["one"]).replace("{goal}", goal)
    else:
        return None
    call = episode.sample(tool, rng, using(tool, phrase))
    lacking = [name for name in tool.required if name not in slots(phrase)]
    if call is None or not lacking:
        return None
    gold = {"decision": "ask", "tools": [tool.name], "missing": lacking}
    return fill(phrase, call.arguments), [tool], [], gold, ()


def explain(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    call = episode.sample(tool, rng, using(tool, tool.operation.goal))
    if call is None:
        return None
    goal = fill(tool.operation.goal, call.arguments)
    instruction = rng.choice(shelf.frames["explain"]).format(goal=goal)
    return instruction, [tool], [], {"decision": "answer"}, ()


def remember(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    """What is asked stands in the conversation already."""
    scene = Scene(shelf, tool.category, rng, episode)
    if not single(scene, tool, text) or not recall(scene):
        return None
    *context, question, answer = scene.messages
    gold = {"decision": "answer", "answer": answer.content}
    return question.content, [tool], [], gold, tuple(context)


def reckon(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    question, answer = general_question(*rng.choice(shelf.frames["general"]), rng)
    return question, [tool], [], {"decision": "answer", "answer": answer}, ()


def decline(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    made = select(shelf, tool, text, episode, rng, level)
    return made and (made[0], [], [tool, *look_alikes(shelf, tool)], {"decision": "decline"}, ())


# Planning and end to end -----------------------------------------------------------------------


def steps_of(
    shelf: Shelf, episode: Episode, category: str, rng: random.Random, level: str, writes: bool
) -> list[Step]:
    for _ in range(TRIES):
        steps = grow(episode, shelf, category, rng, rng.choice(SHAPES[level]))
        if steps and (not writes or any(not step.tool.read_only for step in steps)):
            return steps
    return []


def plan(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    steps = steps_of(shelf, episode, tool.category, rng, level, False)
    if not steps:
        return None
    gold = plan_to_gold(steps) | {"calls": gold_calls([step.call for step in steps])}
    return request(shelf, steps, rng), [step.tool for step in steps], [], gold, ()


def request(shelf: Shelf, steps: list[Step], rng: random.Random) -> str:
    linked = any(step.links for step in steps)
    return joined(rng.choice(shelf.frames["chain" if linked else "both"]), goals(steps))


def accomplish(
    shelf: Shelf, tool: Tool, text: str, episode: Episode, rng: random.Random, level: str
) -> Made | None:
    """Easy: one change in a phrasing of its own. Medium and hard: two to four steps, at least one
    of which changes something; the hard ones meet a fault on the way."""
    if level == "easy":
        return select(shelf, tool, text, episode, rng, level)
    lower = {"medium": "easy", "hard": "medium"}[level]
    steps = steps_of(shelf, episode, tool.category, rng, lower, True)
    if not steps:
        return None
    gold: Json = {"calls": gold_calls([step.call for step in steps])}
    if level == "hard":
        gold["faults"] = {"at": {str(rng.randrange(len(steps))): rng.choice(list(FAULTS))}}
    return request(shelf, steps, rng), [step.tool for step in steps], [], gold, ()


Maker = Callable[[Shelf, Tool, str, Episode, random.Random, str], "Made | None"]
PARTS: dict[str, dict[str, Maker]] = {
    "selection": {"select": select},
    "planning": {"plan": plan},
    "timing": {
        "call": act,
        "ask": ask,
        "explain": explain,
        "remember": remember,
        "reckon": reckon,
        "decline": decline,
    },
    "end_to_end": {"accomplish": accomplish},
}
SHARES = {
    "call": 0.28,
    "ask": 0.26,
    "explain": 0.12,
    "remember": 0.12,
    "reckon": 0.01,
    "decline": 0.21,
}
