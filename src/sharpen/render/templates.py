"""The choice of a chat template, our own template, and what no template can express.

`renderer.py` uses these functions. Our own template is rendered in Python, without Jinja;
`templates/hermes.jinja` is the same template for other libraries. Trainers save it with a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from sharpen.calls import CLOSE_CALL, OPEN_CALL, assistant_text, compact_json
from sharpen.render.special_text import special_tokens
from sharpen.rows import tool_to_wire
from sharpen.types import Dialog, RowError, SharpenError, ToolSpec

Run = tuple[str, bool]  # a text, and whether it is trained
HERMES_GENERATION_PROMPT = "<|im_start|>assistant\n"


def hermes_template() -> str:
    """Returns our chat template as Jinja, for tokenizers that are saved with a trained model."""
    return resources.files("sharpen").joinpath("templates/hermes.jinja").read_text("utf-8")


def choose_template(tokenizer: Any, template: str) -> str | None:
    """Returns the Jinja source of the model's template, or None for our own template.

    `template` is "model", "hermes" (ours) or "auto": the model's, if it supports tools.
    """
    model_template = tokenizer.chat_template or ""
    if isinstance(model_template, dict):
        model_template = model_template.get("tool_use") or model_template.get("default") or ""
    if template not in ("auto", "model", "hermes"):
        raise SharpenError(f"template {template!r}: expected auto, model or hermes")
    if model_template == hermes_template():
        return None
    supports_tools = re.search(r"\btools\b", model_template)
    if template == "model" or (template == "auto" and supports_tools):
        if OPEN_CALL not in model_template and OPEN_CALL not in tokenizer.get_vocab():
            reason = f"its chat template does not write calls as {OPEN_CALL}; use template=hermes"
            raise SharpenError(f"{tokenizer.name_or_path}: {reason}")
        return model_template
    known = special_tokens(tokenizer)
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in known]
    if missing:
        raise SharpenError(
            f"{tokenizer.name_or_path}: its chat template has no tools and its tokenizer lacks "
            f"{' and '.join(missing)}, which our template needs; add them as special tokens"
        )
    return None


def hermes_runs(dialog: Dialog, protect: Callable[[str], str]) -> list[Run]:
    """Cut a dialog into untrained and trained runs by our own template.

    The last run is the text after the last assistant turn. A test checks that the runs are equal to
    `hermes.jinja`.
    """
    messages = dialog.messages
    system = ""
    if messages[0].role == "system":
        system = protect(messages[0].content)
        messages = messages[1:]
    tools = protect(tools_block(dialog.tools)) if dialog.tools else ""

    untrained = ""  # the text since the last assistant turn
    if system or tools:
        separator = "\n\n" if system and tools else ""
        untrained = f"<|im_start|>system\n{system}{separator}{tools}<|im_end|>\n"
    runs: list[Run] = []
    for message in messages:
        if message.role == "assistant":
            runs.append((untrained + HERMES_GENERATION_PROMPT, False))
            text = protect(assistant_text(message, dialog.id))
            runs.append((f"{text}<|im_end|>", message.trained))
            untrained = "\n"
        elif message.role == "tool":
            result = f"<tool_response>\n{protect(message.content)}\n</tool_response>"
            untrained += f"<|im_start|>tool\n{result}<|im_end|>\n"
        else:
            untrained += f"<|im_start|>{message.role}\n{protect(message.content)}<|im_end|>\n"
    runs.append((untrained, False))
    return runs


def tools_block(tools: tuple[ToolSpec, ...]) -> str:
    """Returns the part of our system message that lists the tools, one per line."""
    lines = "\n".join(compact_json(tool_to_wire(tool)["function"]) for tool in tools)
    example = f'{OPEN_CALL}{{"name":...,"arguments":{{...}}}}{CLOSE_CALL}'
    return f"<tools>\n{lines}\n</tools>\nCall a tool with {example}"


def check_dialog(dialog: Dialog) -> None:
    """Raise for what no template can express.

    That is an empty dialog, a system message that is not the first, and call markers as text.
    """
    if not dialog.messages:
        raise RowError(dialog.id, "the dialog has no messages")
    for index, message in enumerate(dialog.messages):
        if message.role == "system" and index:
            raise RowError(dialog.id, f"messages[{index}]: a system message can only stand first")
        if message.role == "assistant" and OPEN_CALL in message.content:
            reason = f"assistant text contains {OPEN_CALL}; use tool_calls for calls"
            raise RowError(dialog.id, f"messages[{index}]: {reason}")


def not_append_only_error(where: str, index: int) -> RowError:
    """Returns the error for a template that changes the text before message `index`."""
    reason = (
        "the model's chat template is not append-only (it rewrites earlier text when a turn is "
        "added), so no loss mask is right; use template=hermes"
    )
    return RowError(where, f"messages[{index}]: {reason}")
