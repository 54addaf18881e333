"""`sharpen reward`: look at a reward before training on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from statistics import fmean
from typing import Annotated

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, end_with
from sharpen.types import (
    Message,
    Reward,
    RowError,
    Score,
    SharpenError,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Try rewards on rows.")
app.callback()(lambda: None)  # keeps `try` a verb of its own


@app.command("try")
def _try(
    file: Annotated[str, Argument(help="Tasks with a `response` or `messages`, or a set.")],
    reward: Annotated[
        str, Option(help="Its name, or file.py:name; by default the kind's own.")
    ] = "",
    config: Annotated[str, Option(help="YAML file with a `reward:` block.")] = "",
    limit: Annotated[int, Option(help="Number of rows to score.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Score rows and print the breakdown; for rows without a response, of gold and of nothing.

    Example: sharpen reward try agent_benchmark:dev --reward my_reward.py:score --limit 5"""
    from sharpen.data.sources import read_rows
    from sharpen.rows import task_from_row

    judge = _find_reward(reward, config)
    rows: list[dict] = []
    for row in islice(read_rows(file), limit):
        task = task_from_row(row.value, row.where)
        for what, trajectory in _responses(task, row.where):
            score = judge.score(task, trajectory)
            shown = {"row": task.id or row.where, "what": what, **asdict(score)}
            rows.append(shown | {"solved": score.is_solved})
            _print_score(rows[-1], score)
    if not rows:
        raise SharpenError(f"{file}: no rows to score")
    means = {}
    for what in dict.fromkeys(row["what"] for row in rows):
        means[what] = fmean(row["value"] for row in rows if row["what"] == what)
    print(", ".join(f"{what}: mean {mean:.3f}" for what, mean in means.items()))
    failures = getattr(judge, "failures", {})
    for reason, count in failures.items():
        print(f"failed {count} times: {reason}")
    end_with({"mean": means, "failures": failures, "rows": rows}, as_json)


def _find_reward(reward: str, config: str) -> Reward:
    """The reward of a config file, the named one, or without both that of each task's kind."""
    from sharpen.config import load_yaml
    from sharpen.kinds import KindReward
    from sharpen.rewards.compose import build_reward

    if not config:
        return build_reward(reward) if reward else KindReward()
    block = load_yaml(config)
    return build_reward(block.get("reward", block) if isinstance(block, dict) else block)


def _print_score(row: dict, score: Score) -> None:
    """The value, the parts that are not 0, and the feedback."""
    solved = "solved" if score.is_solved else ""
    print(f"{score.value:7.3f}  {row['what']:8}  {solved:6}  {row['row']}")
    print(" " * 9 + "  ".join(f"{name} {part:.2f}" for name, part in score.parts.items() if part))
    if score.feedback:
        print(" " * 9 + score.feedback + "\n")


def _responses(task: Task, where: str) -> Iterator[tuple[str, Trajectory]]:
    """The row's own response; without one, gold's (where it is known) and nothing at all."""
    from sharpen.calls import parse_message
    from sharpen.kinds import gold_trajectory
    from sharpen.rows import messages_from_wire

    metadata = task.metadata
    response = metadata.get("messages", metadata.get("response", metadata.get("answer")))
    if response is None:
        with contextlib.suppress(RowError):  # gold may not say what is right
            yield "gold", gold_trajectory(task)
        yield "empty", Trajectory(task.id, (Turn(Message("assistant")),), StopReason.ANSWERED)
        return
    wire = response
    if not isinstance(response, list):
        wire = [{"role": "assistant", "content": response}]
    turns: list[Turn] = []
    for message in messages_from_wire(wire, where, "response"):
        if message.role == "assistant":
            turns.append(Turn(message if message.tool_calls else parse_message(message.content)))
        elif turns:
            turns[-1] = replace(turns[-1], results=(*turns[-1].results, message))
    yield "response", Trajectory(task.id, tuple(turns), StopReason.ANSWERED)
