"""A model's tool calling by ability: the kinds of a tasks file, each with its own figure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from sharpen.evals.evaluator import evaluate
from sharpen.models.load import ModelConfig
from sharpen.policy.local import LocalPolicy
from sharpen.records import read_jsonl
from sharpen.rewards.calls import CallReward
from sharpen.rows import task_from_row
from sharpen.types import Json, Sampling, SharpenError, Task


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
    policy = LocalPolicy.load(ModelConfig(base_model=str(model)))
    found, right, count = {}, 0.0, 0
    for kind, items in sorted(by_kind.items()):
        outcome = evaluate(policy, items, CallReward(), Sampling(max_tokens), title=kind)
        found[kind] = asdict(outcome.figures["exact_call"])
        right, count = right + sum(r["exact_call"] for r in outcome.records), count + len(items)
    return found | {"overall": right / count}
