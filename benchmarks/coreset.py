"""Measures how long the coreset strategies without a model take, from dialogs to indices.

Example: OMP_NUM_THREADS=2 python benchmarks/coreset.py --rows 100000 --target 10000
"""

from __future__ import annotations

import argparse
import json
import random
import time

import numpy as np

from sharpen.data.coreset import CoresetSelector
from sharpen.types import Dialog, Message, ToolCall

VERBS = ("book", "cancel", "find", "list", "move", "rate", "send", "track")
THINGS = ("flight", "hotel", "invoice", "meeting", "order", "parcel", "report", "ticket")
PLACES = ("Paris", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Turin", "Perth")
STRATEGIES = (
    "random", "curriculum", "curriculum_length", "diversity", "hybrid", "facility_location"
)  # fmt: skip


def dialogs(count: int, seed: int = 0) -> list[Dialog]:
    """Return requests of two calls each, about 600 characters, with losses. A third is Chinese."""
    rng = random.Random(seed)
    filler = [f"word{number}" for number in range(3000)]
    rows = []
    for number in range(count):
        messages = []
        for _ in range(2):
            messages += _request_and_call(number, rng, filler)
        closing_words = " ".join(rng.choices(filler, k=8))
        messages.append(Message("assistant", "Both are done. " + closing_words))
        metadata = {"loss": rng.lognormvariate(0, 0.5)}
        rows.append(Dialog(tuple(messages), id=f"r{number}", metadata=metadata))
    return rows


def _request_and_call(number: int, rng: random.Random, filler: list[str]) -> list[Message]:
    verb = rng.choice(VERBS)
    thing = rng.choice(THINGS)
    place = rng.choice(PLACES)
    words = " ".join(rng.choices(filler, k=12))
    request = f"Please {verb} the {thing} in {place}: {words}."
    if number % 3 == 0:
        request = f"请在{place}帮我处理{thing}，编号{rng.randrange(10**6)}，谢谢。{words}"
    call = ToolCall(f"{verb}_{thing}", {"place": place, "count": rng.randint(1, 9)})
    return [
        Message("user", request),
        Message("assistant", "", (call,)),
        Message("tool", '{"status": "ok"}'),
    ]


def main() -> None:
    """Time every strategy and print the best of several runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--target", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    rows = dialogs(options.rows)
    results = {}
    for strategy in options.strategies:
        wall_seconds = []
        cpu_seconds = []
        for _ in range(options.repeats):
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            indices = CoresetSelector(strategy, options.target).indices(rows)
            wall_seconds.append(time.perf_counter() - wall_start)
            cpu_seconds.append(time.process_time() - cpu_start)
            assert len(set(indices)) == options.target
        best_wall = min(wall_seconds)
        best_cpu = min(cpu_seconds)
        results[strategy] = {"best_s": round(best_wall, 2), "cpu_s": round(best_cpu, 2)}
        others = f"median {np.median(wall_seconds):6.2f} s, processor {best_cpu:6.2f} s"
        print(f"{strategy:18s} best {best_wall:6.2f} s, {others}", flush=True)
    print(json.dumps({"rows": options.rows, "target": options.target, "strategies": results}))


if __name__ == "__main__":
    main()
