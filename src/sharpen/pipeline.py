"""Recipes: typed stages that run in order, each skipped when its output is already complete.

`sharpen run` calls `load_recipe` and `run_recipe`. A run folder holds one folder per stage. A stage
is complete when its `done.json` names its config, the stages before it and the hash of every file
it wrote, and all of them still agree. After a kill at any point, `sharpen run` continues from
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sharpen import records
from sharpen.config import Config, ConfigError, load_yaml, parse_config
from sharpen.rewards.compose import RewardConfig
from sharpen.rows import dialog_from_row, dialog_to_row, task_to_row
from sharpen.train.config.run import RunConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.methods import METHODS
from sharpen.types import Json, SharpenError

_DONE_FILE = "done.json"
Say = Callable[[str], None]


# The stages' configs ---------------------------------------------------------------------------


class _StageConfig(Config):
    """What all stages have."""

    name: str = ""  # of the stage's folder; by default its kind


class _PullStage(_StageConfig):
    """Make sure that the model is here and complete."""

    stage: Literal["pull"]
    model: str


class StarterStage(_StageConfig):
    """Write the starter set: `train.jsonl`, `test.jsonl`, and both as tasks: `….tasks.jsonl`."""

    stage: Literal["starter"]
    train: int = Field(320, ge=1)
    test: int = Field(64, ge=1)


class _RenderStage(_StageConfig):
    """Render a data file and report its tokens; a row over `max_length` is an error."""

    stage: Literal["render"]
    model: str
    data: str
    max_length: int = Field(4096, ge=1)
    template: str = "auto"


class EvaluateStage(_StageConfig):
    """Let the model do tasks and measure it: each task by its kind, or by any `reward` (a name,
    `file.py:function`, or a block) in any `env` (`toolworld` or `file.py:Class`)."""

    stage: Literal["evaluate"]
    model: str
    tasks: str
    max_tokens: int = Field(128, ge=1)
    batch_size: int = Field(32, ge=1)
    template: str = "auto"
    reward: str | RewardConfig = ""
    env: str = ""
    max_turns: int = Field(0, ge=0)  # 0: each task's own limit, by its kind


class _SftStage(_StageConfig):
    """Fine-tune on a data file; the result is `final/` in the stage's folder."""

    stage: Literal["sft"]
    model: str
    data: str
    settings: AgentSFTConfig = AgentSFTConfig()


class _OptimiseStage(_StageConfig):
    """Optimise on preferences or tasks; `settings` are those of `sharpen train dpo|grpo|ppo`."""

    stage: Literal["dpo", "grpo", "ppo"]
    model: str
    data: str
    dev: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_settings(self) -> _OptimiseStage:
        """Refuse wrong settings when the recipe is read, not when the stage starts."""
        self.training_config(base_model=self.model, train_data=self.data)
        return self

    def training_config(self, **overrides: Any) -> RunConfig:
        """Returns the settings of the training, with `overrides` in place of the recipe's own."""
        config_class = METHODS[self.stage].load_config_class()
        return parse_config(config_class, self.settings | overrides, f"stage {stage_name(self)}")


_Stage = _PullStage | StarterStage | _RenderStage | _SftStage | _OptimiseStage | EvaluateStage


