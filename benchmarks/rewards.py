"""Measure how fast rewards are.

    python benchmarks/rewards.py agent [--tasks N] [--group N]
    python benchmarks/rewards.py verifiable [--items N] [--workers N]

`agent` scores gold trajectories of benchmark tasks and mutations of them. `plain` compares calls
alone; `executed` runs them in the tool world, in groups of samples of one task as in GRPO; `fresh`
forgets every episode before each pass, so that gold is executed too. Times are processor seconds of
the best pass: disturbances only make a pass slower.

`verifiable` scores responses with plain numbers, with LaTeX that math-verify has to read, and with
programs that have three tests each. It reports items per second of wall-clock time.
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
Example = tuple[str, str | list[str]]  # a response and its ground truth


# The agent reward --------------------------------------------------------------------------------


def make_samples(task: Task, count: int, rng: random.Random) -> list[Sample]:
    """Gold, and gold with a call dropped, repeated, invented or given another argument."""
    gold_run = gold_trajectory(task)
    assert gold_run is not None, task.id
    samples = [(task, gold_run)]
    while len(samples) < count:
        turns = list(gold_run.turns)
        place = rng.randrange(len(turns))
        calls = turns[place].message.tool_calls
        kind = rng.choice(("drop", "repeat", "invent", "change"))
        if kind == "drop":
            del turns[place]
        elif kind == "repeat":
            turns.insert(place, turns[place])
        elif kind == "invent":
            turns.insert(place, turn_with(ToolCall("no_such_tool")))
        elif calls:
            wrong_arguments = dict.fromkeys(calls[0].arguments, "else")
            turns[place] = turn_with(ToolCall(calls[0].name, wrong_arguments))
        samples.append((task, replace(gold_run, turns=tuple(turns))))
    return samples


def turn_with(call: ToolCall) -> Turn:
    return Turn(Message("assistant", tool_calls=(call,)))


def forget_episodes() -> None:
    """Empty the caches of the tool world, but for the world itself."""
    for value in [*vars(state).values(), *vars(gold).values()]:
        if hasattr(value, "cache_clear") and value is not gold.shipped_world:
            value.cache_clear()


def measure_agent_rate(samples: list[Sample], prepare: Callable[[], None] = lambda: None) -> float:
    """Trajectories per second on one core; `prepare` runs before each pass, outside the clock."""
    model = AgentRewardModel()
    seconds = []
    for _ in range(PASSES):
        prepare()
        started = time.process_time()
        for task, trajectory in samples:
            model.score(task, trajectory)
        seconds.append(time.process_time() - started)
    return len(samples) / min(seconds)


def without_world(task: Task) -> Task:
    """The task without its episode, so that calls are only compared."""
    plain_gold = {key: value for key, value in task.gold.items() if key != "categories"}
    return replace(task, gold=plain_gold)


def measure_agent(options: argparse.Namespace) -> None:
    rng = random.Random(0)
    tasks = [task for name in options.data for task in read_tasks(name)]
    tasks = rng.sample(tasks, min(options.tasks, len(tasks)))
    groups = [make_samples(task, options.group, rng) for task in tasks]
    samples = [sample for group in groups for sample in group]
    plain_samples = [(without_world(task), trajectory) for task, trajectory in samples]
    acting_samples = [sample for sample in samples if sample[0].gold.get("calls")]
    fresh_samples = [group[-1] for group in groups if group[0][0].gold.get("calls")]
    measure_agent_rate(acting_samples)  # compiles schemas, as in any run longer than a second
    figures = {
        "plain": measure_agent_rate(plain_samples),
        "executed": measure_agent_rate(acting_samples, forget_episodes),
        "fresh": measure_agent_rate(fresh_samples, forget_episodes),
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} trajectories per second")
    print(compact_json(figures | {"tasks": len(tasks), "group": options.group}))


# Verifiable rewards ------------------------------------------------------------------------------


def number_examples(count: int) -> list[Example]:
    return [(f"... so she pays {n} dollars.\n#### {n}", str(n)) for n in range(count)]


def latex_examples(count: int) -> list[Example]:
    examples: list[Example] = []
    for n in range(count):
        response = f"\\boxed{{\\frac{{\\sqrt{{{n}}}}}{{2}}}}"
        examples.append((response, f"\\sqrt{{{n}}}/2"))
    return examples


def code_examples(count: int) -> list[Example]:
    tests = [f"assert add({n}, 2) == {n + 2}" for n in range(3)]
    examples: list[Example] = []
    for n in range(count):
        program = f"def add(a, b):\n    return a + b + 0 * {n}\n"
        examples.append((f"```python\n{program}```", tests))
    return examples


def measure_verifiable_rate(kind: str, examples: list[Example], workers: int) -> float:
    """Items per second, all of them right."""
    questions = [""] * len(examples)
    responses = [response for response, _ in examples]
    truths = [truth for _, truth in examples]
    seconds = []
    with VerifiableRewardCalculator(kind, workers=workers) as reward:
        reward.calculate_rewards(questions[:8], responses[:8], truths[:8])  # starts the processes
        for _ in range(PASSES):
            started = time.perf_counter()
            scores = reward.calculate_rewards(questions, responses, truths)
            seconds.append(time.perf_counter() - started)
            assert all(score["components"]["correctness"] == 1 for score in scores)
    return round(len(examples) / min(seconds), 1)


def measure_verifiable(options: argparse.Namespace) -> None:
    workers = options.workers
    figures = {
        "numbers": measure_verifiable_rate("math", number_examples(options.items), workers),
        "latex": measure_verifiable_rate("math", latex_examples(options.items), workers),
        "code": measure_verifiable_rate("code", code_examples(options.items // 4), workers),
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} items per second")
    print(compact_json(figures | {"items": options.items, "workers": options.workers}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    verb = commands.add_parser("agent", help="the agent reward, with and without execution")
    verb.add_argument("--data", nargs="+", default=["agent_benchmark:train"], type=str)
    verb.add_argument("--tasks", type=int, default=500)
    verb.add_argument("--group", type=int, default=8, help="samples per task")
    verb.set_defaults(run=measure_agent)
    verb = commands.add_parser("verifiable", help="mathematics and code")
    verb.add_argument("--items", type=int, default=400)
    verb.add_argument("--workers", type=int, default=2)
    verb.set_defaults(run=measure_verifiable)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
