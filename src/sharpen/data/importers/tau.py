"""tau-bench and tau2: tasks (what a simulated user wants, and the actions that count) and runs.

A task's instruction is what the simulated user is told, not what it says; `metadata.simulated_user`
marks that. The tools belong to the environment and are in none of the files. tau-bench's few-shot
text (`messages_display`) prints a call as `None`: it holds no calls, so all of it is kept apart.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from sharpen.data.importers import has, importer
from sharpen.data.importers.chat import message, messages
from sharpen.data.reading import below, within
from sharpen.data.importers.shapes import call_from, calls_to_gold, picked, tools_from
from sharpen.types import Dialog, Json, Message, RowError, Task

TOLD = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
POLICIES = ("policy.md", "policy.txt", "main_policy.md", "main_policy.txt")


@importer(has("user_id", "actions", "outputs"))
def tau_tasks(row: Json, where: str, side: None) -> Task:
    gold = {"actions": calls_to_gold(map(call_from, row["actions"])), "outputs": row["outputs"]}
    metadata = {"user_id": row["user_id"], "simulated_user": True}
    return Task("", row["instruction"], (), gold, "tau", metadata=metadata)


@importer(lambda row: has("traj", "reward")(row) or "messages_display" in row)
def tau_runs(row: Json, where: str, side: None) -> Dialog:
    if "messages_display" in row:
        raise RowError(where, "the text prints calls as None: import the JSON runs instead")
    run_id, metadata = f"{row['task_id']}-{row.get('trial', 0)}", ("task_id", "trial", "reward")
    tools = tools_from(row.get("tools"))
    return Dialog(messages(row["traj"]), tools, id=run_id, metadata=picked(row, *metadata))


def policy(path: Path) -> tuple[Message, ...]:
    """The domain's rules, which the agent gets as its system message."""
    folder = path if path.is_dir() else path.parent
    found = [folder / name for name in POLICIES if (folder / name).is_file()]
    return tuple(Message("system", file.read_text(encoding="utf-8")) for file in found[:1])


@importer(has("user_scenario", "evaluation_criteria"), below("^tasks"), policy)
def tau2_tasks(row: Json, where: str, context: tuple[Message, ...]) -> Task:
    told = row["user_scenario"]["instructions"]
    if isinstance(told, dict):
        told = "\n\n".join(told[key] for key in TOLD if told.get(key))
    metadata = {k: row[k] for k in ("description", "initial_state", "ticket") if row.get(k)}
    metadata |= {"persona": row["user_scenario"].get("persona"), "simulated_user": True}
    return Task(row["id"], told, (), row["evaluation_criteria"], "tau2", "", context, metadata)


@importer(has("task_id", "reward_info", "messages"), within(itemgetter("simulations")))
def tau2_runs(row: Json, where: str, side: None) -> Dialog:
    """The assistant's side: what the simulated user does with its own tools is not shown to it."""
    said = [m for m in row["messages"] if m["role"] == "user"]
    users = {call["id"] for m in said for call in m.get("tool_calls") or []}
    turns = []
    for m in row["messages"]:
        if m["role"] == "tool":
            if m.get("id") not in users:
                turns.append(message(m | {"tool_call_id": m.get("id"), "name": ""}))
        elif m["role"] == "assistant" or m.get("content"):
            turns.append(message(m if m["role"] == "assistant" else m | {"tool_calls": None}))
    reward = (row.get("reward_info") or {}).get("reward")
    metadata = {"task_id": row["task_id"], "trial": row.get("trial"), "reward": reward}
    return Dialog(tuple(turns), id=str(row["id"]), metadata=metadata)