class Recipe(Config):
    """A named list of stages."""

    name: str
    about: str = ""
    seed: int = 0
    model: str = "smollm2-135m"
    stages: list[Annotated[_Stage, Field(discriminator="stage")]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> Recipe:
        """Refuse two stages of one name: they would share a folder."""
        names = sorted(stage_name(stage) for stage in self.stages)
        for name, next_name in pairwise(names):
            if name == next_name:
                raise ValueError(f"two stages are called {name!r}; give one a name")
        return self


def stage_name(stage: _Stage) -> str:
    """Returns the name of a stage's folder."""
    return stage.name or stage.stage


# Running a recipe ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Context:
    """What a stage may use."""

    run: Path  # the run folder, which holds the outputs of all stages
    folder: Path  # of this stage
    seed: int
    say: Say

    def path(self, name: str) -> Path:
        """Returns a file to read: of an earlier stage (`starter/train.jsonl`), or of the user."""
        path = Path(self.source(name))
        if not path.exists():
            raise SharpenError(f"{name}: neither in {self.run} nor a file of its own")
        return path

    def source(self, name: str) -> str:
        """Returns what to read where it may also be a built set's name: agent_benchmark:dev."""
        inside = self.run / name
        return str(inside) if inside.exists() else name


def load_recipe(name: str, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by name, with `key=value` overrides."""
    values = load_yaml(recipe_path(name), overrides)
    if isinstance(values, dict) and "base_model" in values and "stages" not in values:
        raise ConfigError(f"{name}: a preset of training settings, without stages to run")
    return parse_config(Recipe, values, name)


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe or preset: a path, or the name of a shipped one."""
    if Path(name).is_file():
        return Path(name)
    shipped = Path(str(resources.files("sharpen") / "recipes" / f"{name}.yaml"))
    if not shipped.is_file():
        known = ", ".join(sorted(path.stem for path in shipped.parent.glob("*.yaml")))
        raise ConfigError(f"{name}: no such file, and no shipped recipe of that name ({known})")
    return shipped


def run_recipe(recipe: Recipe, out: str | Path, say: Say = print) -> dict[str, Json]:
    """Run every stage that is not complete. Returns each stage's results by name."""
    run = records.RunFolder(out, recipe)
    results: dict[str, Json] = {}
    hashes_before: list[str] = []  # of the done files of the stages so far
    for number, stage in enumerate(recipe.stages, 1):
        name = stage_name(stage)
        title = f"[{number}/{len(recipe.stages)}] {name}"
        folder = run.path / name
        key = {"stage": stage.hash(), "seed": recipe.seed, "before": list(hashes_before)}
        done = _read_done(folder, key)
        if done is None:
            say(f"{title} …")
            folder.mkdir(exist_ok=True)
            started = time.monotonic()
            context = _Context(run.path, folder, recipe.seed, say)
            result = _STAGES[stage.stage](stage, context)
            done = key | {"files": _file_hashes(folder), "result": result}
            records.write_json(folder / _DONE_FILE, done)
            say(f"{title}: done in {time.monotonic() - started:.0f} s")
        else:
            say(f"{title}: already complete")
        results[name] = done["result"]
        hashes_before.append(records.sha256_file(folder / _DONE_FILE))
    records.write_json(run.path / "results.json", results)
    return results


def _read_done(folder: Path, key: Json) -> Json | None:
    """Returns a stage's record if it ran with this config and inputs and its files are intact."""
    if not (folder / _DONE_FILE).is_file():
        return None
    done = records.read_json(folder / _DONE_FILE)
    if any(done.get(name) != value for name, value in key.items()):
        return None
    return done if done["files"] == _file_hashes(folder) else None


def _file_hashes(folder: Path) -> dict[str, str]:
    """Returns the hash of every file that a stage wrote."""
    hashes = records.sha256_folder(folder)
    hashes.pop(_DONE_FILE, None)
    return hashes


# The stages ------------------------------------------------------------------------------------


def _run_pull(stage: _PullStage, context: _Context) -> Json:
    """Fetch the model; returns the hashes of its weights."""
    from sharpen.models.find import find_model

    folder = find_model(stage.model)
    context.say(f"  model: {stage.model} in {folder}")
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights[path.name] = records.sha256_file(path)
    return {"model": stage.model, "weights": weights}


def _run_starter(stage: StarterStage, context: _Context) -> Json:
    """Write the starter set; returns the number of rows."""
    from sharpen.data.generate.starter import starter_dialogs, starter_task

    for split, count in (("train", stage.train), ("test", stage.test)):
        dialogs = starter_dialogs(split, count, context.seed)  # type: ignore[arg-type]
        if len(dialogs) < count:
            raise SharpenError(
                f"starter: only {len(dialogs)} different {split} rows exist, not {count}"
            )
        records.write_jsonl(context.folder / f"{split}.jsonl", map(dialog_to_row, dialogs))
        tasks = [starter_task(dialog) for dialog in dialogs]
        records.write_jsonl(context.folder / f"{split}.tasks.jsonl", map(task_to_row, tasks))
    context.say(f"  {stage.train} train and {stage.test} test dialogs")
    return {"train": stage.train, "test": stage.test}


def _run_render(stage: _RenderStage, context: _Context) -> Json:
    """Render every row; returns numbers of rows and tokens."""
    from sharpen.models.load import load_tokenizer
    from sharpen.render import Renderer

    renderer = Renderer(load_tokenizer(stage.model), stage.template)
    rows = records.read_jsonl(context.path(stage.data))
    dialogs = [dialog_from_row(row.value, row.where) for row in rows]
    lengths = []
    trained_tokens = 0
    for datum in renderer.render(dialogs):
        length = len(datum.ids)
        lengths.append(length)
        trained_tokens += int(datum.mask.sum())
        if length > stage.max_length:
            row_name = datum.id or len(lengths)
            raise SharpenError(
                f"{stage.data}: row {row_name} has {length} tokens, over max_length "
                f"{stage.max_length}"
            )
    if not lengths:
        raise SharpenError(f"{stage.data}: no rows")
    tokens = sum(lengths)
    share = f"{trained_tokens / tokens:.0%} carry loss"
    context.say(f"  {len(lengths)} rows, {tokens} tokens (longest {max(lengths)}), {share}")
    return {
        "rows": len(lengths),
        "tokens": tokens,
        "longest": max(lengths),
        "trained_tokens": trained_tokens,
    }


def _run_sft(stage: _SftStage, context: _Context) -> Json:
    """Fine-tune; returns the last figures."""
    inputs = {
        "base_model": stage.model,
        "train_data": str(context.path(stage.data)),
        "seed": context.seed,
    }
    config = stage.settings.model_copy(update=inputs)
    return _train("sft", config, context)


def _run_optimise(stage: _OptimiseStage, context: _Context) -> Json:
    """Run DPO, GRPO or PPO; returns the last figures."""
    inputs = {
        "base_model": context.source(stage.model),
        "train_data": context.source(stage.data),
        "seed": context.seed,
    }
    if stage.dev:
        inputs["dev_data"] = context.source(stage.dev)
    return _train(stage.stage, stage.training_config(**inputs), context)


def _train(method: str, config: RunConfig, context: _Context) -> Json:
    """Train in the stage's folder; returns the figures that were measured."""
    trainer = METHODS[method].load_trainer_class()(config, context.folder)
    figures = trainer.train()
    return {name: value for name, value in figures.items() if value is not None}


def _run_evaluate(stage: EvaluateStage, context: _Context) -> Json:
    """Play and score the tasks, each by its kind unless the stage says otherwise."""
    from dataclasses import replace

    from sharpen.data.sources import read_tasks
    from sharpen.evals.benchmarks import tasks_suite
    from sharpen.evals.evaluator import AgentTrainingEvaluator, EvaluateOptions
    from sharpen.evals.intervals import Figure
    from sharpen.kinds import environment_by_name
    from sharpen.models.load import ModelConfig
    from sharpen.policy.find import find_policy
    from sharpen.policy.local import LocalPolicy
    from sharpen.rewards.compose import build_reward

    suite = tasks_suite(stage.tasks, list(read_tasks(context.source(stage.tasks))))
    environment = environment_by_name(stage.env)
    suite = replace(suite, make_environment=environment, max_turns=stage.max_turns)
    if stage.reward:
        suite = replace(suite, reward=build_reward(stage.reward), metrics=("reward", "accuracy"))
    model = ModelConfig(base_model=context.source(stage.model))

    def load_policy() -> LocalPolicy:
        return LocalPolicy.load(model, stage.template, stage.batch_size)

    source = find_policy(model.base_model)
    source = replace(source, open=load_policy, template=stage.template)
    options = EvaluateOptions(general=False, max_tokens=stage.max_tokens)
    if (context.folder / "results.json").is_file():
        # finished, and yet the stage is not complete: of other weights or tasks
        for path in context.folder.iterdir():
            path.unlink()
    evaluator = AgentTrainingEvaluator(suite, context.folder, options=options)
    figures = evaluator.evaluate(source)
    for name, figure in figures.items():
        context.say(f"  {name}: {Figure(**figure)}")
    return figures


_STAGES: dict[str, Callable[[Any, _Context], Json]] = {
    "pull": _run_pull,
    "starter": _run_starter,
    "render": _run_render,
    "sft": _run_sft,
    "dpo": _run_optimise,
    "grpo": _run_optimise,
    "ppo": _run_optimise,
    "evaluate": _run_evaluate,
}
