"""Training methods against each other: each is really trained, by its own process, under one
budget of steps, with several seeds, and measured on the same items.

A method is a name and the settings that make it differ from the baseline. A cell (method, seed)
that is done is not done again; one that fails is shown as failed and stops nothing.
"""

from __future__ import annotations

import itertools
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
from sharpen.evals.intervals import bootstrapped, paired
from sharpen.records import RunFolder, read_json, read_jsonl, write_json, write_jsonl, write_text
from sharpen.report.page import Page
from sharpen.report.plots import draw_bars, draw_lines, draw_points, save
from sharpen.train.scoring import ModelScorer
from sharpen.types import Json, SharpenError

CORESET, CONTINUAL = {"use_coreset_selection": True}, {"use_online_continual": True}
METHODS: dict[str, Json] = {
    "A_baseline": {},
    "B1_coreset_loss": CORESET | {"coreset_strategy": "loss_topk"},
    "B2_coreset_diversity": CORESET | {"coreset_strategy": "diversity"},
    "B3_coreset_hybrid": CORESET | {"coreset_strategy": "hybrid"},
    "C_continual": CONTINUAL,
    "D_combined": CORESET | {"coreset_strategy": "hybrid"} | CONTINUAL,
    "random_coreset": CORESET | {"coreset_strategy": "random"},
    "curriculum": CORESET | {"coreset_strategy": "curriculum_length"},
    "dora": {"use_dora": True},
    "lora_plus": {"lora_plus_ratio": 16.0},
}
SIX = tuple(METHODS)[:6]
QUICK = {"max_length": 8192, "batch_size": 8, "gradient_accumulation": 1, "learning_rate": 1e-3}
QUICK |= {"coreset_target_size": 48, "eval_steps": 6}
QUICK_STAMP = "A plumbing check on an untrained toy model, not a result."
LOSS = "dev_loss"


class CompareConfig(Config):
    """`settings` are those of every run; `own` adds methods, or changes known ones."""

    model: str = "smollm2-135m"
    methods: tuple[str, ...] = SIX
    own: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: int = Field(3, ge=1)
    train_data: str = "agent_sft:train"
    dev_data: str = "agent_sft:dev"
    benchmark: str = "agent_benchmark:test"  # empty: compared by dev loss
    train_rows: int = Field(0, ge=0)  # 0: all
    dev_rows: int = Field(0, ge=0)
    steps: int = Field(0, ge=0)  # of every method; 0: an epoch of the baseline times num_epochs
    settings: dict[str, Any] = Field(default_factory=dict)
    quick: bool = False


def quick_config(**changes: Any) -> CompareConfig:
    """The toy model, the six methods, one seed, dev loss: minutes on a CPU."""
    small = {"model": "pico", "seeds": 1, "benchmark": "", "train_rows": 128, "dev_rows": 24}
    return CompareConfig(**small | {"steps": 12, "settings": QUICK, "quick": True} | changes)


@dataclass(frozen=True, slots=True)
class Cell:
    """One method with one seed: what it cost, and a value for each item of each metric."""

    method: str
    seed: int
    figures: Json  # of the training run
    items: dict[str, dict[str, float]]  # metric → item → value
    curve: list[tuple[float, float]]
    seconds: float = 0.0
    failed: str = ""


