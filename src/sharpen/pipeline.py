"""Recipes: typed stages that run in order, each skipped when its output is already complete.

A run folder holds one folder a stage. A stage is complete when its `done.json` names its config,
the stages before it and the hash of every file it wrote, and all of them still agree. Killed
anywhere, `sharpen run` goes on from there.
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
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.types import Json, Sampling, SharpenError

DONE = "done.json"
Say = Callable[[str], None]


class StageConfig(Config):
    name: str = ""  # the stage's folder; its kind when not given


class PullStage(StageConfig):
    """Make sure that the model is here and whole."""

    stage: Literal["pull"]
    model: str


class StarterStage(StageConfig):
    """Write the starter set: `train.jsonl`, `test.jsonl`, and both as tasks: `….tasks.jsonl`."""

    stage: Literal["starter"]
    train: int = Field(320, ge=1)
    test: int = Field(64, ge=1)


class RenderStage(StageConfig):
    """Render a data file and report its tokens; a row over `max_length` is an error."""

    stage: Literal["render"]
    model: str
    data: str
    max_length: int = Field(4096, ge=1)
    template: str = "auto"


class EvaluateStage(StageConfig):
    """Let the model do tasks and measure it: by its calls in one answer, or by any `reward` (a
    name, `file.py:function`, or a block) in any `env` (`toolworld` or `file.py:Class`)."""

    stage: Literal["evaluate"]
    model: str
    tasks: str
    max_tokens: int = Field(128, ge=1)
    batch_size: int = Field(32, ge=1)
    template: str = "auto"
    reward: str | RewardConfig = ""
    env: str = ""
    max_turns: int = Field(8, ge=1)


class SftStage(StageConfig):
    """Fine-tune on a data file; `final/` below the stage's folder is the result."""

    stage: Literal["sft"]
    model: str
    data: str
    settings: AgentSFTConfig = AgentSFTConfig()


class OptimiseStage(StageConfig):
    """Optimise on preferences or tasks; `settings` are those of `sharpen train`'s verb."""

    stage: Literal["dpo", "grpo", "ppo"]
    model: str
    data: str
    dev: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def settings_fit(self) -> OptimiseStage:
        self.config(base_model=self.model, train_data=self.data)
        return self

    def config(self, **given: Any) -> Any:
        kind = {"dpo": DPOConfig, "grpo": GRPOConfig, "ppo": PPOConfig}[self.stage]
        return parse_config(kind, self.settings | given, f"stage {stage_name(self)}")


Stage = PullStage | StarterStage | RenderStage | SftStage | OptimiseStage | EvaluateStage


class Recipe(Config):
    name: str
    about: str = ""
    seed: int = 0
    model: str = "smollm2-135m"
    stages: list[Annotated[Stage, Field(discriminator="stage")]] = Field(min_length=1)

    @model_validator(mode="after")
    def names_differ(self) -> Recipe:
        names = sorted(stage_name(stage) for stage in self.stages)
        if repeated := [name for name, after in pairwise(names) if name == after]:
            raise ValueError(f"two stages are called {repeated[0]!r}; give one a name")
        return self


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage may use."""

    run: Path  # the run folder; other stages' outputs lie below it
    folder: Path  # the stage's own
    seed: int
    say: Say

    def path(self, name: str) -> Path:
        """A file that a stage reads: of an earlier one (`starter/train.jsonl`), or anywhere."""
        found = Path(self.source(name))
        if not found.exists():
            raise SharpenError(f"{name}: neither in {self.run} nor a file of its own")
        return found

    def source(self, name: str) -> str:
        """What a stage reads that may also be a source's name, such as agent_benchmark:dev."""
        inside = self.run / name
        return str(inside) if inside.exists() else name


def stage_name(stage: Any) -> str:
    return stage.name or stage.stage


