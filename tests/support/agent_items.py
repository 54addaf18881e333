"""Stand-ins for models, shared by the tests of evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.types import Dialog, Message, Sampling, Turn


class Says:
    """Answers every dialog with the same message, or with what a function makes of it."""

    def __init__(self, message):
        self.message = message if callable(message) else lambda _: message
        self.asked: list[str] = []

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        self.asked += [dialog.id for dialog in dialogs]
        return [Turn(self.message(dialog)) for dialog in dialogs]


EMPTY = Message("assistant", "")
