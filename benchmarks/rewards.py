"""How fast rewards are: `python benchmarks/rewards.py agent [--tasks N] [--group N]`, or
`verifiable [--items N] [--workers N]`.

`agent` scores gold trajectories of benchmark tasks and mutations of them. `plain` compares calls
alone; `executed` runs them in the tool world, in groups of samples of one task as in GRPO; `fresh`
forgets every episode before each pass, so that gold is executed too. Seconds are the processor's,
and the best of some passes counts: what disturbs them only makes them slower.

`verifiable` scores responses with plain numbers, with LaTeX that math-verify has to read, and with
programs that have three tests each. Items a second by the clock, on `workers` processes.
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
from sharpen.rewards.verifiable import VerifiableRewardCalculator
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


def verifiable(options: argparse.Namespace) -> None:
    numbers = [(f"... so she pays {n} dollars.\n#### {n}", str(n)) for n in range(options.items)]
    formulas = [
        (f"\\boxed{{\\frac{{\\sqrt{{{n}}}}}{{2}}}}", f"\\sqrt{{{n}}}/2")
        for n in range(options.items)
    ]
    tests = [f"assert add({n}, 2) == {n + 2}" for n in range(3)]
    programs = [(f"```python\ndef add(a, b):\n    return a + b + 0 * {n}\n```", tests)
                for n in range(options.items // 4)]  # fmt: skip
    figures: dict[str, float] = {}
    for name, kind, rows in (
        ("numbers", "math", numbers),
        ("latex", "math", formulas),
        ("code", "code", programs),
    ):
        with VerifiableRewardCalculator(kind, workers=options.workers) as reward:
            responses, truths = zip(*rows, strict=True)
            questions = [""] * len(rows)
            reward.calculate_rewards(questions[:8], responses[:8], truths[:8])  # everything is up
            passes = []
            for _ in range(PASSES):
                started = time.perf_counter()
                found = reward.calculate_rewards(questions, responses, truths)
                passes.append(time.perf_counter() - started)
            assert all(each["components"]["correctness"] == 1 for each in found)
            figures[name] = round(len(rows) / min(passes), 1)
            print(f"{name}: {figures[name]:,.0f} items a second")
    print(compact_json(figures | {"items": options.items, "workers": options.workers}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    verb = commands.add_parser("agent", help="the agent reward, with and without execution")
    verb.add_argument("--data", nargs="+", default=["agent_benchmark:train"], type=str)
    verb.add_argument("--tasks", type=int, default=500)
    verb.add_argument("--group", type=int, default=8)
    verb.set_defaults(run=agent)
    verb = commands.add_parser("verifiable", help="mathematics and code")
    verb.add_argument("--items", type=int, default=400)
    verb.add_argument("--workers", type=int, default=2)
    verb.set_defaults(run=verifiable)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
