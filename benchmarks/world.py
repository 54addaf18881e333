"""How many episodes of the tool world a core runs: `python benchmarks/world.py [--episodes N]`.

An episode is one or two categories with a seed of its own, four calls that succeed, and the
comparison of its end state with the gold one. `fresh` draws every row anew, `cached` meets seeds
that were met before, `environment` goes through `ToolWorld` and also executes the gold calls.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from sharpen.calls import compact_json
from sharpen.envs.toolworld import ToolWorld
from sharpen.types import Message, Task, ToolCall
from sharpen.world import state
from sharpen.world.episode import World

CALLS = 4


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
    gold = {"categories": categories, "seed": seed, "family": "train", "calls": calls}
    return Task(f"t{seed}", "", gold=gold, metadata={"changes": episode.changes()})


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
    """Throw away all rows, so that the same seeds are fresh again."""
    for value in vars(state).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def rate(run: Callable[[World, list[Task]], None], world: World, tasks: list[Task]) -> float:
    started = time.perf_counter()
    run(world, tasks)
    return len(tasks) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=2000)
    options = parser.parse_args()
    world = World()
    tasks = [make_task(world, seed) for seed in range(options.episodes)]
    run_engine(world, tasks)  # schemas compiled, as in any run longer than a second
    figures: dict[str, float] = {}
    for name, run in (("fresh", run_engine), ("environment", run_environment)):
        forget()
        figures[name] = rate(run, world, tasks)
    forget()
    few = tasks[:200]
    run_engine(world, few)
    figures["cached"] = rate(run_engine, world, few * 5)
    for name, value in figures.items():
        print(f"{name}: {value:,.0f} episodes a second")
    print(compact_json(figures | {"episodes": options.episodes, "calls": CALLS}))


if __name__ == "__main__":
    main()
