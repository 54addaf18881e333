"""What `learning.py` found: `learning.json` with success and gains over SFT with 95% intervals, the
curves and bars of `learning.png`, and what both are made of."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sharpen.config import read_yaml
from sharpen.evals.intervals import bootstrapped, paired
from sharpen.records import read_jsonl, write_json, write_jsonl
from sharpen.types import Json

PARTS = ("selection", "planning", "timing", "end_to_end")
KINDS = ("all", "calls", "decisions", *PARTS, "easy", "medium", "hard")
LEAST = 0.05  # of a gain that was asked for


def report(folder: Path, names: Sequence[str]) -> None:
    """`names` are the models' folders, that of SFT first."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    items, metrics = (
        {n: [row.value for row in read_jsonl(folder / path.format(n))] for n in names}
        for path in ("items-{}.jsonl", "{}/metrics.jsonl")
    )
    start = [row["task_completion"] for row in items["sft"] if row["set"] == "curve"]
    items = {n: [row for row in rows if row["set"] != "curve"] for n, rows in items.items()}
    done_NK = np.array([[row["task_completion"] for row in items[n]] for n in names])
    sides = dict(zip(names, done_NK, strict=True)) | {"pooled": done_NK[1:].mean(0)}
    found: Json = {n: compared(items["sft"], sides["sft"], side) for n, side in sides.items()}
    found["sft"]["curve"] = float(np.mean(start))
    for name in names[1:]:
        found[name]["steps"] = metrics[name][-1]["step"]
    gains = [found[name]["all"]["gain"] for name in [*names[1:], "pooled"]]
    found["passed"] = all(gain["difference"] >= LEAST and gain["low"] > 0 for gain in gains)
    found["settings"] = {n: read_yaml(folder / n / "config.yaml") for n in names}
    write_json(out / "learning.json", found)
    draw(found, metrics, out / "learning.png")
    for name in names:
        shutil.copy(folder / name / "metrics.jsonl", out / f"metrics-{name}.jsonl")
    about = [
        {key: row[key] for key in ("id", "needs", "kind", "difficulty")} for row in items["sft"]
    ]
    done = [dict(zip(names, column, strict=True)) for column in done_NK.T.tolist()]
    write_jsonl(out / "items.jsonl", map(dict.__or__, about, done))
    for name in sides:
        told = {k: f"{v['success']['mean']:.3f}" for k, v in found[name].items() if k in KINDS}
        print(name, found[name].get("steps", ""), told, found[name]["all"]["gain"])
    print("passed" if found["passed"] else "not passed", flush=True)


def compared(items: Sequence[Json], before: np.ndarray, after: np.ndarray) -> Json:
    """Success and gain over all evaluation tasks, over those in which something is to be called
    and those in which nothing is, by kind and by difficulty."""
    found: Json = {}
    for name in KINDS:
        sorts = [("all", row["needs"], row["kind"], row["difficulty"]) for row in items]
        at = [n for n, sort in enumerate(sorts) if name in sort]
        if at:
            success = asdict(bootstrapped(after[at].tolist()))
            found[name] = {
                "success": success,
                "gain": asdict(paired(before[at].tolist(), after[at].tolist())),
            }
    return found


def draw(found: Json, metrics: dict[str, list[Json]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    start = found["sft"]["curve"]
    for name in [name for name in metrics if name != "sft"]:
        done = [(row["step"], row["reward_task_completion"]) for row in metrics[name]]
        left.plot(*zip(*done, strict=True), linewidth=0.9, label=name)
        seen = [(r["step"], r["eval_task_completion"]) for r in metrics[name] if "metric" in r]
        middle.plot(*zip((0, start), *seen, strict=True), ".-", label=name)
    middle.axhline(start, color="0.5", linestyle="--", label="SFT")
    bars = {name: found[name]["all"]["success"] for name in [*metrics, "pooled"]}
    ends = [[abs(b["mean"] - b[end]) for b in bars.values()] for end in ("low", "high")]
    right.bar([*bars], [b["mean"] for b in bars.values()], yerr=ends, capsize=4)
    left.set(title="sampled on train tools", xlabel="step", ylabel="tasks done")
    middle.set(title="curve tasks of dev tools, greedy", xlabel="step", ylabel="tasks done")
    right.set(title=f"{bars['sft']['count']} tasks of dev tools, greedy", ylabel="tasks done (95%)")
    left.legend()
    middle.legend()
    figure.savefig(path, dpi=110)
