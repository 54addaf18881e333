"""What the sandbox adds to a snippet: `python benchmarks/sandbox.py [--calls N] [--workers N]`.

`back_to_back` runs empty snippets one after another, so that the pool has to keep up; `paced`
leaves it 100 ms between two; `parallel` is what all workers together get through. Milliseconds and
calls a second, of the best of some rounds: neighbours only make them slower.
"""

from __future__ import annotations

import argparse
import json
import time

from sharpen.sandbox import Sandbox

ROUNDS = 5


def milliseconds(sandbox: Sandbox, calls: int, pause_s: float) -> dict[str, float]:
    times = []
    for _ in range(calls):
        time.sleep(pause_s)
        started = time.perf_counter()
        assert sandbox.run("pass").ok
        times.append(1000 * (time.perf_counter() - started))
    times.sort()
    return {"p50": round(times[calls // 2], 1), "p95": round(times[int(calls * 0.95)], 1)}


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return min(rounds, key=lambda found: found["p95"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    figures: dict[str, object] = {"calls": options.calls, "workers": options.workers}
    with Sandbox(options.workers) as sandbox:
        for name, pause in (("back_to_back", 0.0), ("paced", 0.1)):
            rounds = [milliseconds(sandbox, options.calls, pause) for _ in range(ROUNDS)]
            figures[name] = best(rounds)
            print(f"{name}: {figures[name]} ms")
        rates = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            sandbox.run_many(["pass"] * options.calls)
            rates.append(options.calls / (time.perf_counter() - started))
        figures["parallel"] = round(max(rates), 1)
        print(f"parallel: {figures['parallel']} calls a second")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
