"""What the sandbox adds to a snippet: `python benchmarks/sandbox.py [--calls N] [--workers N]`.

`back_to_back` runs empty snippets one after another, so the pool has to keep up. `paced` waits
100 ms between two snippets. `parallel` is the throughput of all workers together. Results are
milliseconds and calls per second of the best round: other load on the machine only makes them
slower.
"""

from __future__ import annotations

import argparse
import json
import time

from sharpen.sandbox import Sandbox

ROUNDS = 5


def measure_latency_ms(sandbox: Sandbox, calls: int, pause_s: float) -> dict[str, float]:
    """Run empty snippets one after another; returns percentiles of their time."""
    times_ms = []
    for _ in range(calls):
        time.sleep(pause_s)
        started = time.perf_counter()
        assert sandbox.run("pass").ok
        times_ms.append(1000 * (time.perf_counter() - started))
    times_ms.sort()
    return {
        "p50": round(times_ms[calls // 2], 1),
        "p95": round(times_ms[int(calls * 0.95)], 1),
    }


def measure_throughput(sandbox: Sandbox, calls: int) -> float:
    """Run empty snippets in all workers; returns calls per second."""
    started = time.perf_counter()
    sandbox.run_many(["pass"] * calls)
    return calls / (time.perf_counter() - started)


def main() -> None:
    """Measure all three figures and print them as one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    figures: dict[str, object] = {"calls": options.calls, "workers": options.workers}
    with Sandbox(options.workers) as sandbox:
        for name, pause_s in (("back_to_back", 0.0), ("paced", 0.1)):
            rounds = [measure_latency_ms(sandbox, options.calls, pause_s) for _ in range(ROUNDS)]
            figures[name] = min(rounds, key=lambda percentiles: percentiles["p95"])
            print(f"{name}: {figures[name]} ms")
        rates = [measure_throughput(sandbox, options.calls) for _ in range(ROUNDS)]
        figures["parallel"] = round(max(rates), 1)
        print(f"parallel: {figures['parallel']} calls per second")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
