"""Benchmarks by name: which importer reads the file, what a task of it is, what scores it.

`agent_benchmark:test` (or `agent_benchmark/timing:dev`) is built here; `bfcl:PATH`, `gsm8k:PATH`
and the others read files as they are published; `kv_retrieval:75` and `needle:8000` are made up of
the number. A new benchmark is one entry of `BENCHMARKS`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpen import types
from sharpen.data.generate.haystack import needle_in_haystack
from sharpen.data.importers.common import FORMATS
from sharpen.data.importing import SHAPE_ERRORS, converted, fault, load, reason_kind
from sharpen.data.reading import read_records
from sharpen.data.sources import read_tasks
from sharpen.envs.toolworld import ToolWorld
from sharpen.evals.baselines import gold_messages
from sharpen.evals.databases import sqlite_task
from sharpen.evals.items import Suite
from sharpen.evals.metrics import DECISIONS, FIVE, SAME, Item, checked_tools
from sharpen.evals.service import SimulatedService, service_task
from sharpen.records import read_jsonl
from sharpen.rewards.agent import AgentRewardModel
from sharpen.rewards.calls import CallReward
from sharpen.rewards.graphs import ActionsReward, PlanGraphReward
from sharpen.rewards.math import folded
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.rollout import MakeEnvironment, OneTurn
from sharpen.rows import dialog_from_row, task_from_row
from sharpen.types import Dialog, Json, Message, RowError, Score, SharpenError, Task, Trajectory
from sharpen.world.state import seeded

AGENT, GENERAL = "agent_benchmark", "general"
ACTS = ("planning", "end_to_end")  # parts whose tasks are done in the tool world, turn by turn
SOUGHT = "What is the pass phrase of today?"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEAR = 400  # characters that may stand around a retrieved value


class InItsWorld:
    """One answer for tasks that ask for one, the tool world for those that are to be done."""

    def __init__(self) -> None:
        self.inner: types.Environment = OneTurn()

    def reset(self, task: Task) -> Dialog:
        self.inner = ToolWorld() if task.kind in ACTS and "categories" in task.gold else OneTurn()
        return self.inner.reset(task)

    def step(self, message: Message) -> tuple[tuple[Message, ...], types.StopReason | None]:
        return self.inner.step(message)


class BfclReward:
    """As BFCL judges: possible answers by its AST checker; else no call, or any where one fits."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = trajectory.turns[0].message if trajectory.turns else Message("assistant")
        if task.gold.get("calls"):
            return CallReward().score(replace(task, tools=checked_tools(task)), trajectory)
        called = bool(message.tool_calls)
        right = called and not message.unparsed if "decision" in task.gold else not called
        return Score(float(right), {"exact_call": float(right)})


class DecisionReward:
    """Whether the first answer takes gold's decision."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        item = Item(task, trajectory, Score(0.0))
        right = float(item.decision == item.due)
        return Score(right, {"right": right}, "" if right else f"{item.decision or 'nothing'} said")


class SelectionReward:
    """Exactly gold's tools, whatever their arguments."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        called = {call.name for turn in trajectory.turns for call in turn.message.tool_calls}
        right = float(called == set(task.gold["tools"]))
        return Score(right, {"right": right}, "" if right else f"called {sorted(called)}")


