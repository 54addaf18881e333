"""Compare training methods: train each with several seeds and measure all on the same items.

`sharpen compare` runs it. A method is a name and the settings in which it differs from the
baseline. Every run (one method with one seed) trains in a process of its own, for the same number
of steps. A run that is complete is not repeated; one that fails is shown as failed, and the others
go on.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field

from sharpen.config import Config, one_line
from sharpen.data.sources import read_dialogs, read_rows
from sharpen.evals.evaluator import AgentTrainingEvaluator
from sharpen.evals.intervals import interval, paired
from sharpen.records import RunFolder, read_json, read_jsonl, write_json, write_jsonl, write_text
from sharpen.report.page import Page
from sharpen.report.plots import draw_bars, draw_lines, draw_points, save
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.scoring import ModelScorer
from sharpen.types import Json, SharpenError

METHODS: dict[str, Json] = {
    "A_baseline": {},
    "B1_coreset_loss": {"use_coreset_selection": True, "coreset_strategy": "loss_topk"},
    "B2_coreset_diversity": {"use_coreset_selection": True, "coreset_strategy": "diversity"},
    "B3_coreset_hybrid": {"use_coreset_selection": True, "coreset_strategy": "hybrid"},
    "C_continual": {"use_online_continual": True},
    "D_combined": {
        "use_coreset_selection": True,
        "coreset_strategy": "hybrid",
        "use_online_continual": True,
    },
    "random_coreset": {"use_coreset_selection": True, "coreset_strategy": "random"},
    "curriculum": {"use_coreset_selection": True, "coreset_strategy": "curriculum_length"},
    "dora": {"use_dora": True},
    "lora_plus": {"lora_plus_ratio": 16.0},
}
DEFAULT_METHODS = (
    "A_baseline",
    "B1_coreset_loss",
    "B2_coreset_diversity",
    "B3_coreset_hybrid",
    "C_continual",
    "D_combined",
)
QUICK_STAMP = "A plumbing check on an untrained toy model, not a result."
_QUICK_SETTINGS = {
    "max_length": 8192,
    "batch_size": 8,
    "gradient_accumulation": 1,
    "learning_rate": 1e-3,
    "coreset_target_size": 48,
    "eval_steps": 6,
}
_DEV_LOSS = "dev_loss"


class CompareConfig(Config):
    """The settings of a comparison. `settings` are those of every run; `own` adds methods, or
    changes known ones."""

    model: str = "smollm2-135m"
    methods: tuple[str, ...] = DEFAULT_METHODS
    own: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: int = Field(3, ge=1)
    train_data: str = "agent_sft:train"
    dev_data: str = "agent_sft:dev"
    benchmark: str = "agent_benchmark:test"  # empty: only dev loss is measured
    train_rows: int = Field(0, ge=0)  # drawn from train_data; 0: all
    dev_rows: int = Field(0, ge=0)  # drawn from dev_data; 0: all
    steps: int = Field(0, ge=0)  # of every run; 0: as many as num_epochs of the baseline take
    settings: dict[str, Any] = Field(default_factory=dict)
    quick: bool = False


def quick_config(**changes: Any) -> CompareConfig:
    """Returns the settings of a quick check: the toy model, the default methods, one seed, dev
    loss. It takes minutes on a CPU."""
    values = {
        "model": "pico",
        "seeds": 1,
        "benchmark": "",
        "train_rows": 128,
        "dev_rows": 24,
        "steps": 12,
        "settings": _QUICK_SETTINGS,
        "quick": True,
    }
    return CompareConfig(**values | changes)


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One method trained with one seed: what it cost, and the value of each item by each metric."""

    method: str
    seed: int
    figures: Json  # what the training run reported
    items: dict[str, dict[str, float]]  # metric → item → value
    curve: list[tuple[float, float]]  # step and training loss
    seconds: float = 0.0  # of training
    failed: str = ""  # why, if it failed


