"""How many episodes of the tool world a core runs: `python benchmarks/world.py [--episodes N]`.

An episode is one or two categories with a seed of its own, four calls that succeed, and the
comparison of its end state with the gold one. `fresh` draws every row anew, `cached` meets seeds
that were met before, `environment` goes through `ToolWorld` and also executes the gold calls.
Seconds are the processor's, so that a busy machine does not blur the figures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from sharpen.calls import compact_json
from sharpen.envs.toolworld import ToolWorld
from sharpen.types import Message, Task, ToolCall
from sharpen.world import gold, state
from sharpen.world.episode import World

CALLS, PASSES = 4, 5
Run = Callable[[World, list[Task]], None]


def make_task(world: World, seed: int) -> Task:
    rng = random.Random(seed)
    categories = rng.sample(world.categories, rng.randint(1, min(2, len(world.categories))))
    episode = world.episode(categories, seed)
    tools, calls = list(episode.tools()), []
    while len(calls) < CALLS:
        call = episode.sample(rng.choice(tools), rng)
        if call is not None:
            episode.call(call)
            calls.append({"name": call.name, "arguments": call.arguments})
    wanted = {"categories": categories, "seed": seed, "family": "train", "calls": calls}
    return Task(f"t{seed}", "", gold=wanted, metadata={"changes": episode.changes()})


def run_engine(world: World, tasks: list[Task]) -> None:
    for task in tasks:
        episode = world.episode(task.gold["categories"], task.gold["seed"])
        for call in task.gold["calls"]:
            episode.call(ToolCall(call["name"], call["arguments"]))
        assert episode.changes() == task.metadata["changes"]


def run_environment(world: World, tasks: list[Task]) -> None:
    environment = ToolWorld(world)
    for task in tasks:
        environment.reset(task)
        for call in task.gold["calls"]:
            call = ToolCall(call["name"], call["arguments"])
            environment.step(Message("assistant", tool_calls=(call,)))
        assert environment.end_state_reached()


def forget() -> None:
    """Throw away all rows and gold states, so that the same seeds are fresh again."""
    for value in [*vars(state).values(), *vars(gold).values()]:
        if hasattr(value, "cache_clear") and value is not gold.shipped_world:
            value.cache_clear()


def rate(run: Run, world: World, tasks: list[Task], fresh: bool) -> float:
    """Episodes a second, the best of some passes: what disturbs them only makes them slower."""
    passes = []
    for _ in range(PASSES):
        if fresh:
            forget()
        started = time.process_time()
        run(world, tasks)
        passes.append(time.process_time() - started)
    return len(tasks) / min(passes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1000)
    options = parser.parse_args()
    world = World()
    tasks = [make_task(world, seed) for seed in range(options.episodes)]
    run_engine(world, tasks)  # schemas compiled, as in any run longer than a second
    figures = {
        "fresh": rate(run_engine, world, tasks, fresh=True),
        "cached": rate(run_engine, world, tasks[:200], fresh=False),
        "environment": rate(run_environment, world, tasks, fresh=True),
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} episodes a second")
    print(compact_json(figures | {"episodes": options.episodes, "calls": CALLS}))


if __name__ == "__main__":
    main()
