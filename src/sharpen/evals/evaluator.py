"""Evaluate a model: tasks → answers → scores by the same rewards that train → figures with
intervals, and the same against another evaluation, item by item."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from sharpen import records
from sharpen.config import Config, parse_config, read_yaml
from sharpen.envs.perturb import Perturbation, Perturbed
from sharpen.evals.benchmarks import AGENT, GENERAL, agent_suite, load_benchmark
from sharpen.evals.intervals import Difference, Figure, figure, paired
from sharpen.evals.items import EvaluationConfig, Items, Suite, answered, code_digest, collect
from sharpen.evals.metrics import METRICS, find_metrics, summarise
from sharpen.evals.subjects import Subject, find_subject
from sharpen.report.runs import write_report
from sharpen.rollout import MakeEnvironment, OneTurn
from sharpen.rows import message_to_wire
from sharpen.types import (
    Json,
    Policy,
    Reward,
    Sampling,
    Score,
    SharpenError,
    StopReason,
    Task,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    figures: dict[str, Figure]
    records: list[Json]


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    reward: Reward,
    sampling: Sampling,
    title: str = "evaluate",
    make: MakeEnvironment = OneTurn,
    max_turns: int = 8,
) -> Evaluation:
    """The policy acts in each task's environment (none: it answers once), the reward scores."""
    suite = Suite(title, tasks, reward, make, max_turns=max_turns)
    rows = [record(*one) for chunk in answered(policy, suite, tasks, sampling) for one in chunk]
    names = [key for row in rows for key, value in row.items() if isinstance(value, float)]
    figures = {}
    for name in dict.fromkeys([*names, "tokens"]):
        figures[name] = figure([float(row[name]) for row in rows if name in row])
    return Evaluation(figures, rows)


def record(task: Task, trajectory: Trajectory, score: Score) -> Json:
    turns = trajectory.turns
    about = {key: value for key, value in trajectory.metadata.items() if key != "seconds"}
    return {
        "id": task.id,
        "stop": trajectory.stop.value,
        "value": score.value,
        **score.parts,
        "feedback": score.feedback,
        "answer": message_to_wire(turns[-1].message) if turns else {},
        "turns": len(turns),
        "unparsed": [bad.raw for turn in turns for bad in turn.message.unparsed],
        "tokens": sum(len(turn.ids) for turn in turns),
        **about,
    }


class EvaluateOptions(Config):
    """How an evaluation is run."""

    limit: int = Field(0, ge=0)  # items of the benchmark; 0 is all
    perturb: tuple[str, ...] = ()
    general: bool = True  # also the fixed set of items that need no tool
    max_tokens: int = Field(0, ge=0)  # of an answer; 0 leaves it to the benchmark
    temperature: float = Field(0.0, ge=0)
    seed: int = 0
    api_key_env: str = ""
    user: str = ""  # the model that plays the user, where a benchmark has one
    own_folder: bool = False  # each evaluation in one of its own below `output`


