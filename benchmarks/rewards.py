"""How fast rewards are: `python benchmarks/rewards.py agent [--tasks N] [--group N]`.

`agent` scores gold trajectories of benchmark tasks and mutations of them. `plain` compares calls
alone; `executed` runs them in the tool world, in groups of samples of one task as in GRPO; `fresh`
forgets every episode before each pass, so that gold is executed too. Seconds are the processor's,
and the best of some passes counts: what disturbs them only makes them slower.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace

from sharpen.calls import compact_json
from sharpen.data.sources import read_tasks
from sharpen.rewards.agent import AgentRewardModel
from sharpen.types import Message, Task, ToolCall, Trajectory, Turn
from sharpen.world import gold, state
from sharpen.world.gold import gold_trajectory

PASSES = 5
Sample = tuple[Task, Trajectory]


def samples_of(task: Task, count: int, rng: random.Random) -> list[Sample]:
    """Gold, and gold with a call dropped, repeated, invented or given another argument."""
    right = gold_trajectory(task)
    assert right is not None, task.id
    found = [(task, right)]
    while len(found) < count:
        turns = list(right.turns)
        at = rng.randrange(len(turns))
        calls = turns[at].message.tool_calls
        kind = rng.choice(("drop", "repeat", "invent", "change"))
        if kind == "drop":
            del turns[at]
        elif kind == "repeat":
            turns.insert(at, turns[at])
        elif kind == "invent":
            turns.insert(at, Turn(Message("assistant", tool_calls=(ToolCall("no_such_tool"),))))
        elif calls:
            changed = ToolCall(calls[0].name, dict.fromkeys(calls[0].arguments, "else"))
            turns[at] = Turn(Message("assistant", tool_calls=(changed,)))
        found.append((task, replace(right, turns=tuple(turns))))
    return found


def forget() -> None:
    for value in [*vars(state).values(), *vars(gold).values()]:
        if hasattr(value, "cache_clear") and value is not gold.shipped_world:
            value.cache_clear()


def rate(samples: list[Sample], prepare: Callable[[], None] = lambda: None) -> float:
    """Trajectories a second on one core."""
    model, passes = AgentRewardModel(), []
    for _ in range(PASSES):
        prepare()
        started = time.process_time()
        for task, trajectory in samples:
            model.score(task, trajectory)
        passes.append(time.process_time() - started)
    return len(samples) / min(passes)


def agent(options: argparse.Namespace) -> None:
    rng = random.Random(0)
    tasks = [task for name in options.data for task in read_tasks(name)]
    tasks = rng.sample(tasks, min(options.tasks, len(tasks)))
    groups = [samples_of(task, options.group, rng) for task in tasks]
    samples = [sample for group in groups for sample in group]
    without = [(replace(t, gold={k: v for k, v in t.gold.items() if k != "categories"}), run)
               for t, run in samples]  # fmt: skip
    acting = [sample for sample in samples if sample[0].gold.get("calls")]
    rate(acting)  # schemas compiled, as in any run longer than a second
    figures = {
        "plain": rate(without),
        "executed": rate(acting, forget),
        "fresh": rate([group[-1] for group in groups if group[0][0].gold.get("calls")], forget),
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} trajectories a second")
    print(compact_json(figures | {"tasks": len(tasks), "group": options.group}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    verb = commands.add_parser("agent", help="the agent reward, with and without execution")
    verb.add_argument("--data", nargs="+", default=["agent_benchmark:train"], type=str)
    verb.add_argument("--tasks", type=int, default=500)
    verb.add_argument("--group", type=int, default=8)
    verb.set_defaults(run=agent)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
