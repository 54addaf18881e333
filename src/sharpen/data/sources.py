"""The built sets by name: `agent_sft:train`, `agent_benchmark:test`, `agent_benchmark/timing:dev`,
`agent_tools`. They live in `$SHARPEN_DATA`, else in the user's cache, and are built on first use.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.calls import assistant_text
from sharpen.data.generate.build import SPLITS, TASKS, build_data, is_built
from sharpen.records import cache_folder, read_jsonl, sha256_file
from sharpen.render import Renderer, tools_block
from sharpen.rows import call_from_wire, dialog_from_row, task_from_row
from sharpen.types import Dialog, Json, Message, Preference, Scorer, SharpenError, Task, ToolCall
from sharpen.world.episode import shipped_world
from sharpen.world.state import seeded

TASK_TYPES = ("tool_selection", "multi_step_planning", "timing_decision", "tool_retrieval")
WORD = re.compile(r"[\u3400-\u9fff]|\w+")  # a Chinese character is a word of its own


def data_folder() -> Path:
    """`$SHARPEN_DATA`, else a folder of the cache that belongs to this state of the tool world."""
    if given := os.environ.get("SHARPEN_DATA"):
        return Path(given)
    domains = "".join(sha256_file(path) for path in shipped_world().files.values())
    return cache_folder() / f"data-{hashlib.sha256(domains.encode()).hexdigest()[:12]}"


def resolve(name: str) -> list[Path]:
    """A set's name → its files, built first if they are not there; a file's path stands for
    itself."""
    if Path(name).is_file():
        return [Path(name)]
    source, _, split = name.partition(":")
    source, _, part = source.partition("/")
    wrong = SharpenError(
        f"{name!r}: neither a file nor agent_tools, agent_sft:SPLIT, agent_benchmark:SPLIT or "
        f"agent_benchmark/PART:SPLIT; splits are train, dev, test, parts {', '.join(TASKS)}"
    )
    if source == "agent_tools" and not split and not part:
        files = ["agent_tools/tools.jsonl"]
    elif source == "agent_sft" and split in SPLITS and not part:
        files = [f"agent_sft/{split}.jsonl"]
    elif source == "agent_benchmark" and split in (*SPLITS, "extended"):
        parts = [part] if part else list(TASKS)
        files = [f"agent_benchmark/{p}/{split}.jsonl" for p in parts]
        if part and part not in TASKS:
            raise wrong
    else:
        raise wrong
    folder = data_folder()
    if not is_built(folder):
        build_data(folder, workers=1)  # the caller may have threads, and those forbid copies
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise SharpenError(f"{folder}: has no {missing[0]}; run sharpen data build --out {folder}")
    return [folder / file for file in files]


def read_dialogs(name: str) -> Iterator[Dialog]:
    for path in resolve(name):
        yield from (dialog_from_row(row.value, row.where) for row in read_jsonl(path))


def read_tasks(name: str) -> Iterator[Task]:
    for path in resolve(name):
        yield from (task_from_row(row.value, row.where) for row in read_jsonl(path))


def read_tools() -> Iterator[Json]:
    for path in resolve("agent_tools"):
        yield from (row.value for row in read_jsonl(path))


class AgentTrainingUsage:
    """What the training pipeline takes from the three sets."""

    SOURCES = {"sft": "agent_sft", "tools": "agent_tools", "benchmark": "agent_benchmark"}  # noqa: RUF012

    def get_sft_data(self, split: str = "train") -> Iterator[Json]:
        formatter = AgentSFTFormatter()
        for dialog in read_dialogs(f"{self.SOURCES['sft']}:{split}"):
            yield formatter.format_dialog(dialog)

    def get_preference_data(self, split: str = "train") -> Iterator[Preference]:
        """Constructed pairs: the gold call against a wrong tool, a wrong argument or no call."""
        for task in self.iter_samples(split):
            if task.gold.get("calls"):
                yield gold_pair(task)

    def get_evaluation_data(self, split: str = "test") -> Iterator[Task]:
        return self.iter_samples(split)

    def iter_samples(self, split: str = "test") -> Iterator[Task]:
        return read_tasks(f"{self.SOURCES['benchmark']}:{split}")


def gold_pair(task: Task) -> Preference:
    """The first gold call as the better turn, and a mistake that models make as the worse one."""
    rng = seeded("pair", task.id)
    call = call_from_wire(task.gold["calls"][0], task.id)
    others = [tool.name for tool in task.tools if tool.name != call.name]
    named = [name for name, value in call.arguments.items() if isinstance(value, str)]
    mistakes = [Message("assistant", "I have done that for you.")]
    if others:
        wrong_tool = ToolCall(rng.choice(others), call.arguments)
        mistakes.append(Message("assistant", tool_calls=(wrong_tool,)))
    if named:
        dropped = rng.choice(named)
        kept = {name: value for name, value in call.arguments.items() if name != dropped}
        mistakes.append(Message("assistant", tool_calls=(ToolCall(call.name, kept),)))
    return Preference(
        prompt=task.messages,
        chosen=(Message("assistant", tool_calls=(call,)),),
        rejected=(rng.choice(mistakes),),
        tools=task.tools,
        id=task.id,
        chosen_score=1.0,
        rejected_score=0.0,
    )


class AgentSFTFormatter:
    """A dialog as one prompt text and one answer text, for trainers that want pairs. Training here
    renders the messages themselves."""

    TEMPLATE = (
        "<|system|>\nYou are an assistant who solves tasks with tools.\nTools:\n"
        "{tool_descriptions}\n<|user|>\n{user_query}\n<|assistant|>\n{plan_and_execution}"
    )

    def format_dialog(self, dialog: Dialog) -> Json:
        """`{"input", "output", "task_type", "metadata"}`."""
        users = [m.content for m in dialog.messages if m.role == "user"]
        filled = self.TEMPLATE.format(
            tool_descriptions=tools_block(dialog.tools) if dialog.tools else "none",
            user_query=users[0] if users else "",
            plan_and_execution="",
        )
        return {
            "input": filled,
            "output": self.format_assistant_response(dialog),
            "task_type": self.classify_task(dialog),
            "metadata": dialog.metadata,
        }

    def format_assistant_response(self, dialog: Dialog) -> str:
        """Everything after the first request: what the assistant said and called, what tools and
        the user answered."""
        first = next((i for i, m in enumerate(dialog.messages) if m.role == "user"), -1)
        parts = []
        for message in dialog.messages[first + 1 :]:
            if message.role == "assistant":
                parts.append(assistant_text(message, dialog.id))
            else:
                tag = "tool_result" if message.role == "tool" else message.role
                parts.append(f"<{tag}>{message.content}</{tag}>")
        return "\n".join(parts)

    def classify_task(self, dialog: Dialog) -> str:
        """The row's own type, else what its calls look like."""
        if dialog.task_type in TASK_TYPES:
            return dialog.task_type
        turns = [m for m in dialog.messages if m.tool_calls]
        if not turns:
            return "timing_decision"
        return "multi_step_planning" if len(turns) > 1 else "tool_selection"


