"""Seconds that the coreset strategies without a model take, from dialogs to indices.

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
    """English and Chinese requests of two calls each, about 600 characters, with given losses."""
    chance = random.Random(seed)
    filler = [f"word{number}" for number in range(3000)]
    rows = []
    for number in range(count):
        said = []
        for _ in range(2):
            verb, thing, place = (chance.choice(words) for words in (VERBS, THINGS, PLACES))
            words = " ".join(chance.choices(filler, k=12))
            request = f"Please {verb} the {thing} in {place}: {words}."
            if number % 3 == 0:
                request = (
                    f"请在{place}帮我处理{thing}，编号{chance.randrange(10**6)}，谢谢。{words}"
                )
            call = ToolCall(f"{verb}_{thing}", {"place": place, "count": chance.randint(1, 9)})
            said += [Message("user", request), Message("assistant", "", (call,))]
            said.append(Message("tool", '{"status": "ok"}'))
        said.append(Message("assistant", "Both are done. " + " ".join(chance.choices(filler, k=8))))
        loss = {"loss": chance.lognormvariate(0, 0.5)}
        rows.append(Dialog(tuple(said), id=f"r{number}", metadata=loss))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--target", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    rows = dialogs(options.rows)
    found = {}
    for strategy in options.strategies:
        seconds, cpu = [], []
        for _ in range(options.repeats):
            started, used = time.perf_counter(), time.process_time()
            chosen = CoresetSelector(strategy, options.target).indices(rows)
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
            assert len(set(chosen)) == options.target
        found[strategy] = {"best_s": round(min(seconds), 2), "cpu_s": round(min(cpu), 2)}
        shown = f"median {np.median(seconds):6.2f} s, processor {min(cpu):6.2f} s"
        print(f"{strategy:18s} best {min(seconds):6.2f} s, {shown}", flush=True)
    print(json.dumps({"rows": options.rows, "target": options.target, "strategies": found}))


if __name__ == "__main__":
    main()
