"""What the verbs share: options, the JSON object on the last line, and a group with a default."""

from __future__ import annotations

import json
from typing import Annotated, Any

from typer import Option
from typer.core import TyperGroup

AsJson = Annotated[bool, Option("--json", help="End with one JSON object.")]
Pairs = list[str] | None  # key=value settings


def end_with(value: dict[str, Any], as_json: bool) -> None:
    """Print the last line of `--json`: one JSON object. Without `--json`, print nothing."""
    if as_json:
        print(json.dumps(value, ensure_ascii=False))


class DefaultGroup(TyperGroup):
    """Commands with a default: `sharpen merge CONFIG OUT` is `sharpen merge run CONFIG OUT`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in front of arguments that do not begin with a command."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)
