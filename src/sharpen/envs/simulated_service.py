"""A customer service with a simulated user (tau-bench, tau2): a policy plays the user.

The tools are those that the tasks' own actions show, with the arguments they have there. What is
looked up by a key is answered from the database beside the tasks; changes are noted, not made,
because the services' code is not here. `ActionsReward` compares the changes with gold's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpen.calls import compact_json
from sharpen.rewards.graphs import READING_TOOL
from sharpen.types import (
    Dialog,
    Json,
    MakeEnvironment,
    Message,
    Policy,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
)

SIMULATED_USER = "the simulated user"  # how an error of the user's policy begins
_GOODBYE = "###STOP###"
_USER_PROMPT = (
    "You are a customer who talks to an assistant. Say one thing at a time, in your own words, and "
    "only what is asked for. When your wish is fulfilled or refused for good, say "
    f"{_GOODBYE}.\n\n"
)
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
_USER_SAMPLING = Sampling(max_tokens=160)


class _SimulatedService:
    """One conversation: the user opens it, the assistant talks and calls tools."""

    def __init__(self, tools: tuple[ToolSpec, ...], tables: Json, user: Policy):
        self.tools = tools
        self.tables = tables
        self.user = user
        self.user_dialog: list[Message] = []  # as the user's policy sees it

    def reset(self, task: Task) -> Dialog:
        self.user_dialog = [Message("system", _USER_PROMPT + task.instruction)]
        opening = self._ask_user("Hello, how can I help you?")
        messages = (*task.context, Message("user", opening))
        return Dialog(messages, self.tools, task.id, task.kind)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        if message.tool_calls or message.unparsed:
            results = [self._answer_call(call) for call in message.tool_calls]
            for _ in message.unparsed:
                results.append(Message("tool", '{"error": "the call could not be read"}'))
            return tuple(results), None
        reply = self._ask_user(message.content)
        if _GOODBYE in reply:
            return (), StopReason.ANSWERED
        return (Message("user", reply),), None

    def _ask_user(self, words: str) -> str:
        """What the user says to the assistant's words."""
        self.user_dialog.append(Message("user", words))
        (turn,) = self.user.respond([Dialog(tuple(self.user_dialog))], _USER_SAMPLING)
        if turn.stop is StopReason.POLICY_ERROR:
            raise SharpenError(f"{SIMULATED_USER}: {turn.error}")
        self.user_dialog.append(Message("assistant", turn.message.content))
        return turn.message.content.strip() or _GOODBYE

    def _answer_call(self, call: ToolCall) -> Message:
        """A looked-up row for a reading tool, a confirmation for a changing one."""
        result: Any
        if call.name not in {tool.name for tool in self.tools}:
            result = {"error": f"there is no tool {call.name}"}
        elif READING_TOOL.match(call.name):
            result = self._look_up(call)
        else:
            result = {"status": "done"}
        return Message("tool", compact_json(result), name=call.name, tool_call_id=call.id)

    def _look_up(self, call: ToolCall) -> Any:
        """The first row of any table that one of the arguments is a key of."""
        keys = [value for value in call.arguments.values() if isinstance(value, str)]
        for rows in self.tables.values():
            for key in keys:
                if key in rows:
                    return rows[key]
        return {"error": "nothing is known of that"}


def make_service(tasks: Sequence[Task], path: Path, user: Policy | None) -> MakeEnvironment:
    """Returns the environment of the tasks of a file, with its tools and tables."""
    if user is None:
        raise SharpenError(f"{path}: needs a policy that plays the user: --user MODEL")
    tools = _tools_of_actions(tasks)
    tables = _read_tables(path)
    return lambda: _SimulatedService(tools, tables, user)


def _tools_of_actions(tasks: Sequence[Task]) -> tuple[ToolSpec, ...]:
    """What the tasks' gold actions show of the service's tools."""
    fields_of: dict[str, Json] = {}
    for task in tasks:
        for action in task.gold["actions"]:
            fields = fields_of.setdefault(action["name"], {})
            for name, value in action["arguments"].items():
                fields[name] = {"type": _JSON_TYPES.get(type(value), "object")}
    tools = []
    for name, fields in sorted(fields_of.items()):
        description = name.replace("_", " ").capitalize() + "."
        tools.append(ToolSpec(name, description, {"type": "object", "properties": fields}))
    return tuple(tools)


def _read_tables(path: Path) -> Json:
    """`db.json` beside the tasks, or a folder of tables; compressed or not."""
    home = path if path.is_dir() else path.parent
    tables: Json = {}
    for file in sorted([*home.glob("db.json*"), *home.glob("*_db/*.json*")]):
        content = file.read_bytes()
        value = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
        if file.name.startswith("db."):
            tables |= value
        else:
            tables[file.name.split(".")[0]] = value
    return {name: rows for name, rows in tables.items() if isinstance(rows, dict)}
