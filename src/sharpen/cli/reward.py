"""`sharpen reward`: look at a reward before training on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from statistics import fmean
from typing import Annotated

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, end_with
from sharpen.types import Message, SharpenError, StopReason, Task, Trajectory, Turn

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Try rewards on rows.")
app.callback()(lambda: None)  # keeps `try` a verb of its own


@app.command("try")
def try_(
    file: Annotated[str, Argument(help="Tasks with a `response` or `messages`, or a set.")],
    reward: Annotated[str, Option(help="A reward's name, or file.py:name.")] = "agent",
    config: Annotated[str, Option(help="YAML file with a `reward:` block.")] = "",
    limit: Annotated[int, Option(help="Score so many rows.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Score rows and print the breakdown; for rows without a response, of gold and of nothing.

    Example: sharpen reward try agent_benchmark:dev --reward my_reward.py:score --limit 5"""
    from sharpen.config import load_yaml
    from sharpen.data.sources import read_rows
    from sharpen.rewards.compose import build_reward
    from sharpen.rows import task_from_row

    block = load_yaml(config) if config else reward
    judge = build_reward(block.get("reward", block) if isinstance(block, dict) else block)
    rows = list[dict]()
    for row in islice(read_rows(file), limit):
        task = task_from_row(row.value, row.where)
        for what, trajectory in responses(task, row.where):
            found = judge.score(task, trajectory)
            rows.append({"row": task.id or row.where, "what": what} | asdict(found))
            parts = "  ".join(f"{name} {part:.2f}" for name, part in found.parts.items() if part)
            print(f"{found.value:7.3f}  {what:8}  {rows[-1]['row']}\n{'':9}{parts}")
            print(f"{'':9}{found.feedback}\n" if found.feedback else "")
    if not rows:
        raise SharpenError(f"{file}: no rows to score")
    kinds = dict.fromkeys(row["what"] for row in rows)
    means = {kind: fmean(row["value"] for row in rows if row["what"] == kind) for kind in kinds}
    print(", ".join(f"{what}: mean {mean:.3f}" for what, mean in means.items()))
    for reason, count in judge.failures.items():
        print(f"failed {count} times: {reason}")
    end_with({"mean": means, "failures": judge.failures, "rows": rows}, as_json)


def responses(task: Task, where: str) -> Iterator[tuple[str, Trajectory]]:
    """The row's own response; without one, gold's (where it is known) and nothing at all."""
    from sharpen.calls import parse_message
    from sharpen.rows import messages_from_wire
    from sharpen.world.gold import gold_trajectory

    said = task.metadata.get("messages", task.metadata.get("response", task.metadata.get("answer")))
    if said is None:
        if gold := gold_trajectory(task):
            yield "gold", gold
        yield "empty", Trajectory(task.id, (Turn(Message("assistant")),), StopReason.ANSWERED)
        return
    wire = said if isinstance(said, list) else [{"role": "assistant", "content": said}]
    turns: list[Turn] = []
    for message in messages_from_wire(wire, where, "response"):
        if message.role == "assistant":
            turns.append(Turn(message if message.tool_calls else parse_message(message.content)))
        elif turns:
            turns[-1] = replace(turns[-1], results=(*turns[-1].results, message))
    yield "response", Trajectory(task.id, tuple(turns), StopReason.ANSWERED)
