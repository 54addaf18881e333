"""Evaluate a model: tasks → answers → scores by the same rewards that train → figures with
intervals, and the same against another evaluation, item by item.

Recipes, the command line, `compare`, merging and training callbacks all evaluate through
`AgentTrainingEvaluator`; each evaluation with a folder writes `results.json` and a report.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from sharpen import records
from sharpen.config import Config, parse_config, read_yaml
from sharpen.envs.perturb import Perturbation
from sharpen.evals.baselines import find_player
from sharpen.evals.benchmarks import AGENT, GENERAL, load_benchmark, tasks_suite
from sharpen.evals.intervals import Difference, Figure, paired
from sharpen.evals.items import (
    EvaluationConfig,
    ItemStore,
    Suite,
    code_digest,
    collect_items,
    suite_settings,
)
from sharpen.evals.own_code import own_code_digest
from sharpen.evals.summary import figures_by, plain_figures, summarize, task_values
from sharpen.kinds import KindReward
from sharpen.policy.find import PolicySource, find_policy
from sharpen.report.runs import write_report
from sharpen.rewards.metrics import AGENT_METRICS, METRICS, find_metrics
from sharpen.types import Json, Sampling, SharpenError, StopReason, Task


class EvaluateOptions(Config):
    """How an evaluation is run."""

    limit: int = Field(0, ge=0, description="Number of items of the benchmark; 0 is all.")
    perturb: tuple[str, ...] = Field((), description="Changes of the tools that a model is shown.")
    general: bool = Field(True, description="Evaluate the fixed items that need no tool, too.")
    max_tokens: int = Field(
        0, ge=0, description="Longest answer in tokens; 0 leaves it to the benchmark."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    samples: int = Field(
        1, ge=1, description="Samples per task (k): reports avg@k, pass@k and pass^k."
    )
    seed: int = Field(0, description="Seed of sampling and perturbation.")
    api_key_env: str = Field("", description="Environment variable that holds a server's key.")
    user: str = Field("", description="Model that plays the user, where a benchmark has one.")
    own_folder: bool = Field(
        False, description="Give each evaluation a folder of its own below the output."
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluateOptions:
        if self.samples > 1 and not self.temperature:
            raise ValueError("samples: greedy samples are all the same; set a temperature")
        return self


class AgentTrainingEvaluator:
    """`AgentTrainingEvaluator("agent_benchmark").evaluate(model)`.

    The loader gives tasks by `iter_samples(split)`, or is a suite or a benchmark's name. With an
    `output` folder every item is kept there and the same call continues where it stopped;
    `results` holds all figures.
    """

    def __init__(
        self,
        benchmark_loader: Any = AGENT,
        output: str | Path | None = None,
        tokenizer: Any = None,
        options: EvaluateOptions | Json | None = None,
    ):
        if not isinstance(options, EvaluateOptions):
            options = parse_config(EvaluateOptions, options or {}, "evaluate")
        self.loader = benchmark_loader
        self.options = options
        self.tokenizer = tokenizer
        self.output = Path(output) if output else None
        self.results: Json = {}
        self.items: list[list[Json]] = []  # records of the benchmark, and of the general items
        self._root = self.output

    def evaluate(
        self,
        model: Any,
        split: str = "test",
        metrics: Sequence[str] | None = None,
        compare: str | Path | None = None,
    ) -> Json:
        """Returns metric → its mean, std, count and 95% interval."""
        metric_of = find_metrics(metrics or ())
        started = time.monotonic()
        suites = self._suites(split)
        tasks = [task for suite in suites for task in suite.tasks]
        perturbation = self._perturbation(suites[0])
        show_message = perturbation.show_message if perturbation else lambda _, message: message
        player = find_player(model, self.tokenizer, self.options.api_key_env, tasks, show_message)
        config = self._config(player, suites)
        earlier = _EarlierEvaluation(compare, config) if compare else None
        self._choose_folder(player, suites[0], config)
        self.items = self._collect(player, suites, config, perturbation)
        figures = summarize(self.items[0])
        metric_of = self._shown_metrics(metric_of, suites[0], figures)
        shown = plain_figures({name: figures[known] for name, known in metric_of.items()})
        self.results = config.model_dump(mode="json") | {
            "metrics": shown,
            "all": plain_figures(figures),
            "parts": figures_by(self.items[0], "part"),
            "categories": figures_by(self.items[0], "category"),
            "difficulty": figures_by(self.items[0], "difficulty"),
            "general": plain_figures(summarize(self.items[1])) if self.items[1:] else {},
            "comparison": earlier.compare_with(self.items) if earlier else {},
            "left_out": suites[0].left_out,
            "broken": _environment_errors(self.items[0]),
            "seconds": round(time.monotonic() - started, 3),
        }
        if self.output:
            records.write_json(self.output / "results.json", self.results)
            write_report(self.output)
        return shown

    def _suites(self, split: str) -> list[Suite]:
        """The benchmark's suite, followed by the general items."""
        suites = [self._suite(split)]
        if self.options.general and suites[0].name != GENERAL:
            suites.append(load_benchmark(GENERAL))
        return suites

    def _suite(self, split: str) -> Suite:
        if isinstance(self.loader, Suite):
            return self.loader
        if isinstance(self.loader, str):
            has_split = ":" in self.loader or self.loader == GENERAL
            name = self.loader if has_split else f"{self.loader}:{split}"
            user = find_policy(self.options.user).open() if self.options.user else None
            return load_benchmark(name, user)
        tasks: list[Task] = list(self.loader.iter_samples(split))
        return tasks_suite(f"{AGENT}:{split}", tasks, AGENT_METRICS)

    def _perturbation(self, suite: Suite) -> Perturbation | None:
        if not self.options.perturb:
            return None
        return Perturbation(suite.tasks, self.options.perturb, self.options.seed)

    def _config(self, player: PolicySource, suites: Sequence[Suite]) -> EvaluationConfig:
        shared = set(EvaluationConfig.model_fields) & set(EvaluateOptions.model_fields)
        return EvaluationConfig(
            benchmark=suites[0].name,
            data={suite.name: suite.digest() for suite in suites},
            model=player.name,
            weights=player.digest,
            code=code_digest(),
            own_code=own_code_digest(suites),
            template=player.template,
            reward=_name_of(suites[0].reward),
            env=_name_of(suites[0].make_environment),
            max_turns=suites[0].max_turns,
            **self.options.model_dump(include=shared),
        )

    def _choose_folder(self, player: PolicySource, suite: Suite, config: EvaluationConfig) -> None:
        """Give the evaluation a folder of its own below the output, if that is asked for."""
        if not (self._root and self.options.own_folder):
            return
        name = re.sub(r"[^\w.-]+", "_", f"{Path(player.name).name}-{suite.name}")
        self.output = self._root / f"{name}-{config.hash()[:8]}"

    def _collect(
        self,
        player: PolicySource,
        suites: Sequence[Suite],
        config: EvaluationConfig,
        perturbation: Perturbation | None,
    ) -> list[list[Json]]:
        """The records of each suite's items."""
        options = self.options
        store = ItemStore(self.output, config, player.is_cacheable)
        open_policy = cache(player.open)
        rows = []
        for suite in suites:
            max_tokens = options.max_tokens or suite.max_tokens
            sampling = Sampling(max_tokens, options.temperature, seed=options.seed)
            how = suite_settings(suite, sampling, options.samples, perturbation)
            limit = options.limit if suite is suites[0] else 0
            try:
                rows.append(
                    collect_items(store, suite, suite.tasks[: limit or None], open_policy, how)
                )
            finally:
                if isinstance(suite.reward, KindReward):
                    suite.reward.close()
        if not options.limit:
            store.finish()
        return rows

    def _shown_metrics(
        self, metric_of: dict[str, str], suite: Suite, figures: dict[str, Figure]
    ) -> dict[str, str]:
        """The metrics that were asked for, or the suite's own; each has to say something."""
        for name, known in metric_of.items():
            if known not in figures:
                about = f"{suite.name}: {', '.join(figures)}"
                raise SharpenError(f"metric {name!r} says nothing about {about}")
        if metric_of:
            return metric_of
        names = [name for name in suite.metrics if name in figures]
        names += [name for name in figures if name.startswith(("avg@", "pass@", "pass^"))]
        return {name: name for name in names}


