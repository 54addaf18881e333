"""Tasks of `agent_benchmark`: choose a tool, plan, decide what to do now, and do it end to end.

Every gold answer names the episode it was executed in, so that anybody can execute it again.

Timing knows four decisions: `call` (all that is needed was said), `ask` (the right tool is there,
but the request leaves out something it requires), `answer` (no call: it was said before, or the
user wants to know how and not to act), `decline` (nothing on offer can do it).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Draft:
    """What a task is made from."""

    shelf: Shelf
    tool: Tool
    text: str  # a phrasing of the tool's
    episode: Episode
    rng: random.Random
    level: str


def draw_task(shelf: Shelf, part: str, variant: str, seed: int | str, index: int) -> Task | None:
    """The task of this part, variant and number, or None if it did not come about."""
    level = LEVELS[index % len(LEVELS)]
    rng = seeded(part, seed, shelf.split, variant, index)
    start = seeded("start", part, variant).randrange(1 << 20)
    tool, text = shelf.ask(start + index, writing=part == "end_to_end")
    episode = shelf.world.episode([tool.category], rng.randrange(1 << 30), shelf.split)
    made = PARTS[part][variant][0](Draft(shelf, tool, text, episode, rng, level))
    if made is None:
        return None
    instruction, needed, barred, gold, context = made
    count = max(OFFERED[part][level], len(needed) + 1)
    offered = shelf.candidates(needed, count, rng, barred, SAME[level])
    where = {
        "categories": sorted({t.category for t in (*offered, *needed)}),
        "seed": episode.seed,
        "family": shelf.split,
    }
    if "calls" in gold:
        run = shelf.world.episode(where["categories"], episode.seed, shelf.split)
        for call in gold["calls"]:
            run.call(ToolCall(call["name"], call["arguments"]))
        if part == "end_to_end" and not run.changes():
            return None  # doing nothing would be as good
        gold |= {"state": run.digest()}
    instruction = instruction[:1].upper() + instruction[1:]
    specs = tuple(t.spec for t in offered)
    metadata = {"category": tool.category, "variant": variant}
    return Task("", instruction, specs, gold | where, part, level, context, metadata)


def gold_calls(calls: Sequence[ToolCall]) -> list[Json]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


# Selection and timing --------------------------------------------------------------------------


def select(draft: Draft) -> Made | None:
    call = draft.episode.sample(draft.tool, draft.rng, using(draft.tool, draft.text))
    if call is None:
        return None
    gold = {"tools": [draft.tool.name], "calls": gold_calls([call])}
    return fill(draft.text, call.arguments), [draft.tool], [], gold, ()


def act(draft: Draft) -> Made | None:
    made = select(draft)
    if made is None:
        return None
    instruction, needed, barred, gold, context = made
    return instruction, needed, barred, gold | {"decision": "call"}, context


def ask(draft: Draft) -> Made | None:
    """A request that lacks something: the tool's own vague one, or its goal with one key left in
    the dark."""
    tool, rng = draft.tool, draft.rng
    vague = tool.operation.vague
    spoken = [n for n in using(tool, tool.operation.goal) if n in tool.required]
    keys = [n for n in spoken if n in tool.takes and not tool.params[n].many]
    if vague and (draft.level == "easy" or not keys):
        phrase = vague
    elif keys:
        name = rng.choice(keys)
        noun = draft.shelf.entity(tool, tool.takes[name]).noun
        hidden = rng.choice(draft.shelf.frames["someone"]).format(noun=noun)
        goal = tool.operation.goal.replace(f"{{{name}}}", hidden)
        phrase = rng.choice(draft.shelf.frames["one"]).replace("{goal}", goal)
    else:
        return None
    call = draft.episode.sample(tool, rng, using(tool, phrase))
    lacking = [name for name in tool.required if name not in slots(phrase)]
    if call is None or not lacking:
        return None
    gold = {"decision": "ask", "tools": [tool.name], "missing": lacking}
    return fill(phrase, call.arguments), [tool], [], gold, ()


def explain(draft: Draft) -> Made | None:
    call = draft.episode.sample(draft.tool, draft.rng, using(draft.tool, draft.tool.operation.goal))
    if call is None:
        return None
    goal = fill(draft.tool.operation.goal, call.arguments)
    instruction = draft.rng.choice(draft.shelf.frames["explain"]).format(goal=goal)
    return instruction, [draft.tool], [], {"decision": "answer"}, ()


def remember(draft: Draft) -> Made | None:
    """What is asked stands in the conversation already."""
    scene = Scene(draft.shelf, draft.tool.category, draft.rng, draft.episode)
    if not single(scene, draft.tool, draft.text) or not recall(scene):
        return None
    *context, question, answer = scene.messages
    gold = {"decision": "answer", "answer": answer.content}
    return question.content, [draft.tool], [], gold, tuple(context)


def reckon(draft: Draft) -> Made | None:
    text, kind = draft.rng.choice(draft.shelf.frames["general"])
    question, answer = general_question(text, kind, draft.rng)
    return question, [draft.tool], [], {"decision": "answer", "answer": answer}, ()


def decline(draft: Draft) -> Made | None:
    made = select(draft)
    if made is None:
        return None
    return made[0], [], look_alikes(draft.shelf, draft.tool), {"decision": "decline"}, ()


# Planning and end to end -----------------------------------------------------------------------


def steps_of(draft: Draft, level: str, writes: bool) -> list[Step]:
    for _ in range(TRIES):
        shape = draft.rng.choice(SHAPES[level])
        steps = grow(draft.episode, draft.shelf, draft.tool.category, draft.rng, shape)
        if steps and (not writes or any(not step.tool.read_only for step in steps)):
            return steps
    return []


def plan(draft: Draft) -> Made | None:
    steps = steps_of(draft, draft.level, False)
    if not steps:
        return None
    gold = plan_to_gold(steps) | {"calls": gold_calls([step.call for step in steps])}
    return request(draft, steps), [step.tool for step in steps], [], gold, ()


def request(draft: Draft, steps: list[Step]) -> str:
    linked = any(step.links for step in steps)
    return joined(draft.rng.choice(draft.shelf.frames["chain" if linked else "both"]), goals(steps))


def accomplish(draft: Draft) -> Made | None:
    """Easy: one change in a phrasing of its own. Medium and hard: two to four steps, at least one
    of which changes something; the hard ones meet a fault on the way."""
    if draft.level == "easy":
        return select(draft)
    lower = {"medium": "easy", "hard": "medium"}[draft.level]
    steps = steps_of(draft, lower, True)
    if not steps:
        return None
    gold: Json = {"calls": gold_calls([step.call for step in steps])}
    if draft.level == "hard":
        gold["faults"] = {
            "at": {str(draft.rng.randrange(len(steps))): draft.rng.choice(list(FAULTS))}
        }
    return request(draft, steps), [step.tool for step in steps], [], gold, ()


Maker = Callable[[Draft], "Made | None"]
PARTS: dict[str, dict[str, tuple[Maker, float]]] = {  # with each variant's share of its part
    "selection": {"select": (select, 1.0)},
    "planning": {"plan": (plan, 1.0)},
    "timing": {
        "call": (act, 0.28),
        "ask": (ask, 0.26),
        "explain": (explain, 0.14),
        "remember": (remember, 0.10),
        "reckon": (reckon, 0.01),
        "decline": (decline, 0.21),
    },
    "end_to_end": {"accomplish": (accomplish, 1.0)},
}
