"""Chat rows and preferences. `openai` also reads the older `functions` and LLaMA-Factory's v1
rows, whose content is a list of parts. A `chosen` beside a `rejected` makes a pair of a ShareGPT or
Alpaca row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sharpen.data.check import Noun
from sharpen.data.importers import common
from sharpen.data.importers.common import Importer, has, require
from sharpen.types import Dialog, Json, Message, Preference, RowError, ToolCall, ToolSpec

SPEAKERS = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt chatgpt",
    "call": "function_call",
    "tool": "tool function observation function_response",
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
GLAIVE_ARGUMENTS = re.compile(r"""("arguments":\s*)'(.*)'(\s*\})""", re.S)
NOT_OPENAI = {"label", "chosen_response", "Annotator Metadata"}
PAIRS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
SCORES = {"chosen_score": "score_chosen", "rejected_score": "score_rejected"}


def said(value: Any, role: Any = None) -> tuple[Message, ...]:
    """A list of messages, one of them, or a text by `role`."""
    if role and isinstance(value, str):
        return (Message(role, value),)
    require(value and isinstance(value, (list, dict)), "no messages")
    return tuple(message(m) for m in ([value] if isinstance(value, dict) else value))


def message(value: Json) -> Message:
    """`role` and `content`, or `from` and `value`."""
    speaker = value.get("role") or value.get("from")
    role: Any = ROLES.get(speaker)  # type: ignore[arg-type]
    if role is None:
        raise RowError("", f"unknown role {speaker!r}")
    content, calls = content_of(value.get("content", value.get("value")))
    if role == "call":
        found = common.literal(content)
        calls = [common.call_from(call) for call in (found if isinstance(found, list) else [found])]
        return Message("assistant", "", tuple(calls))
    if role == "tool":
        name, call_id = (value.get(key) or "" for key in ("name", "tool_call_id"))
        return Message("tool", content, (), (), name, call_id)
    calls += [common.call_from(call) for call in value.get("tool_calls") or []]
    if value.get("function_call"):
        calls.append(common.call_from(value["function_call"]))
    weight = value.get("weight", value.get("loss_weight"))  # OpenAI's and LLaMA-Factory's name
    require(weight in (None, 0, 1), f"weight: expected 0 or 1, found {weight!r}")
    return Message(role, content, tuple(calls), trained=weight != 0 or role != "assistant")


def content_of(value: Any) -> tuple[str, list[ToolCall]]:
    """Text or a list of parts → the text and the calls in it; reasoning goes between think tags."""
    if value is None or isinstance(value, str):
        return value or "", []
    text, calls = "", []
    for part in value:
        body, kind = part.get("text", part.get("value")), part.get("type")
        if kind == "tool_call":
            calls.append(common.call_from(body))
            continue
        require(isinstance(body, str), f"content part {kind!r} is not text")
        text += f"<think>\n{body}\n</think>\n\n" if kind == "reasoning" else body
    return text, calls


def fields(row: Json, *known: str) -> Json:
    """What any chat row may have: tools, an id, and as metadata whatever has no other place."""
    metadata = common.rest(row, "tools", "functions", "id", "metadata", *known)
    return {
        "tools": common.tools_from(row.get("tools") or row.get("functions")),
        "id": str(row.get("id") or ""),
        "metadata": (row.get("metadata") or {}) | metadata,
    }


@Importer(lambda row: "role" in row["messages"][0] and not NOT_OPENAI & set(row))
def openai(row: Json) -> Dialog:
    shared_fields = fields(row, "messages", "task_type")
    kind = row.get("task_type") or ""
    return Dialog(said(row["messages"]), task_type=kind, **shared_fields)


def pair_or_dialog(row: Json, prompt: tuple[Message, ...], answer: Any, *known: str) -> Noun:
    shared_fields = fields(row, "system", *PAIRS[0], *known)
    if "chosen" in row:
        chosen, rejected = (said(row[key], "assistant") for key in PAIRS[0])
        return Preference(prompt, chosen, rejected, **shared_fields)
    return Dialog(prompt + answer, **shared_fields)


@Importer(lambda row: "value" in row["conversations"][0] and not is_hermes(row))
def sharegpt(row: Json) -> Noun:
    for turn in row["conversations"]:
        text = turn.get("value", turn.get("content"))
        require(isinstance(text, str), f"turn of {turn.get('from')!r} without text")
    first = [Message("system", row["system"])] if row.get("system") else []
    prompt = common.joined((*first, *map(message, row["conversations"])))
    return pair_or_dialog(row, prompt, (), "conversations")


def is_alpaca(row: Json) -> bool:
    answered = "output" in row or "chosen" in row
    return answered and "**Available Tools**" not in row["instruction"] and "gold" not in row


@Importer(is_alpaca)
def alpaca(row: Json) -> Noun:
    prompt = [Message("system", row["system"])] if row.get("system") else []
    for request, answered in row.get("history") or []:
        prompt += [Message("user", request), Message("assistant", answered)]
    request = "\n\n".join(t for t in (row["instruction"], row.get("input")) if t)
    prompt.append(Message("user", request))
    answer = (Message("assistant", row["output"]),) if "chosen" not in row else ()
    known = ("instruction", "input", "output", "history")
    return pair_or_dialog(row, tuple(prompt), answer, *known)


def is_hermes(row: Json) -> bool:
    texts = [t.get("value", t.get("content")) for t in row.get("conversations") or row["messages"]]
    return any("<tools>" in t or "<tool_call>" in t for t in texts if isinstance(t, str))


@Importer(is_hermes)
def hermes(row: Json) -> Dialog:
    """Tools, calls and results are text between tags."""
    shared_fields = fields(row, "conversations", "messages")
    turns: list[Message] = []
    pending: list[ToolCall] = []
    for turn in said(row.get("conversations") or row["messages"]):
        text = turn.content
        if turn.role == "tool" or (turn.role == "user" and "<tool_response>" in text):
            turns += hermes_results(text, pending)
        elif turn.role == "assistant":
            pending = [common.call_from(body.strip()) for body in HERMES_CALL.findall(text)]
            text = HERMES_CALL.sub("", text)
            require("<tool_call>" not in text, "a <tool_call> is not closed")
            turns.append(Message("assistant", text.strip(), tuple(pending)))
        else:
            shared_fields["tools"] = shared_fields["tools"] or hermes_tools(
                text if turn.role == "system" else ""
            )
            turns.append(turn)
    return Dialog(tuple(turns), **shared_fields)


def hermes_tools(text: str) -> tuple[ToolSpec, ...]:
    """The last non-empty tools block: a JSON list, or one JSON object a line."""
    blocks = re.findall(r"<tools>\s*([\[{].*?)\s*</tools>", text, re.S)
    if not blocks:
        return ()
    try:
        return common.tools_from(common.literal(blocks[-1]))
    except ValueError:
        return common.tools_from([line for line in blocks[-1].splitlines() if line.strip()])


def hermes_results(text: str, pending: list[ToolCall]) -> Iterator[Message]:
    """One tool message a response; the name is written inside it, else it is the call's."""
    for body in re.findall(r"<tool_response>(.*?)</tool_response>", text, re.S) or [text]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = body.strip()
        name = pending.pop(0).name if pending else ""
        if has("name content")(value):
            name, value = str(value["name"]), value["content"]
        yield Message("tool", common.as_text(value), name=name)