class Comparison:
    """`Comparison(config, folder).run()` → one row a method."""

    def __init__(self, config: CompareConfig, folder: str | Path):
        self.config, self.folder = config, Path(folder)
        self.methods = METHODS | config.own
        if strange := [name for name in config.methods if name not in self.methods]:
            raise SharpenError(f"method {strange[0]!r}: expected one of {', '.join(self.methods)}")

    def run(self) -> list[Json]:
        RunFolder(self.folder, self.config)
        data, steps = self.data(), self.config.steps
        cells = []
        for method, seed in itertools.product(self.config.methods, range(self.config.seeds)):
            print(f"{method}, seed {seed}", flush=True)
            cells.append(self.cell(method, seed, data, steps or self.epoch_steps(data)))
        rows = table(cells, self.config.methods)
        write_json(self.folder / "comparison.json", {"rows": rows, "quick": self.config.quick})
        self.report(rows, cells)
        return rows

    def data(self) -> Json:
        """The rows of every run: the sources as they are, or a part of each that all share."""
        found: Json = {}
        for name, count in (("train", self.config.train_rows), ("dev", self.config.dev_rows)):
            source = getattr(self.config, f"{name}_data")
            path = self.folder / f"{name}.jsonl"
            if count and not path.exists():
                rows = [row.value for row in read_rows(source)]
                write_jsonl(path, random.Random(0).sample(rows, min(count, len(rows))))
            found[f"{name}_data"] = str(path) if count else source
        return found

    def epoch_steps(self, data: Json) -> int:
        from sharpen.train.config.sft import AgentSFTConfig

        config = AgentSFTConfig(**self.config.settings)
        rows = sum(1 for _ in read_rows(data["train_data"]))
        per_step = config.batch_size * config.gradient_accumulation
        return math.ceil(rows / per_step) * config.num_epochs

    def cell(self, method: str, seed: int, data: Json, steps: int) -> Cell:
        """Train and measure, or take what is there."""
        folder = self.folder / f"{method}-{seed}"
        done = folder / "cell.json"
        if done.is_file():
            return Cell(**read_json(done))
        folder.mkdir(exist_ok=True)
        config = {"base_model": self.config.model, **data, "seed": seed, "max_steps": steps}
        config |= self.config.settings | self.methods[method]
        write_text(folder / "sft.yaml", yaml.safe_dump(config))
        try:
            figures, seconds = train(folder)
            items = self.measure(folder / "run" / "final", data["dev_data"], folder)
        except SharpenError as error:
            return Cell(method, seed, {}, {}, [], failed=one_line(error))
        rows = [row.value for row in read_jsonl(folder / "run" / "metrics.jsonl")]
        curve = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
        cell = Cell(method, seed, figures, items, curve, seconds)
        write_json(done, asdict(cell))
        return cell

    def measure(self, model: Path, dev: str, folder: Path) -> dict[str, dict[str, float]]:
        """Dev loss of each dialog, and the benchmark's metrics of each of its items."""
        dialogs = list(read_dialogs(dev))
        losses = ModelScorer.load(str(model)).losses(dialogs)
        found = {LOSS: {str(n): loss for n, loss in enumerate(losses)}}
        if self.config.benchmark:
            judge = AgentTrainingEvaluator(self.config.benchmark, folder / "evaluation")
            names = judge.evaluate(str(model))
            for prefix, rows in zip(("", "general_"), judge.items, strict=False):
                for name in names if not prefix else ("accuracy",):
                    values = {row["id"]: row["metrics"].get(name) for row in rows}
                    kept = {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}
                    found |= {prefix + name: kept} if kept else {}
        return found

    def report(self, rows: Sequence[Json], cells: Sequence[Cell]) -> None:
        """Plots as files, and one page with everything."""
        done = [row for row in rows if "failed" not in row]
        page = Page(f"Training methods on {self.config.model}")
        if self.config.quick:
            page.text(QUICK_STAMP, "bad")
        page.table([flat_row(row) for row in rows])
        bars: dict[str, Json] = {}  # metric → method → mean and interval
        for row in done:
            for name, found in row["metrics"].items():
                span = found["mean"], found["low"], found["high"]
                bars.setdefault(name, {})[row["method"]] = span
        plots = {f"bars_{name}": draw_bars(name, spans) for name, spans in bars.items()}
        firsts = {cell.method: cell.curve for cell in cells if cell.seed == 0 and cell.curve}
        if firsts:
            plots["curves"] = draw_lines("training loss, seed 0", firsts)
            cost = {r["method"]: (r["seconds"], r["metrics"][LOSS]["mean"]) for r in done}
            plots["pareto"] = draw_points("cost and dev loss", cost, "training seconds", LOSS)
        for (name, figure), suffix in itertools.product(plots.items(), ("png", "svg")):
            save(figure, self.folder / f"{name}.{suffix}")
        page.plots(plots.values())
        for row in rows:
            if "failed" in row:
                page.text(f"{row['method']} failed: {row['failed']}", "bad")
        page.preformatted("config.yaml", (self.folder / "config.yaml").read_text("utf-8"))
        page.save(self.folder / "report.html")


def train(folder: Path) -> tuple[Json, float]:
    """The run of a cell, in a process of its own; the time of runs that were stopped counts."""
    spent, began = folder / "seconds.json", time.monotonic()
    before = read_json(spent)["seconds"] if spent.is_file() else 0.0
    command = [sys.executable, "-m", "sharpen.cli.main", "train", "sft", "--json"]
    command += ["--config", str(folder / "sft.yaml"), "--output", str(folder / "run")]
    with open(folder / "log.txt", "ab") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = before + time.monotonic() - began
    write_json(spent, {"seconds": seconds})
    lines = (folder / "log.txt").read_text("utf-8", "replace").strip().splitlines() or ["no output"]
    if code:
        raise SharpenError(f"{lines[-1].removeprefix('error: ')} (exit code {code})")
    return json.loads(lines[-1]), seconds


def table(cells: Sequence[Cell], methods: Sequence[str]) -> list[Json]:
    """Each method's figures over all of its seeds. An item's value is its mean over the seeds; the
    interval is over items, `seeds_std` says what the seeds alone change; the difference to the
    first method is paired by item."""
    rows: list[Json] = []
    first: dict[str, dict[str, float]] = {}
    for method in methods:
        own = [cell for cell in cells if cell.method == method]
        if broken := [cell for cell in own if cell.failed]:
            rows.append({"method": method, "failed": broken[0].failed})
            continue
        pooled = {name: pool([cell.items[name] for cell in own]) for name in own[0].items}
        first = first or pooled
        metrics = {}
        for name, values in pooled.items():
            means = [float(np.mean(list(cell.items[name].values()))) for cell in own]
            metrics[name] = asdict(bootstrapped(list(values.values())))
            metrics[name]["seeds_std"] = float(np.std(means))
            both = [key for key in values if key in first.get(name, {})]
            if pooled is not first and both:
                change = paired([first[name][k] for k in both], [values[k] for k in both])
                metrics[name]["change"] = asdict(change)
        row: Json = {"method": method, "seeds": len(own), "rows": own[0].figures.get("rows")}
        row |= {"seconds": float(np.mean([cell.seconds for cell in own]))}
        row["peak_gib"] = max(cell.figures.get("peak_gib", 0.0) for cell in own)
        rows.append(row | {"metrics": metrics})
    return rows


def pool(items: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        key: float(np.mean([values[key] for values in items if key in values])) for key in items[0]
    }


def flat_row(row: Json) -> Json:
    """A row of the table that people read."""
    found = {key: value for key, value in row.items() if key != "metrics"}
    for name, figure in row.get("metrics", {}).items():
        found[name] = f"{figure['mean']:.4f} [{figure['low']:.4f}, {figure['high']:.4f}]"
        if "change" in figure:
            change = figure["change"]
            found[f"{name} change"] = f"{change['difference']:+.4f} p={change['p']:.2g}"
    return found
