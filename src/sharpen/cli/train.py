"""`sharpen train`: one command per training method, each with the flags of its own settings."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with
from sharpen.train.methods import METHODS
from sharpen.types import Json, SharpenError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train a model.")


@dataclass(frozen=True, slots=True)
class _Flag:
    """A command-line flag that sets one setting, and the methods that have it."""

    name: str
    setting: str
    type: type
    help: str
    methods: tuple[str, ...]


_ALL = tuple(METHODS)
_ONLINE = ("grpo", "ppo")  # these sample every step's rows
_FROM_SFT = ("dpo", *_ONLINE)  # these continue from a fine-tuned model
_FLAGS = (
    _Flag("base_model", "base_model", str, "Model to train.", _ALL),
    _Flag("sft_model", "base_model", str, "Model or run to continue from.", _FROM_SFT),
    _Flag("data", "train_data", str, "Built set, such as agent_sft:train, or JSONL file.", _ALL),
    _Flag("dev_data", "dev_data", str, "Built set or JSONL file to evaluate on.", _ALL),
    _Flag("epochs", "num_epochs", int, "Number of passes over the data.", _ALL),
    _Flag("max_steps", "max_steps", int, "Number of steps to run.", _ALL),
    _Flag("save_steps", "save_steps", int, "Steps between checkpoints.", _ALL),
    _Flag("seed", "seed", int, "Seed of the row order, dropout and new weights.", _ALL),
    _Flag("task_weights", "task_weights", str, "JSON: task type → share.", ("sft",)),
    _Flag("beta", "beta", float, "How strongly to hold to the reference.", ("dpo", "grpo")),
    _Flag("num_samples", "num_samples", int, "Answers sampled per task.", ("dpo",)),
    _Flag("group_size", "group_size", int, "Samples per task.", ("grpo",)),
    _Flag("reward", "reward", str, "Reward: a name, or file.py:name.", _FROM_SFT),
)

_Overrides = Annotated[Pairs, Argument(help="Any setting as key=value, such as lora_r=16.")]
_ConfigFile = Annotated[str | None, Option(help="Settings: a YAML file, or a preset's name.")]
_Output = Annotated[Path | None, Option(help="Run folder; by default runs/METHOD.")]
_ShowSettings = Annotated[bool, Option("--settings", help="Print all settings and exit.")]
_Force = Annotated[
    bool, Option("--force", help="Start even if tool accuracy on dev data is too low.")
]


@app.callback()
def _silence_other_processes() -> None:
    """Let only the first of several processes print."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _make_command(method: str) -> Callable[..., None]:
    """Returns the function of a method's command, whose parameters are the method's flags."""

    def command(
        overrides: list[str] | None,
        config: str | None,
        output: Path | None,
        show_settings: bool,
        as_json: bool,
        force: bool = False,
        **flags: Any,
    ) -> None:
        if show_settings:
            _print_settings(method, as_json)
            return
        values = load_settings(config, overrides or [], method) | _settings_of_flags(flags)
        if force:
            values["min_dev_score"] = 0.0
            print("gate: not asked, by --force")
        _train(method, values, output or Path("runs") / method, as_json)

    # typer reads a command's flags from its signature
    command.__signature__ = inspect.Signature(_parameters(method))  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in _parameters(method)}
    return command


def _parameters(method: str) -> list[inspect.Parameter]:
    """Returns the parameters of a method's command, in the order of its help page."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("overrides", keyword, default=None, annotation=_Overrides),
        inspect.Parameter("config", keyword, default=None, annotation=_ConfigFile),
        inspect.Parameter("output", keyword, default=None, annotation=_Output),
    ]
    for flag in _FLAGS:
        if method in flag.methods:
            annotation = Annotated[flag.type | None, Option(help=flag.help)]
            parameters.append(
                inspect.Parameter(flag.name, keyword, default=None, annotation=annotation)
            )
    if method in _ONLINE:
        parameters.append(inspect.Parameter("force", keyword, default=False, annotation=_Force))
    parameters += [
        inspect.Parameter("show_settings", keyword, default=False, annotation=_ShowSettings),
        inspect.Parameter("as_json", keyword, default=False, annotation=AsJson),
    ]
    return parameters


def _settings_of_flags(flags: dict[str, Any]) -> Json:
    """Returns the settings that the given flags set."""
    from sharpen.rows import parse_text

    if flags.get("base_model") and flags.get("sft_model"):
        raise SharpenError("--base-model and --sft-model: two names of one thing, give one")
    settings: Json = {}
    for flag in _FLAGS:
        value = flags.get(flag.name)
        if value is None:
            continue
        if flag.name == "task_weights":
            value = parse_text(value, "", "--task-weights")
        settings[flag.setting] = value
    return settings


def load_settings(config: str | None, overrides: list[str], method: str = "sft") -> Json:
    """Read the settings of a file or a preset, without those that only `sharpen estimate` uses."""
    from sharpen.config import load_yaml
    from sharpen.models.estimate import ESTIMATE_ONLY
    from sharpen.pipeline import recipe_path

    values = load_yaml(recipe_path(config) if config else None, overrides)
    cards = values.get("cards", 1)
    if cards > int(os.environ.get("WORLD_SIZE", "1")):
        launch = f"torchrun --nproc_per_node {cards} -m sharpen.cli.main train {method}"
        raise SharpenError(f"{config}: is made for {cards} cards; {launch} --config {config} …")
    return {name: value for name, value in values.items() if name not in ESTIMATE_ONLY}


def _train(method: str, values: Json, output: Path, as_json: bool) -> None:
    """Check the settings, train, and print where the result is."""
    from sharpen.config import parse_config

    config = parse_config(METHODS[method].load_config_class(), values, f"train {method}")
    trainer = METHODS[method].load_trainer_class()(config, output)
    figures = trainer.train()
    print(f"done: {output / 'final'}")
    end_with({"path": str(output / "final"), **figures}, as_json)


def _print_settings(method: str, as_json: bool) -> None:
    """Print the table of all settings of a method, or the same as JSON."""
    from sharpen.cli.settings_page import print_settings, settings_as_json

    if as_json:
        end_with(settings_as_json(method), as_json)
    else:
        print_settings(method)


def _add_commands() -> None:
    """Add one command per training method."""
    for name, method in METHODS.items():
        example = f"sharpen train {name} --base-model smollm2-135m --data rows.jsonl"
        about = f"{method.about} The same command continues a run that was stopped."
        help_text = f"{about}\n\nExample: {example} --output runs/{name}"
        app.command(name, help=help_text)(_make_command(name))


_add_commands()
