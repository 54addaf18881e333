"""Rows per second and peak memory of import, check and split comparison.

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
from sharpen.data.overlap import compare

VERBS = ("book", "cancel", "find", "list", "move", "rate", "send", "track")
THINGS = ("flight", "hotel", "invoice", "meeting", "order", "parcel", "report", "ticket")


def tool(verb: str, thing: str) -> dict:
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


def dialogs(count: int) -> Iterator[dict]:
    """Seven messages, two calls, four tools: about 3 kB a row."""
    chance = random.Random(0)
    for number in range(count):
        listed = chance.sample(TOOLS, 4)
        messages = [{"role": "user", "content": f"Please do the {number}th thing on my list."}]
        for step, spec in enumerate(listed[:2]):
            given = json.dumps({"name": f"item {number}", "count": chance.randint(1, 9)})
            call = {"id": f"c{step}", "type": "function"}
            call["function"] = {"name": spec["function"]["name"], "arguments": given}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{step}", "content": '{"status": "ok"}'},
            ]
        messages += [
            {"role": "assistant", "content": f"Both are done for item {number}."},
            {"role": "user", "content": "Thank you."},
            {"role": "assistant", "content": "You are welcome."},
        ]
        yield {"messages": messages, "tools": listed}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    rows = parser.parse_args().rows
    result: dict[str, float] = {"rows": rows}

    def note(name: str, wall: float, cpu: float) -> None:
        result[f"{name}_rows_per_s"] = round(rows / (time.perf_counter() - wall))
        result[f"{name}_rows_per_cpu_s"] = round(rows / (time.process_time() - cpu))
        result[f"{name}_peak_mb"] = round(peak_mb())

    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "source.jsonl"), Path(folder, "out.jsonl")
        with open(source, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in dialogs(rows))
        result["bytes_per_row"] = source.stat().st_size // rows
        now = time.perf_counter(), time.process_time()
        report = import_file("openai", source, out)
        note("import", *now)
        checked, now = CheckReport(str(out)), (time.perf_counter(), time.process_time())
        for _ in check_rows(out, checked):
            pass
        note("check", *now)
        assert report.kept == checked.rows == rows and not checked.bad
        now = time.perf_counter(), time.process_time()
        half = Path(folder, "half.jsonl")
        with open(out, "rb") as whole, open(half, "wb") as second:
            second.writelines(line for number, line in enumerate(whole) if number % 2)
        compare([half, half])
        note("splits", *now)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