@Importer(has("system chat"))
def glaive(row: Json) -> Dialog:
    """One `chat` text of turns with `<functioncall>` inside, function JSON in the `system` text."""
    turns, name = [], ""
    _, *parts = re.split(r"(?m)^\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?", row["chat"])
    for speaker, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.replace("<|endoftext|>", "").strip()
        if speaker == "FUNCTION RESPONSE":
            turns.append(Message("tool", text, name=name))
        elif speaker == "ASSISTANT" and "<functioncall>" in text:
            thought, _, body = text.partition("<functioncall>")
            # the arguments are JSON inside single quotes, so the whole is not JSON until unquoted
            call = common.call_from(GLAIVE_ARGUMENTS.sub(r"\1\2\3", body.strip()))
            turns.append(Message("assistant", thought.strip(), (call,)))
            name = call.name
        else:
            turns.append(Message("user" if speaker == "USER" else "assistant", text))
    return Dialog(common.joined(turns), common.tools_from(list(objects_in(row["system"]))))


def objects_in(text: str) -> Iterator[Any]:
    """Every JSON object that stands in the text, one after another."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        yield value
        at = text.find("{", end)


def is_preference(row: Json) -> bool:
    other = {"instruction", "conversations"}
    return any(set(pair) <= set(row) for pair in PAIRS) and not other & set(row)


@Importer(is_preference)
def preference(row: Json) -> Preference:
    keys = next((pair for pair in PAIRS if pair[0] in row), PAIRS[0])
    chosen, rejected = (said(row[key], "assistant") for key in keys)
    prompt = said(row["prompt"], "user") if row.get("prompt") else ()
    if not prompt:  # both sides hold the whole dialog: what they share is the prompt
        both = list(zip(chosen, rejected, strict=False))
        shared = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    complete = prompt and chosen and rejected
    require(complete, "chosen and rejected need a prompt and different continuations")
    scores = {key: row.get(key, row.get(other)) for key, other in SCORES.items()}
    shared_fields = fields(row, "prompt", *SCORES, *SCORES.values(), *PAIRS[0], *PAIRS[1])
    return Preference(prompt, chosen, rejected, **scores, **shared_fields)


@Importer(lambda row: isinstance(row["label"], bool) and {"messages", "completion"} & set(row))
def kto(row: Json) -> Dialog:
    """An unpaired verdict is a dialog whose `metadata.label` says whether it is good."""
    label = row["label"]
    require(isinstance(label, bool), f"label: expected true or false, found {label!r}")
    if "messages" in row:
        turns = said(row["messages"])
    else:
        turns = said(row["prompt"], "user") + said(row["completion"], "assistant")
    return Dialog(turns, **fields(row, "messages", "prompt", "completion"))


@Importer(has("pos_answer neg_answer"))
def themis(row: Json) -> Preference:
    """The tool traces that tell the two answers apart are metadata."""
    sides = {"chosen": row["pos_answer"], "rejected": row["neg_answer"]}
    kept = [(name, key) for name in sides for key in ("actions", "score_agent")]
    traces: Json = {f"{name}_{key}": sides[name].get(key) for name, key in kept}
    chosen, rejected = (said(side["answer"], "assistant") for side in sides.values())
    good, bad = (float(side["score"]) for side in sides.values())
    prompt = said(row["question"], "user")
    return Preference(prompt, chosen, rejected, (), row["id"], good, bad, traces)
