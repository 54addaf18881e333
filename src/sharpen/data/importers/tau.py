"""tau-bench and tau2: tasks (what a simulated user wants, and the actions that count) and runs.

A task's instruction is what the simulated user is told, not what it says; `metadata.simulated_user`
marks that. The tools belong to the environment and are in none of the files. tau-bench's few-shot
text (`messages_display`) prints a call as `None`: it holds no calls, so all of it is kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.openai import message
from sharpen.data.importers.reading import Record, below, read_records
from sharpen.data.importers.shapes import call_from, calls_to_gold, tools_from
from sharpen.types import Dialog, Json, Message, RowError, Task


def convert_task(row: Json, where: str, side: None) -> Rows:
    actions = calls_to_gold(call_from(action, where) for action in row["actions"])
    gold = {"actions": actions, "outputs": row["outputs"]}
    metadata = {"user_id": row["user_id"], "simulated_user": True}
    yield Task("", row["instruction"], (), gold, "tau", metadata=metadata)


def convert_run(row: Json, where: str, side: None) -> Rows:
    if "messages_display" in row:
        raise RowError(where, "the text prints calls as None: import the JSON runs instead")
    metadata = {k: row[k] for k in ("task_id", "trial", "reward") if k in row}
    turns = tuple(message(m, where) for m in row["traj"])
    row_id = f"{row['task_id']}-{row.get('trial', 0)}"
    yield Dialog(turns, tools_from(row.get("tools"), where), id=row_id, metadata=metadata)


def policy(path: Path) -> tuple[Message, ...]:
    """The domain's rules, which the agent gets as its system message."""
    folder = path if path.is_dir() else path.parent
    for name in ("policy.md", "policy.txt", "main_policy.md", "main_policy.txt"):
        if (folder / name).is_file():
            return (Message("system", (folder / name).read_text(encoding="utf-8")),)
    return ()


def convert_tau2(row: Json, where: str, context: tuple[Message, ...]) -> Rows:
    told = row["user_scenario"]["instructions"]
    if isinstance(told, dict):
        parts = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
        told = "\n\n".join(told[key] for key in parts if told.get(key))
    metadata = {k: row[k] for k in ("description", "initial_state", "ticket") if row.get(k)}
    metadata |= {"persona": row["user_scenario"].get("persona"), "simulated_user": True}
    yield Task(
        row["id"], told, (), row["evaluation_criteria"], "tau2", context=context, metadata=metadata
    )


def simulations(path: Path) -> Iterator[Record]:
    """One record for each simulation of a results file."""
    for record in read_records(path):
        if record.problem or not has("simulations")(record.value):
            yield record
            continue
        for number, run in enumerate(record.value["simulations"], 1):
            yield Record(f"{record.where}#{number}", run)


def convert_tau2_run(row: Json, where: str, side: None) -> Rows:
    """The assistant's side: what the simulated user does with its own tools is not shown to it."""
    users = {
        c["id"] for m in row["messages"] if m["role"] == "user" for c in m.get("tool_calls") or []
    }
    turns = []
    for m in row["messages"]:
        if m["role"] == "user" and not m.get("content"):
            continue
        if m["role"] == "tool" and m.get("id") in users:
            continue
        fields = {"role": m["role"], "content": m.get("content")}
        fields |= {"tool_call_id": m.get("id")} if m["role"] == "tool" else {}
        fields |= {"tool_calls": m.get("tool_calls")} if m["role"] == "assistant" else {}
        turns.append(message(fields, where))
    reward = (row.get("reward_info") or {}).get("reward")
    metadata = {"task_id": row["task_id"], "trial": row.get("trial"), "reward": reward}
    yield Dialog(tuple(turns), id=str(row["id"]), metadata=metadata)


def detect_run(row: Json) -> bool:
    return has("traj", "reward")(row) or has("messages_display")(row)


IMPORTERS = (
    Importer("tau_tasks", has("user_id", "actions", "outputs"), convert_task),
    Importer("tau_runs", detect_run, convert_run),
    Importer(
        "tau2_tasks",
        has("user_scenario", "evaluation_criteria"),
        convert_tau2,
        below("^tasks"),
        policy,
    ),
    Importer("tau2_runs", has("task_id", "reward_info", "messages"), convert_tau2_run, simulations),
)