@dataclass(frozen=True, slots=True)
class ProcessedDialog:
    """A dialog with what coreset selection and replay go by; `metadata` holds `token_length`,
    `lexical_diversity` and, where it is known, `loss`."""

    dialog_id: str
    task_type: str
    text: str
    target_tools: tuple[str, ...]
    metadata: Json
    dialog: Dialog


class AgentDialogProcessor:
    """Measures dialogs. `scorer` gives real losses; without it only a `loss` that a row brings is
    kept, none is made up."""

    def __init__(self, tokenizer: Any = "smollm2-135m", scorer: Scorer | None = None):
        if isinstance(tokenizer, str):
            from sharpen.models.load import load_tokenizer

            tokenizer = load_tokenizer(tokenizer)
        self.renderer, self.scorer = Renderer(tokenizer), scorer

    def process(self, dialogs: Iterable[Dialog]) -> list[ProcessedDialog]:
        chosen = list(dialogs)
        lengths = [len(datum.ids) for datum in self.renderer.render(chosen)]
        losses = self.losses(chosen)
        found = []
        for dialog, length in zip(chosen, lengths, strict=True):
            text = "\n".join(m.content for m in dialog.messages if m.content)
            words = WORD.findall(text.lower())
            measured: Json = {"token_length": length}
            measured["lexical_diversity"] = round(len(set(words)) / max(len(words), 1), 4)
            loss = {"loss": losses[id(dialog)]} if id(dialog) in losses else {}
            tools = dict.fromkeys(c.name for m in dialog.messages for c in m.tool_calls)
            task_type = AgentSFTFormatter().classify_task(dialog)
            metadata = measured | loss | dialog.metadata
            found.append(
                ProcessedDialog(dialog.id, task_type, text, tuple(tools), metadata, dialog)
            )
        return found

    def losses(self, dialogs: Sequence[Dialog]) -> dict[int, float]:
        """Losses of the dialogs that bring none, by identity."""
        unknown = [dialog for dialog in dialogs if "loss" not in dialog.metadata]
        if self.scorer is None or not unknown:
            return {}
        return {
            id(dialog): loss
            for dialog, loss in zip(unknown, self.scorer.losses(unknown), strict=True)
        }
