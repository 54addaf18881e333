"""Reads data sets by name, and builds them on first use.

Names are `agent_sft:train`, `agent_benchmark/timing:dev`, `agent_tools`, a file's path, and
`procedural/arithmetic:train?levels=0-2` for tasks made on the spot. Training and evaluation read
their data here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.calls import assistant_text, compact_json
from sharpen.data.generate.build import USUAL, build_data, plan_files
from sharpen.data.procedural import PREFIX, procedural_tasks
from sharpen.records import Row, cache_folder, read_jsonl, sha256_file
from sharpen.render import Renderer, tools_block
from sharpen.rows import call_from_wire, dialog_from_row, task_from_row, task_to_row
from sharpen.types import Dialog, Json, Message, Preference, Scorer, SharpenError, Task, ToolCall
from sharpen.world.episode import shipped_world
from sharpen.world.state import seeded

HOME = Path(__file__).parents[1]
_TASK_TYPES = ("tool_selection", "multi_step_planning", "timing_decision", "tool_retrieval")
_TOOLS_FILE = "agent_tools/tools.jsonl"
_WORD = re.compile(r"[\u3400-\u9fff]|\w+")  # a Chinese character is a word of its own


# Files and rows ----------------------------------------------------------------------------------


def data_folder() -> Path:
    """Return where the built sets are: `$SHARPEN_DATA`, or a folder of the cache.

    The name of the cache folder holds a hash of the tool world and of the code that builds the
    rows, so that a change of either builds the sets anew.
    """
    folder = os.environ.get("SHARPEN_DATA")
    if folder:
        return Path(folder)
    builders = sorted([*HOME.glob("world/*.*"), *HOME.glob("data/generate/*.*")])
    hashes = [sha256_file(file) for file in (*shipped_world().files.values(), *builders)]
    state = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return cache_folder() / f"data-{state[:12]}"


def resolve(name: str) -> list[Path]:
    """Return the files of a set, built first if need be. A procedural source has no file."""
    if Path(name).is_file():
        return [Path(name)]
    if name.startswith(PREFIX):
        return []
    part, _, split = name.partition(":")
    ending = f"/{split}.jsonl" if split else "/tools.jsonl"
    files = []
    for file in (_TOOLS_FILE, *(planned.path for planned in plan_files(USUAL))):
        if file.startswith(f"{part}/") and file.endswith(ending):
            files.append(file)
    if not files:
        raise SharpenError(
            f"{name!r}: neither a file nor agent_tools, agent_sft:SPLIT, agent_benchmark:SPLIT or "
            "agent_benchmark/PART:SPLIT; splits are train, dev, test, parts selection, planning, "
            "timing, end_to_end; tasks can be procedural/KIND:SPLIT too"
        )
    folder = data_folder()
    if not (folder / "manifest.json").is_file():
        build_data(folder, workers=1)  # the caller may have threads, which rule out forking
    for file in files:
        if not (folder / file).is_file():
            raise SharpenError(f"{folder}: has no {file}; run sharpen data build --out {folder}")
    return [folder / file for file in files]


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a set, a file or a procedural source."""
    if name.startswith(PREFIX):
        for task in procedural_tasks(name):
            row = task_to_row(task)
            yield Row(f"{name}:{task.id}", row, compact_json(row).encode())
        return
    for path in resolve(name):
        yield from read_jsonl(path)


def read_dialogs(name: str) -> Iterator[Dialog]:
    """Yield the rows of a set as dialogs."""
    return (dialog_from_row(row.value, row.where) for row in read_rows(name))


def read_tasks(name: str) -> Iterator[Task]:
    """Yield the rows of a set as tasks."""
    return (task_from_row(row.value, row.where) for row in read_rows(name))


# Training and evaluation data --------------------------------------------------------------------


class AgentTrainingUsage:
    """Provides the data that each stage of the training pipeline takes from the three sets."""

    SOURCES = {"sft": "agent_sft", "tools": "agent_tools", "benchmark": "agent_benchmark"}  # noqa: RUF012

    def get_sft_data(self, split: str = "train") -> Iterator[Json]:
        """Yield the dialogs of `agent_sft` as prompts and answer texts."""
        formatter = AgentSFTFormatter()
        for dialog in read_dialogs(f"{self.SOURCES['sft']}:{split}"):
            yield formatter.format_dialog(dialog)

    def get_preference_data(self, split: str = "train") -> Iterator[Preference]:
        """Yield constructed pairs: the gold call against a wrong tool, a wrong argument or no
        call."""
        for task in self.iter_samples(split):
            if task.gold.get("calls"):
                yield _preference_pair(task)

    def iter_samples(self, split: str = "test") -> Iterator[Task]:
        """Yield the tasks of `agent_benchmark`."""
        return read_tasks(f"{self.SOURCES['benchmark']}:{split}")

    get_evaluation_data = iter_samples