class AgentTrainingEvaluator:
    """`AgentTrainingEvaluator(AgentTrainingUsage()).evaluate(model)`. The loader gives tasks by
    `iter_samples(split)`, or is a suite or a benchmark's name. With an `output` folder every item
    is kept there and the same call goes on where it stopped; `results` has all that was found."""

    def __init__(
        self,
        benchmark_loader: Any = AGENT,
        output: str | Path | None = None,
        tokenizer: Any = None,
        options: EvaluateOptions | Json | None = None,
    ):
        if not isinstance(options, EvaluateOptions):
            options = parse_config(EvaluateOptions, options or {}, "evaluate")
        self.loader, self.options, self.tokenizer = benchmark_loader, options, tokenizer
        self.root = self.output = Path(output) if output else None
        self.results: Json = {}
        self.items: list[list[Json]] = []  # records of the benchmark, and of the general set

    def evaluate(
        self,
        model: Any,
        split: str = "test",
        metrics: Sequence[str] | None = None,
        compare: str | Path | None = None,
    ) -> Json:
        """Metric → its mean, std, count and 95% interval."""
        asked, began = find_metrics(metrics or ()), time.monotonic()
        subject = find_subject(model, self.tokenizer, self.options.api_key_env)
        suites = [self.suite(split)]
        also = self.options.general and suites[0].name != GENERAL
        suites += [load_benchmark(GENERAL)] if also else []
        config = self.config(subject, suites)
        before = Before(compare, config) if compare else None
        if self.root and self.options.own_folder:
            name = re.sub(r"[^\w.-]+", "_", f"{Path(subject.name).name}-{suites[0].name}")
            self.output = self.root / f"{name}-{config.hash()[:8]}"
        self.items = rows = self.answers(subject, suites, config)
        main = [row["metrics"] for row in rows[0]]
        figures = summarise(main)
        if silent := [name for name in asked if asked[name] not in figures]:
            about = f"{suites[0].name}: {', '.join(figures)}"
            raise SharpenError(f"metric {silent[0]!r} says nothing about {about}")
        asked = asked or {name: name for name in suites[0].metrics if name in figures}
        broken = StopReason.ENVIRONMENT_ERROR.value
        found = plain({name: figures[known] for name, known in asked.items()})
        self.results = config.model_dump(mode="json") | {
            "metrics": found,
            "all": plain(figures),
            "parts": grouped(rows[0], "part"),
            "categories": grouped(rows[0], "category"),
            "difficulty": grouped(rows[0], "difficulty"),
            "general": plain(summarise([row["metrics"] for row in rows[1]])) if rows[1:] else {},
            "comparison": before.against(rows) if before else {},
            "left_out": suites[0].left_out,
            "broken": dict(Counter(r["error"] for r in rows[0] if r["stop"] == broken)),
            "seconds": round(time.monotonic() - began, 3),
        }
        if self.output:
            records.write_json(self.output / "results.json", self.results)
            write_report(self.output)
        return found

    def suite(self, split: str) -> Suite:
        if isinstance(self.loader, Suite):
            return self.loader
        if isinstance(self.loader, str):
            name = self.loader if ":" in self.loader else f"{self.loader}:{split}"
            user = find_subject(self.options.user) if self.options.user else None
            return load_benchmark(name, user.open((), lambda _, m: m) if user else None)
        return agent_suite(f"{AGENT}:{split}", list(self.loader.iter_samples(split)))

    def config(self, subject: Subject, suites: Sequence[Suite]) -> EvaluationConfig:
        shared = set(EvaluationConfig.model_fields) & set(EvaluateOptions.model_fields)
        return EvaluationConfig(
            benchmark=suites[0].name,
            data={suite.name: suite.digest() for suite in suites},
            model=subject.name,
            weights=subject.digest,
            code=code_digest(),
            **self.options.model_dump(include=shared),
        )

    def answers(
        self, subject: Subject, suites: Sequence[Suite], config: EvaluationConfig
    ) -> list[list[Json]]:
        """The records of each suite's tasks."""
        options, tasks = self.options, [task for suite in suites for task in suite.tasks]
        changed = Perturbation(suites[0].tasks, options.perturb, options.seed)
        policy = cache(lambda: Perturbed(subject.open(tasks, changed.outward), changed))
        items, found = Items(self.output, config), []
        for suite in suites:
            tokens = options.max_tokens or suite.max_tokens
            sampling = Sampling(tokens, options.temperature, seed=options.seed)
            limit = options.limit if suite is suites[0] else 0
            chosen = suite.tasks[: limit or None]
            found.append(collect(items, suite, chosen, policy, sampling))
        if not options.limit:
            items.keep()
        return found


def plain(figures: Mapping[str, Figure | Difference]) -> Json:
    return {name: asdict(value) for name, value in figures.items()}


def grouped(rows: Sequence[Json], key: str) -> Json:
    """Figures by part, category or difficulty, where there is more than one."""
    names = sorted({row[key] for row in rows})
    of = {name: [row["metrics"] for row in rows if row[key] == name] for name in names}
    return {name: plain(summarise(of[name])) for name in names} if len(names) > 1 else {}


class Before:
    """Another evaluation of the same items, to compare with."""

    def __init__(self, folder: str | Path, config: EvaluationConfig):
        self.folder = Path(folder)
        if not (self.folder / "items.jsonl").is_file():
            raise SharpenError(f"{folder}: holds no evaluation (items.jsonl)")
        data = read_yaml(self.folder / "config.yaml")["data"]
        theirs = {digest: name for name, digest in data.items()}
        same = {theirs[d]: name for name, d in config.data.items() if d in theirs}
        if config.benchmark not in same.values():
            raise SharpenError(f"{folder}: is of other items than {config.benchmark}'s")
        found = [row.value for row in records.read_jsonl(self.folder / "items.jsonl")]
        self.rows = {(same.get(row["suite"]), row["id"]): row["metrics"] for row in found}

    def against(self, suites: Sequence[Sequence[Json]]) -> Json:
        """Differences of every metric, and whether the general items became worse."""
        main, general = [*map(self.differences, suites), {}][:2]
        if not main:
            raise SharpenError(f"{self.folder}: none of these items was answered there")
        loss = general.get("accuracy")
        return {
            "with": str(self.folder),
            "metrics": plain(main),
            "general": plain(general),
            "general_loss": loss is not None and loss.difference < 0,
        }

    def differences(self, rows: Sequence[Json]) -> dict[str, Difference]:
        pairs = [(self.rows.get((row["suite"], row["id"]), {}), row["metrics"]) for row in rows]
        found = {}
        for name in METRICS:
            both = [(old[name], new[name]) for old, new in pairs if name in old and name in new]
            if both and isinstance(both[0][0], (int, float)):
                found[name] = paired([old for old, _ in both], [new for _, new in both])
        return found
