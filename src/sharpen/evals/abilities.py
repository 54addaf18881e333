"""A model by ability: tool calling by the kinds of a tasks file, and a merged model in mathematics,
code, tool use and writing, with what it lost against its parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.evals.benchmarks import load_benchmark
from sharpen.evals.evaluator import AgentTrainingEvaluator, EvaluateOptions, evaluate
from sharpen.evals.intervals import bootstrapped, paired
from sharpen.evals.items import Suite
from sharpen.evals.subjects import load
from sharpen.records import read_jsonl
from sharpen.rewards.calls import CallReward
from sharpen.rewards.judge import Judge
from sharpen.rows import task_from_row
from sharpen.types import Json, Sampling, SharpenError, Task

# ability → its benchmark where none is named; code has none without a file
ABILITIES = {"math": "general:math", "tool_use": "agent_benchmark:test", "writing": "judge"}
WRITING = (
    "Write a short poem about the sea in winter.",
    "Write a polite letter that asks a neighbour to be quieter at night.",
    "Tell a story of about a hundred words about a lost key.",
    "Explain to a child why the sky is blue, in five sentences.",
    "Write the opening paragraph of a detective novel set in a library.",
    "Summarise the plot of a fairy tale that you know, in four sentences.",
)


def evaluate_abilities(model: str | Path, tasks: str | Path, max_tokens: int = 128) -> Json:
    """Exact-call rate by task kind, and over all of them as `overall`. Tasks need `gold.calls`."""
    by_kind: dict[str, list[Task]] = {}
    for row in read_jsonl(tasks):
        task = task_from_row(row.value, row.where)
        if "calls" not in task.gold:
            raise SharpenError(f"{row.where}: gold has no calls to compare with")
        by_kind.setdefault(task.kind or "call", []).append(task)
    if not by_kind:
        raise SharpenError(f"{tasks}: no tasks")
    policy = load(str(model))
    found, right, count = {}, 0.0, 0
    for kind, items in sorted(by_kind.items()):
        outcome = evaluate(policy, items, CallReward(), Sampling(max_tokens), title=kind)
        found[kind] = asdict(outcome.figures["exact_call"])
        right, count = right + sum(r["exact_call"] for r in outcome.records), count + len(items)
    return found | {"overall": right / count}


def writing_suite(judge: Judge | None) -> Suite:
    """A verdict that cannot be had is an error of the judge, not a number."""
    if judge is None:
        raise SharpenError("ability 'writing': nobody judges it; give judge=Judge(policy)")
    tasks = [Task(f"writing-{n}", text, kind="open") for n, text in enumerate(WRITING, 1)]
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
    or a name of `ABILITIES`; `overall` is their mean. `regressions` are the abilities in which a
    parent was better, item by item, and whether that is `sure` or may be chance."""
    if not isinstance(abilities, Mapping):
        if wrong := [name for name in abilities if name not in ABILITIES]:
            known = ", ".join(ABILITIES)
            raise SharpenError(f"ability {wrong[0]!r}: name its benchmark, or take {known}")
        abilities = {name: ABILITIES[name] for name in abilities}
    if not abilities:
        raise SharpenError("no ability to evaluate")
    found: Json = {"abilities": {}, "regressions": []}
    for ability, spec in abilities.items():
        suite = writing_suite(judge) if spec == "judge" else load_benchmark(spec)
        metric = "reward" if spec == "judge" else "accuracy"
        values = []
        for number, one in enumerate((model, *parents)):
            folder = Path(output) / ability / str(number) if output else None
            options = EvaluateOptions(limit=limit, general=False)
            judged = AgentTrainingEvaluator(suite, folder, options=options)
            judged.evaluate(one, metrics=[metric])
            values.append([row["metrics"][metric] for row in judged.items[0]])
        own, *others = (asdict(bootstrapped(each)) for each in values)
        found["abilities"][ability] = own | {"benchmark": spec, "parents": others}
        for parent, before in zip(parents, values[1:], strict=True):
            change = paired(before, values[0])
            if change.difference < 0:
                about = {"ability": ability, "parent": str(parent), "sure": change.p < 0.05}
                found["regressions"].append(about | asdict(change))
    found["overall"] = fmean(each["mean"] for each in found["abilities"].values())
    return found
