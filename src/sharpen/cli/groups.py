"""Command groups that the verbs share."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultGroup(TyperGroup):
    """A verb with sub-verbs whose own name also works alone: `sharpen merge CONFIG OUT` is `merge
    run CONFIG OUT`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)
