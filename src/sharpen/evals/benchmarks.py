"""Benchmarks by name: the format of the file, what its rows need to be scored, a hint for the
model and limits. How the tasks are played, scored and measured is said by their kinds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpen.data.generate.long_context_tasks import kv_tasks, needle_tasks
from sharpen.data.importers.benchmark_tasks import (
    as_imported,
    bfcl_task,
    decision_task,
    dialog_calls,
    graph_task,
    known_calls,
    service_task,
    sqlite_task,
    tested_code,
)
from sharpen.data.importing import SHAPE_ERRORS, converted, fault, load, read_records, reason_kind
from sharpen.data.sources import read_tasks
from sharpen.envs.simulated_service import make_service
from sharpen.evals.items import Suite
from sharpen.kinds import KINDS, KindEnvironment, kind_of, metric_names
from sharpen.records import read_jsonl
from sharpen.rewards.metrics import AGENT_METRICS
from sharpen.rows import dialog_from_row, task_from_row
from sharpen.tools import load_object
from sharpen.types import Json, MakeEnvironment, Policy, RowError, SharpenError, Task

AGENT = "agent_benchmark"
GENERAL = "general"
_GENERAL_TOKENS = 128
_REFER = "Make all calls at once. Where a call needs the result of an earlier one, write "
_GRAPH_HINT = "Answer with the plan as a graph:\nNode:\n1: a tool's name\nEdge: (START,1) (1,END)"

# what was imported, the raw record, its file → tasks, or why there is none
Prepare = Callable[[Any, Json, Path], Iterable[Task | RowError]]
_MakeSuiteEnvironment = Callable[[Sequence[Task], Path, Policy | None], MakeEnvironment]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is known by name."""

    format: str  # of its file; "" if it is always made
    prepare: Prepare = as_imported
    hint: str = ""  # added to every instruction
    max_tokens: int = 0  # of an answer; 0: the kind's
    make_environment: _MakeSuiteEnvironment | None = None  # where the kind's own needs files
    generate: Callable[[int], Iterator[Task]] | None = None
    min_size: int = 2  # of a made one


BENCHMARKS: dict[str, Benchmark] = {
    "bfcl": Benchmark("bfcl", bfcl_task),
    "when2call": Benchmark("when2call", decision_task),
    "seal_tools": Benchmark("sealtools", hint=f"{_REFER}API_call_0."),
    "metatool": Benchmark("metatool"),
    "toolalpaca": Benchmark("toolalpaca"),
    "api_bank": Benchmark("apibank", dialog_calls),
    "nestful": Benchmark("nestful", known_calls, f"{_REFER}$var1.field$."),
    "worfbench": Benchmark("worfbench", graph_task),
    "ultratool": Benchmark("taskbench", graph_task, _GRAPH_HINT),
    "tau": Benchmark("tau_tasks", service_task, make_environment=make_service),
    "tau2": Benchmark("tau2_tasks", service_task, make_environment=make_service),
    "intercode_sql": Benchmark(
        "intercode_sql", sqlite_task, "Answer with a SQL query.", max_tokens=256
    ),
    "gsm8k": Benchmark("gsm8k"),
    "svamp": Benchmark("svamp"),
    "aqua": Benchmark("aqua", hint="Answer with the letter of the right option.", max_tokens=256),
    "mbpp": Benchmark("mbpp", tested_code, "Answer with Python code."),
    "humaneval": Benchmark("humaneval", tested_code, "Complete it."),
    "longeval": Benchmark("longeval", max_tokens=64),
    "kv_retrieval": Benchmark("kv_retrieval", generate=kv_tasks),
    "needle": Benchmark("", max_tokens=64, generate=needle_tasks, min_size=202),
}


def load_benchmark(spec: str, user: Policy | None = None) -> Suite:
    """Returns the suite of `agent_benchmark[/PART]:SPLIT`, `tasks:PATH` (rows of one's own),
    `general[:CATEGORY]`, `NAME:PATH`, `NAME:SIZE` of a made one, or `file.py:name`: a suite or a
    function that returns tasks. `user` plays the user where a benchmark has one."""
    if ".py:" in spec:
        return _own_suite(spec)
    name, _, rest = spec.partition(":")
    if name.split("/")[0] == AGENT:
        return tasks_suite(spec, list(read_tasks(spec)), AGENT_METRICS)
    if name == "tasks" and rest:
        return tasks_suite(spec, list(read_tasks(rest)))
    if name == GENERAL:
        return _general_suite(spec, rest)
    if name not in BENCHMARKS:
        files = ", ".join(f"{each}:PATH" for each in ("tasks", *BENCHMARKS))
        raise SharpenError(f"benchmark {spec!r}: expected {AGENT}:SPLIT, {GENERAL}, {files}")
    benchmark = BENCHMARKS[name]
    tasks, left_out = _benchmark_tasks(name, rest)
    if not tasks:
        reason = f": {left_out.most_common(1)[0][0]}" if left_out else ""
        raise SharpenError(f"benchmark {spec!r}: nothing in it can be scored{reason}")
    hint = f"\n\n{benchmark.hint}" if benchmark.hint else ""
    tasks = [replace(task, instruction=task.instruction + hint) for task in unique(tasks)]
    make_environment: MakeEnvironment = KindEnvironment
    if benchmark.make_environment:
        make_environment = benchmark.make_environment(tasks, Path(rest), user)
    return Suite(
        spec,
        tasks,
        make_environment=make_environment,
        max_tokens=benchmark.max_tokens or _kind_tokens(tasks),
        metrics=headline(tasks),
        left_out=dict(left_out),
    )