def load_recipe(name: str, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """A recipe file, or a shipped recipe by name, with `key=value` overrides."""
    values = load_yaml(recipe_path(name), overrides)
    if isinstance(values, dict) and "base_model" in values and "stages" not in values:
        raise ConfigError(f"{name}: a preset of training settings, without stages to run")
    return parse_config(Recipe, values, name)


def recipe_path(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    shipped = Path(str(resources.files("sharpen") / "recipes" / f"{name}.yaml"))
    if not shipped.is_file():
        known = ", ".join(sorted(p.stem for p in shipped.parent.glob("*.yaml")))
        raise ConfigError(f"{name}: no such file, and no shipped recipe of that name ({known})")
    return shipped


def run_recipe(recipe: Recipe, out: str | Path, say: Say = print) -> dict[str, Json]:
    """Run every stage that is not complete. Returns each stage's results by name."""
    run = records.RunFolder(out, recipe)
    results: dict[str, Json] = {}
    before: list[str] = []
    for number, stage in enumerate(recipe.stages, 1):
        name = stage_name(stage)
        title = f"[{number}/{len(recipe.stages)}] {name}"
        folder = run.path / name
        wanted = {"stage": stage.hash(), "seed": recipe.seed, "before": list(before)}
        found = completed(folder, wanted)
        if found is None:
            say(f"{title} …")
            folder.mkdir(exist_ok=True)
            started = time.monotonic()
            result = STAGES[stage.stage](stage, Context(run.path, folder, recipe.seed, say))
            found = wanted | {"files": hashes(folder), "result": result}
            records.write_json(folder / DONE, found)
            say(f"{title}: done in {time.monotonic() - started:.0f} s")
        else:
            say(f"{title}: already complete")
        results[name] = found["result"]
        before.append(records.sha256_file(folder / DONE))
    records.write_json(run.path / "results.json", results)
    return results


def completed(folder: Path, wanted: Json) -> Json | None:
    """The stage's record if it ran with this config on these inputs and its files are whole."""
    if not (folder / DONE).is_file():
        return None
    found = records.read_json(folder / DONE)
    same = all(found.get(key) == value for key, value in wanted.items())
    return found if same and found["files"] == hashes(folder) else None


def hashes(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in records.sha256_folder(folder).items() if name != DONE}


# Stages ----------------------------------------------------------------------------------------


def run_pull(stage: PullStage, context: Context) -> Json:
    from sharpen.models.find import find_model

    folder = find_model(stage.model)
    context.say(f"  model: {stage.model} in {folder}")
    weights = {p.name: records.sha256_file(p) for p in sorted(folder.glob("*.safetensors"))}
    return {"model": stage.model, "weights": weights}


def run_starter(stage: StarterStage, context: Context) -> Json:
    from sharpen.data.generate.starter import starter_dialogs, starter_task

    for split, count in (("train", stage.train), ("test", stage.test)):
        dialogs = starter_dialogs(split, count, context.seed)  # type: ignore[arg-type]
        if (found := len(dialogs)) < count:
            raise SharpenError(f"starter: only {found} different {split} rows exist, not {count}")
        records.write_jsonl(context.folder / f"{split}.jsonl", map(dialog_to_row, dialogs))
        tasks = map(task_to_row, map(starter_task, dialogs))
        records.write_jsonl(context.folder / f"{split}.tasks.jsonl", tasks)
    context.say(f"  {stage.train} train and {stage.test} test dialogs")
    return {"train": stage.train, "test": stage.test}


def run_render(stage: RenderStage, context: Context) -> Json:
    from sharpen.models.load import load_tokenizer
    from sharpen.render import Renderer

    renderer = Renderer(load_tokenizer(stage.model), stage.template)
    rows = records.read_jsonl(context.path(stage.data))
    dialogs = [dialog_from_row(row.value, row.where) for row in rows]
    lengths, trained = [], 0
    for datum in renderer.render(dialogs):
        lengths.append(len(datum.ids))
        trained += int(datum.mask.sum())
        if lengths[-1] > stage.max_length:
            found = f"row {datum.id or len(lengths)} has {lengths[-1]} tokens"
            raise SharpenError(f"{stage.data}: {found}, over max_length {stage.max_length}")
    if not lengths:
        raise SharpenError(f"{stage.data}: no rows")
    count, total, longest = len(lengths), sum(lengths), max(lengths)
    share = f"{trained / total:.0%} carry loss"
    context.say(f"  {count} rows, {total} tokens (longest {longest}), {share}")
    return {"rows": count, "tokens": total, "longest": longest, "trained_tokens": trained}


def run_sft(stage: SftStage, context: Context) -> Json:
    from sharpen.train.sft import AgentSFTTrainer

    data = str(context.path(stage.data))
    given = {"base_model": stage.model, "train_data": data, "seed": context.seed}
    return figures_of(AgentSFTTrainer(stage.settings.model_copy(update=given), context.folder))


def run_optimise(stage: OptimiseStage, context: Context) -> Json:
    import sharpen

    given = {"base_model": context.source(stage.model), "seed": context.seed}
    given["train_data"] = context.source(stage.data)
    if stage.dev:
        given["dev_data"] = context.source(stage.dev)
    trainer = getattr(sharpen, f"{stage.stage.upper()}Trainer")
    return figures_of(trainer(stage.config(**given), context.folder))


def figures_of(trainer: Any) -> Json:
    return {key: value for key, value in trainer.train().items() if value is not None}


def run_evaluate(stage: EvaluateStage, context: Context) -> Json:
    from dataclasses import asdict

    from sharpen.data.sources import read_tasks
    from sharpen.evals.evaluator import evaluate
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy
    from sharpen.rewards.calls import CallReward
    from sharpen.rewards.compose import build_reward
    from sharpen.rollout import find_environment

    tasks = list(read_tasks(context.source(stage.tasks)))
    model = ModelConfig(base_model=context.source(stage.model))
    policy = LocalPolicy.load(model, stage.template, stage.batch_size)
    sampling = Sampling(max_tokens=stage.max_tokens)
    reward = build_reward(stage.reward) if stage.reward else CallReward()
    title, make = f"  {stage_name(stage)}", find_environment(stage.env)
    outcome = evaluate(policy, tasks, reward, sampling, title, make, stage.max_turns)
    records.write_jsonl(context.folder / "records.jsonl", outcome.records)
    for metric in outcome.figures:
        if metric not in ("tokens", "value") or stage.reward:
            context.say(f"  {metric}: {outcome.figures[metric]}")
    return {metric: asdict(value) for metric, value in outcome.figures.items()}


STAGES: dict[str, Callable[[Any, Context], Json]] = {"pull": run_pull, "starter": run_starter}
STAGES |= {"render": run_render, "sft": run_sft, "evaluate": run_evaluate}
STAGES |= dict.fromkeys(("dpo", "grpo", "ppo"), run_optimise)
