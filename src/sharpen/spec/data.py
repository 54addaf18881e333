"""The training pipeline document's names for training data: formatting, measuring, handing out.

Sharpen's own training reads rows with `sharpen.data.sources` and renders messages itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sharpen.calls import assistant_text
from sharpen.data.sources import read_dialogs, read_tasks
from sharpen.models.load import load_tokenizer
from sharpen.render import Renderer, tools_block
from sharpen.rows import call_from_wire
from sharpen.types import Dialog, Json, Message, Preference, Scorer, Task, ToolCall
from sharpen.world.state import seeded_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TASK_TYPES = ("tool_selection", "multi_step_planning", "timing_decision", "tool_retrieval")
_WORD = re.compile(r"[\u3400-\u9fff]|\w+")  # a Chinese character is a word of its own


class AgentTrainingUsage:
    """Hands out the data of each training stage from the three sets (section 4.1).

    It is also a loader for `AgentTrainingEvaluator`.
    """

    SOURCES: ClassVar[dict[str, str]] = {
        "sft": "agent_sft",
        "tools": "agent_tools",
        "benchmark": "agent_benchmark",
    }

    def get_sft_data(self, split: str = "train") -> Iterator[Json]:
        """Yield the dialogs of `agent_sft` as prompts and answer texts."""
        formatter = AgentSFTFormatter()
        for dialog in read_dialogs(f"{self.SOURCES['sft']}:{split}"):
            yield formatter.format_dialog(dialog)

    def get_preference_data(self, split: str = "train") -> Iterator[Preference]:
        """Yield constructed pairs: the gold call against a wrong tool, a missing argument or no
        call.

        The document reads pairs that were stored with the benchmark; here none are stored.
        """
        for task in self.iter_samples(split):
            if task.gold.get("calls"):
                yield _preference_pair(task)

    def iter_samples(self, split: str = "test") -> Iterator[Task]:
        """Yield the tasks of `agent_benchmark`."""
        return read_tasks(f"{self.SOURCES['benchmark']}:{split}")

    def get_evaluation_data(self, split: str = "test") -> Iterator[Task]:
        """Yield the tasks to evaluate on; the document's second name for `iter_samples`."""
        return self.iter_samples(split)


def _preference_pair(task: Task) -> Preference:
    """Return the first gold call as the better turn, and a mistake that models make as the worse.

    The mistakes are: no call, the same arguments for another tool, and a text argument left out.
    """
    rng = seeded_rng("pair", task.id)
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
    """Formats a dialog as a prompt and an answer text, for text trainers (section 3.2.2).

    Sharpen's own training renders the messages themselves and does not need it. Calls are written
    whole, with their arguments, where the document writes only the tool's name.
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


@dataclass(frozen=True, slots=True)
class ProcessedDialog:
    """A dialog with what was measured on it (section 3.2.3).

    `metadata` holds `token_length`, `lexical_diversity` and, where it is known, `loss`.
    """

    dialog_id: str
    task_type: str
    text: str
    target_tools: tuple[str, ...]
    metadata: Json
    dialog: Dialog


class AgentDialogProcessor:
    """Measures dialogs, so that rows can be selected by what was measured (section 3.2.3).

    With a `scorer`, rows without a `loss` get the one that its model computes. The document fills a
    missing loss with an estimate of difficulty; here it stays missing.
    """

    def __init__(
        self,
        tokenizer: str | PreTrainedTokenizerBase = "smollm2-135m",
        scorer: Scorer | None = None,
    ):
        if isinstance(tokenizer, str):
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
