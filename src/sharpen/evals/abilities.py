"""A model by ability: tool calling by the kinds of a tasks file, and a merged model in mathematics,
code, tool use and writing, with what it lost against its parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.envs.one_turn import OneTurn
from sharpen.evals.benchmarks import load_benchmark
from sharpen.evals.evaluator import AgentTrainingEvaluator, EvaluateOptions
from sharpen.evals.intervals import interval, paired
from sharpen.evals.items import Suite
from sharpen.records import read_jsonl
from sharpen.rewards.calls import CallReward
from sharpen.rewards.judge import Judge
from sharpen.rows import task_from_row
from sharpen.types import Json, SharpenError, Task

# ability → its benchmark where none is named; code has none without a file
_ABILITIES = {"math": "general:math", "tool_use": "agent_benchmark:test", "writing": "judge"}
_WRITING = (
    "Write a short poem about the sea in winter.",
    "Write a polite letter that asks a neighbour to be quieter at night.",
    "Tell a story of about a hundred words about a lost key.",
    "Explain to a child why the sky is blue, in five sentences.",
    "Write the opening paragraph of a detective novel set in a library.",
    "Summarise the plot of a fairy tale that you know, in four sentences.",
)


def evaluate_abilities(model: str | Path, tasks: str | Path, max_tokens: int = 128) -> Json:
    """Returns the exact-call rate by task kind, and over all of them as `overall`. Tasks need
    `gold.calls`."""
    rows = []
    for row in read_jsonl(tasks):
        task = task_from_row(row.value, row.where)
        if "calls" not in task.gold:
            raise SharpenError(f"{row.where}: gold has no calls to compare with")
        rows.append(replace(task, kind=task.kind or "call"))
    if not rows:
        raise SharpenError(f"{tasks}: no tasks")
    suite = Suite(str(tasks), rows, CallReward(), OneTurn, max_tokens, metrics=("accuracy",))
    evaluator = AgentTrainingEvaluator(suite, options=EvaluateOptions(general=False))
    overall = evaluator.evaluate(str(model))["accuracy"]
    rates: Json = {}
    for kind in sorted({task.kind for task in rows}):
        values = [float(row["solved"]) for row in evaluator.items[0] if row["part"] == kind]
        rates[kind] = asdict(interval(values))
    return rates | {"overall": overall["mean"]}


def _writing_suite(judge: Judge | None) -> Suite:
    """A verdict that cannot be had is an error of the judge, not a number."""
    if judge is None:
        raise SharpenError("ability 'writing': nobody judges it; give judge=Judge(policy)")
    tasks = [Task(f"writing-{n}", text, kind="open") for n, text in enumerate(_WRITING, 1)]
    return Suite("writing", tasks, judge, max_tokens=400, metrics=("reward",))


def evaluate_merged(
    model: Any,
    parents: Sequence[Any] = (),
    abilities: Mapping[str, str] | Sequence[str] = ("math", "tool_use"),
    output: str | Path | None = None,
    judge: Judge | None = None,
    limit: int = 0,
) -> Json:
    """A merged model by ability, each a benchmark (`{"math": "gsm8k:PATH", "code": "mbpp:PATH"}`)
    or a name of `_ABILITIES`; `overall` is their mean. `regressions` are the abilities in which a
    parent was better, item by item, and whether that is `sure` or may be chance."""
    benchmark_of = _benchmarks(abilities)
    results: Json = {"abilities": {}, "regressions": []}
    for ability, spec in benchmark_of.items():
        suite = _writing_suite(judge) if spec == "judge" else load_benchmark(spec)
        metric = "reward" if spec == "judge" else "accuracy"
        values = []
        for number, candidate in enumerate((model, *parents)):
            folder = Path(output) / ability / str(number) if output else None
            options = EvaluateOptions(limit=limit, general=False)
            evaluator = AgentTrainingEvaluator(suite, folder, options=options)
            evaluator.evaluate(candidate, metrics=[metric])
            values.append([row["metrics"][metric] for row in evaluator.items[0]])
        own, *others = (asdict(interval(each)) for each in values)
        results["abilities"][ability] = own | {"benchmark": spec, "parents": others}
        for parent, parent_values in zip(parents, values[1:], strict=True):
            change = paired(parent_values, values[0])
            if change.difference < 0:
                regression = {"ability": ability, "parent": str(parent), "sure": change.p < 0.05}
                results["regressions"].append(regression | asdict(change))
    results["overall"] = fmean(each["mean"] for each in results["abilities"].values())
    return results


def _benchmarks(abilities: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """Ability → the benchmark that measures it."""
    if not isinstance(abilities, Mapping):
        unknown = [name for name in abilities if name not in _ABILITIES]
        if unknown:
            known = ", ".join(_ABILITIES)
            raise SharpenError(f"ability {unknown[0]!r}: name its benchmark, or take {known}")
        abilities = {name: _ABILITIES[name] for name in abilities}
    if not abilities:
        raise SharpenError("no ability to evaluate")
    return abilities