def _name_of(thing: Any) -> str:
    """What tells one reward or environment from another in a config."""
    kind = thing if isinstance(thing, type) else type(thing)
    settings = getattr(thing, "config", "")
    return f"{kind.__module__}.{kind.__qualname__} {settings}".strip()


def _environment_errors(rows: Sequence[Json]) -> dict[str, int]:
    """What environments raised, and how many items that broke."""
    broken = StopReason.ENVIRONMENT_ERROR.value
    return dict(Counter(row["error"] for row in rows if row["stop"] == broken))


class _EarlierEvaluation:
    """Another evaluation of the same items, to compare with."""

    def __init__(self, folder: str | Path, config: EvaluationConfig):
        self.folder = Path(folder)
        if not (self.folder / "items.jsonl").is_file():
            raise SharpenError(f"{folder}: holds no evaluation (items.jsonl)")
        data = read_yaml(self.folder / "config.yaml")["data"]
        names_there = {digest: name for name, digest in data.items()}
        # suite there → suite here
        name_of = {names_there[d]: name for name, d in config.data.items() if d in names_there}
        if config.benchmark not in name_of.values():
            raise SharpenError(f"{folder}: is of other items than {config.benchmark}'s")
        rows = [row.value for row in records.read_jsonl(self.folder / "items.jsonl")]
        self._values = {}
        for (suite, task_id), values in task_values(rows).items():
            self._values[name_of.get(suite), task_id] = values

    def compare_with(self, suites: Sequence[Sequence[Json]]) -> Json:
        """Returns the differences of every metric, and whether the general items became worse."""
        differences = [self._differences(rows) for rows in suites]
        if not differences[0]:
            raise SharpenError(f"{self.folder}: none of these items was answered there")
        general = differences[1] if len(differences) > 1 else {}
        loss = general.get("accuracy")
        return {
            "with": str(self.folder),
            "metrics": plain_figures(differences[0]),
            "general": plain_figures(general),
            "general_loss": loss is not None and loss.difference < 0,
        }

    def _differences(self, rows: Sequence[Json]) -> dict[str, Difference]:
        """Each metric here less the same there, over the tasks that both have."""
        here = task_values(rows)
        differences = {}
        for name in METRICS:
            before = []
            after = []
            for key, values in here.items():
                earlier = self._values.get(key, {})
                if name in values and name in earlier:
                    before.append(earlier[name])
                    after.append(values[name])
            if before:
                differences[name] = paired(before, after)
        return differences
