"""Data by name: the sets `agent_sft:train`, `agent_benchmark/timing:dev` and `agent_tools`, built
on first use, and tasks made on the spot, as `procedural/arithmetic:train?levels=0-2`."""

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

TASK_TYPES = ("tool_selection", "multi_step_planning", "timing_decision", "tool_retrieval")
HOME = Path(__file__).parents[1]
WORD = re.compile(r"[\u3400-\u9fff]|\w+")  # a Chinese character is a word of its own


def data_folder() -> Path:
    """`$SHARPEN_DATA`, else a folder of the cache that belongs to this state of the tool world and
    of what makes rows of it."""
    if given := os.environ.get("SHARPEN_DATA"):
        return Path(given)
    makers = sorted([*HOME.glob("world/*.*"), *HOME.glob("data/generate/*.*")])
    state = "".join(map(sha256_file, [*shipped_world().files.values(), *makers]))
    return cache_folder() / f"data-{hashlib.sha256(state.encode()).hexdigest()[:12]}"


def resolve(name: str) -> list[Path]:
    """A set's files, built first if need be; a path is itself, and a made-up source has no file."""
    if Path(name).is_file():
        return [Path(name)]
    if name.startswith(PREFIX):
        return []
    part, _, split = name.partition(":")
    known = ["agent_tools/tools.jsonl", *(file.path for file in plan_files(USUAL))]
    end = f"/{split}.jsonl" if split else "/tools.jsonl"
    files = [file for file in known if file.startswith(f"{part}/") and file.endswith(end)]
    if not files:
        raise SharpenError(
            f"{name!r}: neither a file nor agent_tools, agent_sft:SPLIT, agent_benchmark:SPLIT or "
            "agent_benchmark/PART:SPLIT; splits are train, dev, test, parts selection, planning, "
            "timing, end_to_end; tasks can be procedural/KIND:SPLIT too"
        )
    folder = data_folder()
    if not (folder / "manifest.json").is_file():
        build_data(folder, workers=1)  # the caller may have threads, and those forbid copies
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise SharpenError(f"{folder}: has no {missing[0]}; run sharpen data build --out {folder}")
    return [folder / file for file in files]


def read_rows(name: str) -> Iterator[Row]:
    if name.startswith(PREFIX):
        for task in procedural_tasks(name):
            row = task_to_row(task)
            yield Row(f"{name}:{task.id}", row, compact_json(row).encode())
        return
    for path in resolve(name):
        yield from read_jsonl(path)


def read_dialogs(name: str) -> Iterator[Dialog]:
    return (dialog_from_row(row.value, row.where) for row in read_rows(name))


def read_tasks(name: str) -> Iterator[Task]:
    return (task_from_row(row.value, row.where) for row in read_rows(name))


class AgentTrainingUsage:
    """What the training pipeline takes from the three sets."""

    SOURCES = {"sft": "agent_sft", "tools": "agent_tools", "benchmark": "agent_benchmark"}  # noqa: RUF012

    def get_sft_data(self, split: str = "train") -> Iterator[Json]:
        dialogs = read_dialogs(f"{self.SOURCES['sft']}:{split}")
        return map(AgentSFTFormatter().format_dialog, dialogs)

    def get_preference_data(self, split: str = "train") -> Iterator[Preference]:
        """Constructed pairs: the gold call against a wrong tool, a wrong argument or no call."""
        return (gold_pair(task) for task in self.iter_samples(split) if task.gold.get("calls"))

    def iter_samples(self, split: str = "test") -> Iterator[Task]:
        return read_tasks(f"{self.SOURCES['benchmark']}:{split}")

    get_evaluation_data = iter_samples


def gold_pair(task: Task) -> Preference:
    """The first gold call as the better turn, and a mistake that models make as the worse one."""
    rng, call = seeded("pair", task.id), call_from_wire(task.gold["calls"][0], task.id)
    others = [tool.name for tool in task.tools if tool.name != call.name]
    named = [name for name, value in call.arguments.items() if isinstance(value, str)]
    wrong = [ToolCall(rng.choice(others), call.arguments)] if others else []
    if named:
        dropped = rng.choice(named)
        kept = {name: value for name, value in call.arguments.items() if name != dropped}
        wrong.append(ToolCall(call.name, kept))
    right, *mistakes = (Message("assistant", tool_calls=(made,)) for made in (call, *wrong))
    said = rng.choice([Message("assistant", "I have done that for you."), *mistakes])
    return Preference(task.messages, (right,), (said,), task.tools, task.id, 1.0, 0.0)


class AgentSFTFormatter:
    """A dialog as a prompt and an answer text; training here renders the messages themselves."""

    TEMPLATE = (
        "<|system|>\nYou are an assistant who solves tasks with tools.\nTools:\n"
        "{tool_descriptions}\n<|user|>\n{user_query}\n<|assistant|>\n{plan_and_execution}"
    )

    def format_dialog(self, dialog: Dialog) -> Json:
        """`{"input", "output", "task_type", "metadata"}`."""
        filled = self.TEMPLATE.format(
            tool_descriptions=tools_block(dialog.tools) if dialog.tools else "none",
            user_query=next((m.content for m in dialog.messages if m.role == "user"), ""),
            plan_and_execution="",
        )
        row = {"input": filled, "output": self.format_assistant_response(dialog)}
        return row | {"task_type": self.classify_task(dialog), "metadata": dialog.metadata}

    def format_assistant_response(self, dialog: Dialog) -> str:
        """Everything after the first request, with what tools and the user answered."""
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
        turns = sum(bool(m.tool_calls) and m.trained for m in dialog.messages)
        return ("timing_decision", "tool_selection", "multi_step_planning")[min(turns, 2)]


@dataclass(frozen=True, slots=True)
class ProcessedDialog:
    """`metadata` holds `token_length`, `lexical_diversity` and, where it is known, `loss`."""

    dialog_id: str
    task_type: str
    text: str
    target_tools: tuple[str, ...]
    metadata: Json
    dialog: Dialog


class AgentDialogProcessor:
    """Measures dialogs. `scorer` gives real losses, else only a `loss` that a row has is kept."""

    def __init__(self, tokenizer: Any = "smollm2-135m", scorer: Scorer | None = None):
        if isinstance(tokenizer, str):
            from sharpen.models.load import load_tokenizer

            tokenizer = load_tokenizer(tokenizer)
        self.renderer, self.scorer = Renderer(tokenizer), scorer

    def process(self, dialogs: Iterable[Dialog]) -> list[ProcessedDialog]:
        chosen, found = list(dialogs), []
        unknown = [dialog for dialog in chosen if "loss" not in dialog.metadata]
        losses = iter(self.scorer.losses(unknown) if self.scorer and unknown else ())
        for dialog, datum in zip(chosen, self.renderer.render(chosen), strict=True):
            text = "\n".join(m.content for m in dialog.messages if m.content)
            words = WORD.findall(text.lower())
            diversity = round(len(set(words)) / max(len(words), 1), 4)
            metadata: Json = {"token_length": len(datum.ids), "lexical_diversity": diversity}
            if self.scorer and "loss" not in dialog.metadata:
                metadata["loss"] = next(losses)
            metadata |= dialog.metadata
            right = [message for message in dialog.messages if message.trained]
            tools = tuple(dict.fromkeys(c.name for m in right for c in m.tool_calls))
            kind = AgentSFTFormatter().classify_task(dialog)
            found.append(ProcessedDialog(dialog.id, kind, text, tools, metadata, dialog))
        return found
