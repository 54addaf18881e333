"""Measures rows per second and peak memory of import, check and split comparison.

Example: python benchmarks/data.py --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sharpen.data.check import CheckReport, check_rows
from sharpen.data.importing import import_file
from sharpen.data.overlap import compare_splits
from sharpen.types import Json

VERBS = ("book", "cancel", "find", "list", "move", "rate", "send", "track")
THINGS = ("flight", "hotel", "invoice", "meeting", "order", "parcel", "report", "ticket")


def tool(verb: str, thing: str) -> Json:
    """Return a tool with three parameters, in the OpenAI format."""
    fields = {
        "name": {"type": "string", "description": f"Name of the {thing}."},
        "count": {"type": "integer", "minimum": 1, "description": f"How many to {verb}."},
        "when": {"type": "string", "description": "Day, as YYYY-MM-DD."},
    }
    schema = {"type": "object", "properties": fields, "required": ["name"]}
    text = f"{verb.capitalize()} a {thing} of the user's account."
    return {
        "type": "function",
        "function": {"name": f"{verb}_{thing}", "description": text, "parameters": schema},
    }


TOOLS = [tool(verb, thing) for verb in VERBS for thing in THINGS]


def dialogs(count: int) -> Iterator[Json]:
    """Yield rows of eight messages, two calls and four tools, about 2.4 kB each."""
    rng = random.Random(0)
    for number in range(count):
        tools = rng.sample(TOOLS, 4)
        messages = [{"role": "user", "content": f"Please do the {number}th thing on my list."}]
        for step, spec in enumerate(tools[:2]):
            arguments = json.dumps({"name": f"item {number}", "count": rng.randint(1, 9)})
            function = {"name": spec["function"]["name"], "arguments": arguments}
            call = {"id": f"c{step}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{step}", "content": '{"status": "ok"}'},
            ]
        messages += [
            {"role": "assistant", "content": f"Both are done for item {number}."},
            {"role": "user", "content": "Thank you."},
            {"role": "assistant", "content": "You are welcome."},
        ]
        yield {"messages": messages, "tools": tools}


class Stopwatch:
    """Adds the throughput and the peak memory of one step after the other to `result`."""

    def __init__(self, rows: int):
        self.rows = rows
        self.result: dict[str, float] = {"rows": rows}
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._wall_start = time.perf_counter()
        self._cpu_start = time.process_time()

    def stop(self, step: str) -> None:
        """End a step and note its figures."""
        wall_seconds = time.perf_counter() - self._wall_start
        cpu_seconds = time.process_time() - self._cpu_start
        peak_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.result[f"{step}_rows_per_s"] = round(self.rows / wall_seconds)
        self.result[f"{step}_rows_per_cpu_s"] = round(self.rows / cpu_seconds)
        self.result[f"{step}_peak_mb"] = round(peak_kilobytes / 1024)


def main() -> None:
    """Write rows to a temporary folder, then time each step on them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    rows = parser.parse_args().rows
    watch = Stopwatch(rows)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.jsonl")
        out = Path(folder, "out.jsonl")
        with open(source, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in dialogs(rows))
        watch.result["bytes_per_row"] = source.stat().st_size // rows

        watch.start()
        import_report = import_file("openai", source, out)
        watch.stop("import")

        check_report = CheckReport(str(out))
        watch.start()
        for _ in check_rows(out, check_report):
            pass
        watch.stop("check")
        assert import_report.kept == check_report.rows == rows
        assert not check_report.bad

        watch.start()
        half = Path(folder, "half.jsonl")
        with open(out, "rb") as all_rows, open(half, "wb") as half_rows:
            half_rows.writelines(line for number, line in enumerate(all_rows) if number % 2)
        compare_splits([half, half])
        watch.stop("splits")
    print(json.dumps(watch.result))


if __name__ == "__main__":
    main()