def _own_suite(spec: str) -> Suite:
    """A user's own benchmark: a suite, or a function that returns tasks."""
    found: Any = load_object(spec)
    if isinstance(found, Suite):
        return found
    make_tasks: Any = found if callable(found) else list
    tasks = list(make_tasks())
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise SharpenError(
            f"benchmark {spec!r}: expected a Suite, or a function that returns Tasks"
        )
    return tasks_suite(spec, tasks)


def tasks_suite(name: str, tasks: Sequence[Task], metrics: tuple[str, ...] = ()) -> Suite:
    """Returns the suite of any tasks, played and scored by their kinds."""
    tasks = unique(tasks)
    return Suite(name, tasks, max_tokens=_kind_tokens(tasks), metrics=metrics or headline(tasks))


def headline(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Returns the metrics to show first: the kinds' own, without classes and rankings."""
    names = metric_names(tasks)
    return tuple(name for name in names if "@" not in name and name.count("_") < 3) or names


def _kind_tokens(tasks: Sequence[Task]) -> int:
    """The longest answer that any of the kinds allows."""
    return max((kind_of(task).max_tokens for task in tasks), default=KINDS["agent"].max_tokens)


def _general_suite(spec: str, category: str) -> Suite:
    """The fixed items that need no tool, all or of one category."""
    rows = read_jsonl(Path(__file__).with_name("general.jsonl"))
    tasks = [task_from_row(row.value, row.where) for row in rows]
    if category:
        tasks = [t for t in tasks if category in (t.kind, t.metadata["category"])]
    return Suite(spec, tasks, metrics=("accuracy",), max_tokens=_GENERAL_TOKENS)


def _benchmark_tasks(name: str, rest: str) -> tuple[list[Task], Counter[str]]:
    """The tasks of a benchmark's file, or made ones; and why other records are none."""
    benchmark = BENCHMARKS[name]
    if benchmark.generate and (rest.isdigit() or not benchmark.format):
        if not rest.isdigit() or int(rest) < benchmark.min_size:
            raise SharpenError(
                f"benchmark '{name}:{rest}': expected a size from {benchmark.min_size} up, "
                f"such as {name}:4000"
            )
        return list(benchmark.generate(int(rest))), Counter()
    if not rest:
        raise SharpenError(f"benchmark {name!r}: needs its file, as in {name}:PATH")
    return _read_benchmark(benchmark, Path(rest))


def _read_benchmark(benchmark: Benchmark, path: Path) -> tuple[list[Task], Counter[str]]:
    """The tasks of a file or folder, and why other records are none."""
    importer = load(benchmark.format)
    try:
        side = (importer.side(path),) if importer.side else ()
    except SHAPE_ERRORS as error:
        raise SharpenError(f"{path}: not {benchmark.format}'s: {fault(error)}") from None
    tasks: list[Task] = []
    left_out: Counter[str] = Counter()
    for record in read_records(path, importer.names, importer.split):
        try:
            row = json.loads(converted(importer, record, side))
            noun = task_from_row(row) if "instruction" in row else dialog_from_row(row)
            for task in benchmark.prepare(noun, record.value, path):
                if isinstance(task, RowError):
                    left_out[reason_kind(task.reason)] += 1
                else:
                    kind_of(task)  # a kind that nothing can play is left out
                    tasks.append(task)
        except RowError as error:
            left_out[reason_kind(error.reason)] += 1
    return tasks, left_out


def unique(tasks: Iterable[Task]) -> list[Task]:
    """Returns the tasks under ids of their own: an item is known by its id."""
    counts: Counter[str] = Counter()
    named = []
    for task in tasks:
        counts[task.id] += 1
        if counts[task.id] > 1:
            task = replace(task, id=f"{task.id}#{counts[task.id]}")
        named.append(task)
    return named