class RetrievalReward:
    """Whether a short answer holds the value that was sought."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        text = trajectory.turns[-1].message.content if trajectory.turns else ""
        wanted = max(map(str, task.gold["answers"]), key=len)
        right = float(folded(wanted) in folded(text) and len(text) <= len(wanted) + NEAR)
        return Score(right, {"right": right}, "" if right else "not in the answer, or not alone")


# what was imported, the record, its file → tasks, and why there is none
Prepare = Callable[[Any, Json, Path], Iterable[Task | RowError]]


def as_it_is(task: Any, raw: Json, path: Path) -> Iterable[Task]:
    if not isinstance(task, Task):
        raise RowError("", "a recorded dialog, not a task")
    return (task,)


def bfcl_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """Executable rows' calls become possible answers; Java's and JavaScript's are source text."""
    gold, told = dict(task.gold), ""
    if task.kind in ("rest", "multi_turn"):
        raise RowError(task.id, f"{task.kind} rows need the services that they call")
    if gold.get("calls") and "match" not in gold:
        gold["calls"] = [c | {"arguments": allowed(c["arguments"])} for c in gold["calls"]]
        gold["match"] = "allowed"
    if found := re.search(r"javascript|java", str(task.metadata.get("category"))):
        gold["language"] = told = found[0]
    tools = tuple(in_words(tool, told) for tool in task.tools) if told else task.tools
    metadata = task.metadata | ({"functions": raw["function"]} if told else {})
    task = replace(task, gold=gold, tools=tools, metadata=metadata)
    turns = tuple(map(types.Turn, gold_messages(task)))
    right = Trajectory(task.id, turns, types.StopReason.ANSWERED)
    if BfclReward().score(task, right).value < 1:
        raise RowError(task.id, "the rules of BFCL refuse the answer of the row")
    yield task


def allowed(value: Any) -> Any:
    """A value as BFCL lists allowed ones: an object's values are such lists themselves."""
    if isinstance(value, dict):
        return {key: [allowed(inner)] for key, inner in value.items()}
    if isinstance(value, list):
        return [allowed(inner) if isinstance(inner, dict) else inner for inner in value]
    return value


def in_words(tool: types.ToolSpec, language: str) -> types.ToolSpec:
    """Every argument is text in the language."""
    fields, shown = tool.parameters.get("properties") or {}, {}
    for name, field in fields.items():
        text = f"{field.get('description', '')} ({language} source)".strip()
        shown[name] = {"type": "string", "description": text}
    return replace(tool, parameters=tool.parameters | {"properties": shown})


def decision_task(task: Any, raw: Json, path: Path) -> Iterator[Task]:
    (task,) = as_it_is(task, raw, path)
    gold = {"decision": SAME.get(task.gold["decision"], task.gold["decision"])}
    yield replace(task, gold=gold, metadata=task.metadata | {"answer": task.gold.get("answer")})


def known_calls(task: Any, raw: Json, path: Path) -> Iterator[Task]:
    (task,) = as_it_is(task, raw, path)
    offered = {tool.name for tool in task.tools}
    if strange := [c["name"] for c in task.gold["calls"] if c["name"] not in offered]:
        raise RowError(task.id, f"gold calls {strange[0]!r}, which is not on offer")
    yield task


def dialog_calls(dialog: Dialog, raw: Json, path: Path) -> Iterator[Task | RowError]:
    """Every call that follows the user's words is a task."""
    for at, message in enumerate(dialog.messages):
        if not message.tool_calls:
            continue
        *context, asked = dialog.messages[:at]
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        row = Task(f"{dialog.id}-{at}", asked.content, dialog.tools, {"calls": calls}, "calls")
        follows = RowError(row.id, "a call that does not follow words of the user")
        yield replace(row, context=tuple(context)) if asked.role == "user" else follows


def graph_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    listed = "\n".join(f"- {tool.name}: {tool.description}" for tool in task.tools)
    tools = f"\n\nTools:\n{listed}" if "tool" in task.gold["nodes"][0] else ""
    yield replace(task, instruction=task.instruction + tools, tools=())


def number_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    yield replace(task, kind="math", gold={"answer": task.gold["answers"][0]})