def _preference_pair(task: Task) -> Preference:
    """Return the first gold call as the better turn, and a mistake that models make as the worse.

    The mistakes are: no call, the same arguments for another tool, and a text argument left out.
    """
    rng = seeded("pair", task.id)
    gold_call = call_from_wire(task.gold["calls"][0], task.id)
    mistakes = [Message("assistant", "I have done that for you.")]
    other_names = [tool.name for tool in task.tools if tool.name != gold_call.name]
    if other_names:
        wrong_call = ToolCall(rng.choice(other_names), gold_call.arguments)
        mistakes.append(Message("assistant", tool_calls=(wrong_call,)))
    text_names = [name for name, value in gold_call.arguments.items() if isinstance(value, str)]
    if text_names:
        dropped = rng.choice(text_names)
        arguments = {k: value for k, value in gold_call.arguments.items() if k != dropped}
        wrong_call = ToolCall(gold_call.name, arguments)
        mistakes.append(Message("assistant", tool_calls=(wrong_call,)))
    return Preference(
        prompt=task.messages,
        chosen=(Message("assistant", tool_calls=(gold_call,)),),
        rejected=(rng.choice(mistakes),),
        tools=task.tools,
        id=task.id,
        chosen_score=1.0,
        rejected_score=0.0,
    )


class AgentSFTFormatter:
    """Formats a dialog as a prompt and an answer text, for trainers that take texts.

    Training in this project renders the messages themselves and does not need it.
    """

    TEMPLATE = (
        "<|system|>\nYou are an assistant who solves tasks with tools.\nTools:\n"
        "{tool_descriptions}\n<|user|>\n{user_query}\n<|assistant|>\n{plan_and_execution}"
    )

    def format_dialog(self, dialog: Dialog) -> Json:
        """Return `{"input", "output", "task_type", "metadata"}`."""
        request_index = _first_user_index(dialog)
        prompt = self.TEMPLATE.format(
            tool_descriptions=tools_block(dialog.tools) if dialog.tools else "none",
            user_query="" if request_index < 0 else dialog.messages[request_index].content,
            plan_and_execution="",
        )
        return {
            "input": prompt,
            "output": self.format_assistant_response(dialog),
            "task_type": self.classify_task(dialog),
            "metadata": dialog.metadata,
        }

    def format_assistant_response(self, dialog: Dialog) -> str:
        """Return everything after the first request: the assistant's turns, tool results, and
        what the user answers."""
        parts = []
        for message in dialog.messages[_first_user_index(dialog) + 1 :]:
            if message.role == "assistant":
                parts.append(assistant_text(message, dialog.id))
            else:
                tag = "tool_result" if message.role == "tool" else message.role
                parts.append(f"<{tag}>{message.content}</{tag}>")
        return "\n".join(parts)

    def classify_task(self, dialog: Dialog) -> str:
        """Return the dialog's own type, or otherwise one by its number of turns with calls."""
        if dialog.task_type in _TASK_TYPES:
            return dialog.task_type
        call_turns = 0
        for message in dialog.messages:
            if message.tool_calls and message.trained:
                call_turns += 1
        if call_turns == 0:
            return "timing_decision"
        if call_turns == 1:
            return "tool_selection"
        return "multi_step_planning"


def _first_user_index(dialog: Dialog) -> int:
    """Return the index of the first user message, -1 if there is none."""
    for index, message in enumerate(dialog.messages):
        if message.role == "user":
            return index
    return -1


# Measured dialogs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessedDialog:
    """A dialog with what was measured on it.

    `metadata` holds `token_length`, `lexical_diversity` and, where it is known, `loss`.
    """

    dialog_id: str
    task_type: str
    text: str
    target_tools: tuple[str, ...]
    metadata: Json
    dialog: Dialog


class AgentDialogProcessor:
    """Measures dialogs. With a `scorer`, rows without a `loss` get one from its model."""

    def __init__(self, tokenizer: Any = "smollm2-135m", scorer: Scorer | None = None):
        if isinstance(tokenizer, str):
            from sharpen.models.load import load_tokenizer

            tokenizer = load_tokenizer(tokenizer)
        self.renderer = Renderer(tokenizer)
        self.scorer = scorer

    def process(self, dialogs: Iterable[Dialog]) -> list[ProcessedDialog]:
        """Return every dialog with its measurements, in the same order."""
        dialogs = list(dialogs)
        without_loss = [dialog for dialog in dialogs if "loss" not in dialog.metadata]
        losses: Iterator[float] = iter(())
        if self.scorer and without_loss:
            losses = iter(self.scorer.losses(without_loss))
        formatter = AgentSFTFormatter()
        processed = []
        for dialog, datum in zip(dialogs, self.renderer.render(dialogs), strict=True):
            text = "\n".join(message.content for message in dialog.messages if message.content)
            metadata: Json = {
                "token_length": len(datum.ids),
                "lexical_diversity": _lexical_diversity(text),
            }
            if self.scorer and "loss" not in dialog.metadata:
                metadata["loss"] = next(losses)
            metadata |= dialog.metadata
            processed.append(
                ProcessedDialog(
                    dialog_id=dialog.id,
                    task_type=formatter.classify_task(dialog),
                    text=text,
                    target_tools=_trained_tool_names(dialog),
                    metadata=metadata,
                    dialog=dialog,
                )
            )
        return processed


def _lexical_diversity(text: str) -> float:
    """Return the share of different words among all words."""
    words = _WORD.findall(text.lower())
    return round(len(set(words)) / max(len(words), 1), 4)


def _trained_tool_names(dialog: Dialog) -> tuple[str, ...]:
    """Return the names of the tools that trained turns call, each once."""
    names = []
    for message in dialog.messages:
        if message.trained:
            names += [call.name for call in message.tool_calls]
    return tuple(dict.fromkeys(names))
