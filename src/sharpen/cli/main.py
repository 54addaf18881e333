"""Entry point: finds the verb, runs it, and turns wrong input into one line and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sharpen.types import SharpenError

# verb → (where its typer app or function is, its line in `sharpen --help`)
VERBS = {
    "run": ("sharpen.cli.run:run", "Run a recipe: typed stages in order, finished ones skipped."),
    "train": ("sharpen.cli.train:app", "Train a model: sft, reward, dpo, grpo, ppo."),
    "evaluate": ("sharpen.cli.evaluate:evaluate", "Measure a model on a benchmark."),
    "compare": ("sharpen.cli.compare:compare", "Train methods under one budget, side by side."),
    "report": ("sharpen.cli.report:report", "Write the page of a run or an evaluation."),
    "data": ("sharpen.cli.data:app", "Check, preview and measure dialogs."),
    "models": ("sharpen.cli.models:app", "Pull and list models."),
    "estimate": ("sharpen.cli.estimate:estimate", "Parameters, memory and time of a recipe."),
    "merge": ("sharpen.cli.merge:app", "Merge models, adapters and task vectors."),
    "reward": ("sharpen.cli.reward:app", "Try rewards on rows, with their breakdown."),
    "doctor": ("sharpen.cli.doctor:doctor", "What this machine has, and how to get the rest."),
}

# typer brings its own copy of click since 0.26; its exceptions are found through a public one
_ClickException: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class _LazyGroup(TyperGroup):
    """A command group whose verbs are imported on first use, so that `--help` stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the verbs in the order of the help page."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a stand-in for the help page: the verb's name and line alone."""
        return TyperCommand(cmd_name, help=VERBS[cmd_name][1]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the verb that is called."""
        if args and args[0] in VERBS:
            return args[0], load_verb(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def load_verb(name: str) -> Any:
    """Import a verb's file and return its command."""
    module, attribute = VERBS[name][0].split(":")
    verb_app = getattr(importlib.import_module(module), attribute)
    if not isinstance(verb_app, typer.Typer):  # a plain function
        function = verb_app
        verb_app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        verb_app.command(name=name)(function)
    command = get_command(verb_app)
    command.name = name
    return command


app = typer.Typer(
    cls=_LazyGroup,
    name="sharpen",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Turn a set of tools and a pile of dialogs into a trained, tested, served model.",
    epilog="Example: sharpen run quickstart --out runs/quickstart",
)


@app.callback()
def _no_options() -> None:
    """Make this a group: its verbs are found by `_LazyGroup`, not registered."""


def main() -> None:
    """Run the command line; of several processes, also leave without waiting for their threads."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _run()
        return
    code: Any = 0
    try:
        _run()
    except SystemExit as stop:
        code = stop.code
    sys.stdout.flush()
    sys.stderr.flush()
    # threads that talk to other processes may abort an interpreter that shuts down
    os._exit(code or 0)


def _run() -> None:
    """Run the verb of `sys.argv` and turn what goes wrong into a message and an exit code."""
    try:
        code = get_command(app).main(args=sys.argv[1:], prog_name="sharpen", standalone_mode=False)
        if isinstance(code, int):  # a verb's typer.Exit(code) comes back as a value
            sys.exit(code)
    except SharpenError as error:
        _fail(str(error), getattr(error, "exit_code", 2))
    except _ClickException as error:
        _fail(error.format_message())
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(text: str, code: int = 2) -> None:
    """Print an error as one line and exit."""
    if text:  # empty when typer has already shown the help page
        print("error: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
