"""A customer service with a simulated user (tau-bench, tau2): who plays the user is a policy.

The tools are those that the tasks' own actions show, with the arguments they have there. What is
looked up by a key is answered from the database beside the tasks; changes are noted, not made,
since the services' code is not here. `ActionsReward` compares the changes with gold's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpen import types
from sharpen.calls import compact_json
from sharpen.evals.items import NO_USER
from sharpen.rewards.graphs import READS
from sharpen.rollout import MakeEnvironment
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, Task, ToolCall, ToolSpec

OVER = "###STOP###"
PART = (
    "You are a customer who talks to an assistant. Say one thing at a time, in your own words, and "
    f"only what is asked for. When your wish is fulfilled or refused for good, say {OVER}.\n\n"
)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
SAID = types.Sampling(max_tokens=160)


class SimulatedService:
    def __init__(self, tools: tuple[ToolSpec, ...], tables: Json, user: Policy):
        self.tools, self.tables, self.user = tools, tables, user
        self.heard: list[Message] = []

    @classmethod
    def maker(cls, tasks: Sequence[Task], path: Path, user: Policy | None) -> MakeEnvironment:
        if user is None:
            raise SharpenError(f"{path}: needs somebody who plays the user: --user MODEL")
        tools, tables = tools_of(tasks), read_tables(path)
        return lambda: cls(tools, tables, user)

    def reset(self, task: Task) -> Dialog:
        self.heard = [Message("system", PART + task.instruction)]
        first = Message("user", self.ask("Hello, how can I help you?"))
        return Dialog((*task.context, first), self.tools, task.id, task.kind)

    def step(self, message: Message) -> tuple[tuple[Message, ...], types.StopReason | None]:
        if message.tool_calls or message.unparsed:
            broken = [Message("tool", '{"error": "the call could not be read"}')]
            return (*map(self.answer, message.tool_calls), *broken * len(message.unparsed)), None
        reply = self.ask(message.content)
        if OVER in reply:
            return (), types.StopReason.ANSWERED
        return (Message("user", reply),), None

    def ask(self, words: str) -> str:
        """What the user says to the assistant's words."""
        self.heard.append(Message("user", words))
        (turn,) = self.user.respond([Dialog(tuple(self.heard))], SAID)
        if turn.stop is types.StopReason.POLICY_ERROR:
            raise SharpenError(f"{NO_USER}: {turn.error}")
        self.heard.append(Message("assistant", turn.message.content))
        return turn.message.content.strip() or OVER

    def answer(self, call: ToolCall) -> Message:
        keys = [value for value in call.arguments.values() if isinstance(value, str)]
        found = [rows[key] for rows in self.tables.values() for key in keys if key in rows]
        if call.name not in {tool.name for tool in self.tools}:
            result: Any = {"error": f"there is no tool {call.name}"}
        elif READS.match(call.name):
            result = found[0] if found else {"error": "nothing is known of that"}
        else:
            result = {"status": "done"}
        return Message("tool", compact_json(result), name=call.name, tool_call_id=call.id)


def tools_of(tasks: Sequence[Task]) -> tuple[ToolSpec, ...]:
    """What the tasks' actions show of the tools."""
    fields: dict[str, Json] = {}
    for action in (each for task in tasks for each in task.gold["actions"]):
        known = fields.setdefault(action["name"], {})
        known |= {n: {"type": KINDS.get(type(v), "object")} for n, v in action["arguments"].items()}
    tools = []
    for name, known in sorted(fields.items()):
        about = name.replace("_", " ").capitalize() + "."
        tools.append(ToolSpec(name, about, {"type": "object", "properties": known}))
    return tuple(tools)


def read_tables(path: Path) -> Json:
    """`db.json` beside the tasks, or a folder of tables; compressed or not."""
    home = path if path.is_dir() else path.parent
    files = [*home.glob("db.json*"), *home.glob("*_db/*.json*")]
    tables: Json = {}
    for file in sorted(files):
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        value = json.loads(text)
        tables |= value if file.name.startswith("db.") else {file.name.split(".")[0]: value}
    return {name: rows for name, rows in tables.items() if isinstance(rows, dict)}


def service_task(task: Task, raw: Json, path: Path) -> tuple[Task]:
    """Tasks that the assistant's actions decide; a user's own tools are not here."""
    actions = task.gold.get("actions") or []
    if any(action.get("requestor") == "user" for action in actions):
        raise types.RowError(task.id, "the user needs tools of its own, which are not here")
    calls = [{"name": a["name"], "arguments": a["arguments"]} for a in actions]
    gold = {key: task.gold.get(key) or [] for key in ("outputs", "communicate_info")}
    gold |= {"actions": calls}
    return (Task(task.id, task.instruction, (), gold, "tau", context=task.context),)
