"""Episodes of the tool world per second on one core: `python benchmarks/world.py [--episodes N]`.

An episode is one or two categories with a seed of its own, four calls that succeed, and the
comparison of its end state with the gold one. `fresh` draws all rows anew, `cached` repeats seeds
whose rows are cached, `environment` goes through `ToolWorld` and also executes the gold calls.
Times are CPU times, so that other processes on the machine do not count.
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

CALLS = 4
PASSES = 5
CACHED_EPISODES = 200
Run = Callable[[World, list[Task]], None]


def make_task(world: World, seed: int) -> Task:
    """Make a task of four calls that succeed; its metadata holds the end state."""
    rng = random.Random(seed)
    count = rng.randint(1, min(2, len(world.categories)))
    categories = rng.sample(world.categories, count)
    episode = world.episode(categories, seed)
    tools = list(episode.tools())
    calls = []
    while len(calls) < CALLS:
        call = episode.sample(rng.choice(tools), rng)
        if call is not None:
            episode.call(call)
            calls.append({"name": call.name, "arguments": call.arguments})
    task_gold = {"categories": categories, "seed": seed, "family": "train", "calls": calls}
    return Task(f"t{seed}", "", gold=task_gold, metadata={"changes": episode.changes()})


def run_engine(world: World, tasks: list[Task]) -> None:
    """Execute the calls of every task without an environment."""
    for task in tasks:
        episode = world.episode(task.gold["categories"], task.gold["seed"])
        for call in task.gold["calls"]:
            episode.call(ToolCall(call["name"], call["arguments"]))
        assert episode.changes() == task.metadata["changes"]


def run_environment(world: World, tasks: list[Task]) -> None:
    """Execute the calls of every task as messages to the environment."""
    environment = ToolWorld(world)
    for task in tasks:
        environment.reset(task)
        for gold_call in task.gold["calls"]:
            call = ToolCall(gold_call["name"], gold_call["arguments"])
            environment.step(Message("assistant", tool_calls=(call,)))
        assert environment.end_state_reached()


def clear_caches() -> None:
    """Forget all rows and gold states, so that the same seeds are fresh again."""
    for value in [*vars(state).values(), *vars(gold).values()]:
        if hasattr(value, "cache_clear") and value is not gold.shipped_world:
            value.cache_clear()


def measure_rate(run: Run, world: World, tasks: list[Task], fresh: bool) -> float:
    """Returns episodes per second in the fastest of several passes: the least disturbed one."""
    passes = []
    for _ in range(PASSES):
        if fresh:
            clear_caches()
        started = time.process_time()
        run(world, tasks)
        passes.append(time.process_time() - started)
    return len(tasks) / min(passes)


def main() -> None:
    """Measure the three ways and print their rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1000)
    options = parser.parse_args()
    world = World()
    tasks = [make_task(world, seed) for seed in range(options.episodes)]
    run_engine(world, tasks)  # compiles the schemas, as the first second of any run does
    figures = {
        "fresh": measure_rate(run_engine, world, tasks, fresh=True),
        "cached": measure_rate(run_engine, world, tasks[:CACHED_EPISODES], fresh=False),
        "environment": measure_rate(run_environment, world, tasks, fresh=True),
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} episodes per second")
    print(compact_json(figures | {"episodes": options.episodes, "calls": CALLS}))


if __name__ == "__main__":
    main()