class Comparison:
    """`Comparison(config, folder).run()` trains and measures all methods."""

    def __init__(self, config: CompareConfig, folder: str | Path):
        self.config = config
        self.folder = Path(folder)
        self.methods = METHODS | config.own
        unknown = [name for name in config.methods if name not in self.methods]
        if unknown:
            expected = ", ".join(self.methods)
            raise SharpenError(f"method {unknown[0]!r}: expected one of {expected}")

    def run(self) -> list[Json]:
        """Run all methods with all seeds, write the report and return one row per method."""
        RunFolder(self.folder, self.config)
        data = self._prepare_data()
        steps = self.config.steps or self._epoch_steps(data)
        runs = []
        for method in self.config.methods:
            for seed in range(self.config.seeds):
                print(f"{method}, seed {seed}", flush=True)
                runs.append(self._run_method(method, seed, data, steps))
        rows = comparison_rows(runs, self.config.methods)
        write_json(self.folder / "comparison.json", {"rows": rows, "quick": self.config.quick})
        self._write_report(rows, runs)
        return rows

    def _prepare_data(self) -> Json:
        """The data settings of every run: the sources as they are, or a sample of their rows that
        all runs share."""
        return {
            "train_data": self._sample_rows(
                "train", self.config.train_data, self.config.train_rows
            ),
            "dev_data": self._sample_rows("dev", self.config.dev_data, self.config.dev_rows),
        }

    def _sample_rows(self, name: str, source: str, count: int) -> str:
        """The name of a source, or of a file with `count` of its rows."""
        if not count:
            return source
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            rows = [row.value for row in read_rows(source)]
            sample = random.Random(0).sample(rows, min(count, len(rows)))
            write_jsonl(path, sample)
        return str(path)

    def _epoch_steps(self, data: Json) -> int:
        """The number of steps in which the baseline sees all rows `num_epochs` times."""
        config = AgentSFTConfig(**self.config.settings)
        row_count = sum(1 for _ in read_rows(data["train_data"]))
        rows_per_step = config.batch_size * config.gradient_accumulation
        return math.ceil(row_count / rows_per_step) * config.num_epochs

    def _run_method(self, method: str, seed: int, data: Json, steps: int) -> MethodRun:
        """Train and measure, or read what an earlier call has completed."""
        folder = self.folder / f"{method}-{seed}"
        result_path = folder / "cell.json"
        if result_path.is_file():
            return MethodRun(**read_json(result_path))
        folder.mkdir(exist_ok=True)
        config = {"base_model": self.config.model, **data, "seed": seed, "max_steps": steps}
        config |= self.config.settings
        config |= self.methods[method]
        write_text(folder / "sft.yaml", yaml.safe_dump(config))
        try:
            figures, seconds = _train(folder)
            items = self._measure(folder / "run" / "final", data["dev_data"], folder)
        except SharpenError as error:
            return MethodRun(method, seed, {}, {}, [], failed=one_line(error))
        log_rows = [row.value for row in read_jsonl(folder / "run" / "metrics.jsonl")]
        curve = [(row["step"], row["loss"]) for row in log_rows if row["loss"] is not None]
        run = MethodRun(method, seed, figures, items, curve, seconds)
        write_json(result_path, asdict(run))
        return run

    def _measure(self, model: Path, dev_data: str, folder: Path) -> dict[str, dict[str, float]]:
        """The dev loss of each dialog, and every metric of the benchmark for each of its items."""
        dialogs = list(read_dialogs(dev_data))
        losses = ModelScorer.load(str(model)).losses(dialogs)
        items_of = {_DEV_LOSS: {str(number): loss for number, loss in enumerate(losses)}}
        if not self.config.benchmark:
            return items_of
        evaluator = AgentTrainingEvaluator(self.config.benchmark, folder / "evaluation")
        metrics = evaluator.evaluate(str(model))
        for name in metrics:
            values = _metric_values(evaluator.items[0], name)
            if values:
                items_of[name] = values
        if len(evaluator.items) > 1:  # the general items were evaluated too
            values = _metric_values(evaluator.items[1], "accuracy")
            if values:
                items_of["general_accuracy"] = values
        return items_of

    def _write_report(self, rows: Sequence[Json], runs: Sequence[MethodRun]) -> None:
        """Write one page with everything, and the plots as files."""
        page = Page(f"Training methods on {self.config.model}")
        if self.config.quick:
            page.text(QUICK_STAMP, "bad")
        page.table([flat_row(row) for row in rows])
        plots = _draw_plots(rows, runs)
        for name, figure in plots.items():
            for suffix in ("png", "svg"):
                save(figure, self.folder / f"{name}.{suffix}")
        page.plots(plots.values())
        for row in rows:
            if "failed" in row:
                page.text(f"{row['method']} failed: {row['failed']}", "bad")
        page.preformatted("config.yaml", (self.folder / "config.yaml").read_text("utf-8"))
        page.save(self.folder / "report.html")


def _train(folder: Path) -> tuple[Json, float]:
    """Train by the settings in the folder, in a process of its own.

    Returns what the run reported and its seconds, those of earlier attempts included: a run that
    was stopped continues where it was.
    """
    started = time.monotonic()
    seconds_path = folder / "seconds.json"
    log_path = folder / "log.txt"
    earlier_seconds = read_json(seconds_path)["seconds"] if seconds_path.is_file() else 0.0
    command = [sys.executable, "-m", "sharpen", "train", "sft", "--json"]
    command += ["--config", str(folder / "sft.yaml"), "--output", str(folder / "run")]
    with open(log_path, "ab") as log:
        process = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    seconds = earlier_seconds + time.monotonic() - started
    write_json(seconds_path, {"seconds": seconds})
    lines = log_path.read_text("utf-8", "replace").strip().splitlines()
    last_line = lines[-1] if lines else "no output"
    if process.returncode:
        message = last_line.removeprefix("error: ")
        raise SharpenError(f"{message} (exit code {process.returncode})")
    return json.loads(last_line), seconds