def tested_code(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    tests = "\n".join(task.gold["tests"])
    shown = "" if task.gold.get("entry_point") else f"\n\nIt has to pass:\n{tests}"
    yield replace(task, instruction=task.instruction + shown)


@dataclass(frozen=True)
class Benchmark:
    format: str
    reward: Callable[[], Any]
    prepare: Prepare = as_it_is
    hint: str = ""
    metrics: tuple[str, ...] = ("accuracy",)
    max_tokens: int = 256
    make: Callable[[Sequence[Task], Path, types.Policy | None], MakeEnvironment] | None = None
    max_turns: int = 1
    generate: Callable[[int], Iterator[Task]] | None = None


CALLS = ("accuracy", "tool_selection_accuracy", "argument_accuracy", "parameter_extraction")
CALLS += ("hallucinated_tool_rate", "over_calling_rate")
GRAPHS = ("accuracy", "graph_f1", "node_f1", "edge_f1", "plan_dag_validity")
TIMES = ("timing_precision", *(f"timing_f1_{name}" for name in DECISIONS), "over_calling_rate")
SERVICE = ("accuracy", "end_to_end_success", "action_recall")
GRAPH_HINT = "Answer with the plan as a graph:\nNode:\n1: a tool's name\nEdge: (START,1) (1,END)"
REFER = "Make all calls at once. Where a call needs the result of an earlier one, write "
Verified = VerifiableRewardCalculator
PLAYED = SimulatedService.maker, 30  # turns
TAU = Benchmark("tau_tasks", ActionsReward, service_task, "", SERVICE, 256, *PLAYED)


def kv_tasks(keys: int) -> Iterator[Task]:
    """Twenty places in an object of so many keys."""
    for number in range(20):
        chance = seeded("kv", keys, number)
        pairs = [[f"{chance.getrandbits(64):016x}" for _ in range(2)] for _ in range(keys)]
        key, value = pairs[number * (keys - 1) // 19]
        row = {"ordered_kv_records": pairs, "key": key, "value": value}
        yield replace(FORMATS["kv_retrieval"].convert(row), id=f"kv-{keys}-{number}")


def needle_tasks(longest: int) -> Iterator[Task]:
    """A grid: four lengths up to `longest` characters, five depths."""
    for length in (longest * part // 4 for part in range(1, 5)):
        for depth in DEPTHS:
            word = f"{seeded('needle', length, depth).getrandbits(32):08x}"
            needle = f"The pass phrase of today is {word}."
            row = needle_in_haystack(length, needle, depth, SOUGHT, word, seed=longest)
            text, gold = f"{row['context']}\n\n{SOUGHT}", {"answers": [word]}
            about = {"category": f"{length} at {depth:g}"}
            yield Task(f"needle-{length}-{depth:g}", text, (), gold, "retrieval", metadata=about)


BENCHMARKS: dict[str, Benchmark] = {
    "bfcl": Benchmark("bfcl", BfclReward, bfcl_task, metrics=CALLS),
    "when2call": Benchmark("when2call", DecisionReward, decision_task, metrics=TIMES),
    "seal_tools": Benchmark("sealtools", CallReward, hint=f"{REFER}API_call_0.", metrics=CALLS),
    "metatool": Benchmark("metatool", SelectionReward, metrics=("accuracy", "mrr")),
    "toolalpaca": Benchmark("toolalpaca", CallReward, metrics=CALLS),
    "api_bank": Benchmark("apibank", CallReward, dialog_calls, metrics=CALLS),
    "nestful": Benchmark("nestful", CallReward, known_calls, f"{REFER}$var1.field$.", CALLS),
    "worfbench": Benchmark("worfbench", PlanGraphReward, graph_task, "", GRAPHS, 512),
    "ultratool": Benchmark("taskbench", PlanGraphReward, graph_task, GRAPH_HINT, GRAPHS, 512),
    "tau": TAU,
    "tau2": replace(TAU, format="tau2_tasks"),
    "intercode_sql": Benchmark("intercode_sql", Verified, sqlite_task, "Answer with a SQL query."),
    "gsm8k": Benchmark("gsm8k", Verified, max_tokens=512),
    "svamp": Benchmark("svamp", Verified, max_tokens=512),
    "aqua": Benchmark("aqua", Verified, hint="Answer with the letter of the right option."),
    "mbpp": Benchmark("mbpp", Verified, tested_code, "Answer with Python code.", max_tokens=512),
    "humaneval": Benchmark("humaneval", Verified, tested_code, "Complete it.", max_tokens=512),
    "longeval": Benchmark("longeval", Verified, number_task, max_tokens=64),
    "kv_retrieval": Benchmark("kv_retrieval", RetrievalReward, max_tokens=96, generate=kv_tasks),
    "needle": Benchmark("", RetrievalReward, max_tokens=64, generate=needle_tasks),
}


def agent_suite(name: str, tasks: Sequence[Task]) -> Suite:
    return Suite(name, unique(tasks), AgentRewardModel(), InItsWorld, max_turns=10, metrics=FIVE)


def load_benchmark(spec: str, user: types.Policy | None = None) -> Suite:
    """`agent_benchmark[/PART]:SPLIT`, `tasks:PATH` (rows of one's own), `general`, `NAME:PATH`, or
    `NAME:NUMBER` of a made one. `user` plays the user where a benchmark has one."""
    name, _, rest = spec.partition(":")
    if name.split("/")[0] == AGENT or (name == "tasks" and rest):
        return agent_suite(spec, list(read_tasks(rest if name == "tasks" else spec)))
    if name == GENERAL:
        rows = read_jsonl(Path(__file__).with_name("general.jsonl"))
        tasks = [task_from_row(row.value, row.where) for row in rows]
        kept = [task for task in tasks if rest in ("", task.kind, task.metadata["category"])]
        return Suite(spec, kept, Verified(), metrics=("accuracy",), max_tokens=128)
    if name not in BENCHMARKS:
        known = [f"{AGENT}:SPLIT", GENERAL, *(f"{each}:PATH" for each in ("tasks", *BENCHMARKS))]
        raise SharpenError(f"benchmark {spec!r}: expected {', '.join(known)}")
    entry = BENCHMARKS[name]
    if entry.generate and (rest.isdigit() or not entry.format):
        if not rest.isdigit() or int(rest) < 200 * (not entry.format) + 2:
            raise SharpenError(f"benchmark {spec!r}: expected a size, such as {name}:4000")
        tasks, left_out = list(entry.generate(int(rest))), Counter[str]()
    elif not rest:
        raise SharpenError(f"benchmark {name!r}: needs its file, as in {name}:PATH")
    else:
        tasks, left_out = read_benchmark(entry, Path(rest))
    if not tasks:
        why = f": {left_out.most_common(1)[0][0]}" if left_out else ""
        raise SharpenError(f"benchmark {spec!r}: nothing in it can be scored{why}")
    hint = f"\n\n{entry.hint}" if entry.hint else ""
    tasks = [replace(task, instruction=task.instruction + hint) for task in unique(tasks)]
    make = entry.make(tasks, Path(rest), user) if entry.make else OneTurn
    limits = entry.max_tokens, entry.max_turns, entry.metrics
    return Suite(spec, tasks, entry.reward(), make, *limits, dict(left_out))


def read_benchmark(entry: Benchmark, path: Path) -> tuple[list[Task], Counter[str]]:
    """The tasks of a file or folder, and why other records are none."""
    importer = load(entry.format)
    try:
        side = (importer.side(path),) if importer.side else ()
    except SHAPE_ERRORS as error:
        raise SharpenError(f"{path}: not {entry.format}'s: {fault(error)}") from None
    found = list[Task | RowError]()
    for record in read_records(path, importer.names, importer.split):
        try:
            row = json.loads(converted(importer, record, side))
            noun = task_from_row(row) if "instruction" in row else dialog_from_row(row)
            found += entry.prepare(noun, record.value, path)
        except RowError as error:
            found.append(error)
    left_out = Counter(reason_kind(each.reason) for each in found if isinstance(each, RowError))
    return [each for each in found if isinstance(each, Task)], left_out


def unique(tasks: Iterable[Task]) -> list[Task]:
    """Tasks under names of their own: an item is known by it."""
    seen, found = Counter[str](), list[Task]()
    for task in tasks:
        seen[task.id] += 1
        found.append(replace(task, id=f"{task.id}#{seen[task.id]}") if seen[task.id] > 1 else task)
    return found