def _metric_values(records: Sequence[Json], metric: str) -> dict[str, float]:
    """Item → its value of the metric, for the items that have one."""
    values = {record["id"]: record["metrics"].get(metric) for record in records}
    return {item: float(value) for item, value in values.items() if isinstance(value, int | float)}


def comparison_rows(runs: Sequence[MethodRun], methods: Sequence[str]) -> list[Json]:
    """Returns one row per method: its figures over all of its seeds, or why it failed.

    The value of an item is its mean over the seeds. The interval of a metric is over the items;
    `seeds_std` is how much the mean varies by the seed alone. `change` is the difference to the
    first method that did not fail, paired by item.
    """
    rows: list[Json] = []
    baseline: dict[str, dict[str, float]] = {}
    for method in methods:
        method_runs = [run for run in runs if run.method == method]
        failed_runs = [run for run in method_runs if run.failed]
        if failed_runs:
            rows.append({"method": method, "failed": failed_runs[0].failed})
            continue
        mean_items = {}
        for name in method_runs[0].items:
            mean_items[name] = _mean_over_seeds([run.items[name] for run in method_runs])
        metrics = {}
        for name, values in mean_items.items():
            metrics[name] = _summarize_metric(name, values, method_runs)
            if name in baseline:
                change = _paired_change(baseline[name], values)
                if change:
                    metrics[name]["change"] = change
        baseline = baseline or mean_items
        rows.append(
            {
                "method": method,
                "seeds": len(method_runs),
                "rows": method_runs[0].figures.get("rows"),
                "seconds": float(np.mean([run.seconds for run in method_runs])),
                "peak_gib": max(run.figures.get("peak_gib", 0.0) for run in method_runs),
                "metrics": metrics,
            }
        )
    return rows


def _mean_over_seeds(items_of_runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Item → its mean over the runs that have it, for the items of the first run."""
    means = {}
    for item in items_of_runs[0]:
        values = [items[item] for items in items_of_runs if item in items]
        means[item] = float(np.mean(values))
    return means


def _summarize_metric(name: str, values: Mapping[str, float], runs: Sequence[MethodRun]) -> Json:
    """Mean and interval over the items, and the deviation of the means of the runs."""
    figure = asdict(interval(list(values.values())))
    means = [float(np.mean(list(run.items[name].values()))) for run in runs]
    figure["seeds_std"] = float(np.std(means))
    return figure


def _paired_change(before: Mapping[str, float], after: Mapping[str, float]) -> Json:
    """The difference on the items that both have; empty if there are none."""
    shared = [item for item in after if item in before]
    if not shared:
        return {}
    return asdict(paired([before[item] for item in shared], [after[item] for item in shared]))


def flat_row(row: Json) -> Json:
    """Returns a method's row with each metric as one text, for tables that people read."""
    flat = {key: value for key, value in row.items() if key != "metrics"}
    for name, figure in row.get("metrics", {}).items():
        flat[name] = f"{figure['mean']:.4f} [{figure['low']:.4f}, {figure['high']:.4f}]"
        if "change" in figure:
            change = figure["change"]
            flat[f"{name} change"] = f"{change['difference']:+.4f} p={change['p']:.2g}"
    return flat


def _draw_plots(rows: Sequence[Json], runs: Sequence[MethodRun]) -> dict[str, Any]:
    """File name → plot: each metric by method, the loss curves, and dev loss by cost."""
    trained = [row for row in rows if "failed" not in row]
    spans_of: dict[str, Json] = {}  # metric → method → mean and ends of the interval
    for row in trained:
        for name, figure in row["metrics"].items():
            span = (figure["mean"], figure["low"], figure["high"])
            spans_of.setdefault(name, {})[row["method"]] = span
    plots = {f"bars_{name}": draw_bars(name, spans) for name, spans in spans_of.items()}
    curves = {run.method: run.curve for run in runs if run.seed == 0 and run.curve}
    if curves:
        plots["curves"] = draw_lines("training loss, seed 0", curves)
        points = {}
        for row in trained:
            points[row["method"]] = (row["seconds"], row["metrics"][_DEV_LOSS]["mean"])
        plots["pareto"] = draw_points("cost and dev loss", points, "training seconds", _DEV_LOSS)
    return plots
