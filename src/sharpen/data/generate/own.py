"""Dialogs and a benchmark for one's own tools: a Python file of `@tool` functions, which are really
executed, or an OpenAPI file, of which only the schema is known.

Values are drawn from the schemas (`enum`, `examples`, bounds, formats, well-known names),
requests are worded from the descriptions, or by a policy. The splits share the tools, as they must
with a few of them, and differ in values and wording. Nothing is made up where nothing was executed:
a row over an OpenAPI tool ends with the call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from sharpen.data.generate import build
from sharpen.data.generate.openapi import openapi_tools
from sharpen.data.generate.reasoning import replies
from sharpen.data.generate.splits import frames
from sharpen.records import sha256_file
from sharpen.rows import dialog_to_row, task_to_row, tool_to_wire
from sharpen.tools import ToolResult, check_call, load_tools
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, Task, ToolCall, ToolSpec
from sharpen.world.fields import TODAY, Family, part, sentence, shared_pools
from sharpen.world.phrases import spoken
from sharpen.world.state import seeded

ROWS_PER_TOOL, CANDIDATES, TRIES = 40, 5, 40
KINDS = {"call": 0.6, "ask": 0.2, "decline": 0.2}
DIFFICULTY = {"call": "easy", "ask": "medium", "decline": "hard"}
REPHRASE = (
    "Rewrite this as one natural request to an assistant. Keep every one of these values exactly "
    "as it is written: {values}. Answer with the request only.\n\n{text}"
)


@dataclass(frozen=True, slots=True)
class Own:
    spec: ToolSpec
    run: Callable[[Json], ToolResult] | None = None  # None: only the schema is known


def load_own(path: Path) -> list[Own]:
    if path.suffix == ".py":
        return [Own(tool.spec, tool.run) for tool in load_tools(path).values()]
    if path.suffix in (".json", ".yaml", ".yml"):
        return [Own(spec) for spec in openapi_tools(path)]
    raise SharpenError(f"{path}: expected a .py file with @tool functions, or an OpenAPI file")


# Values and wording ----------------------------------------------------------------------------


def draw_value(name: str, schema: Json, split: Family, rng: random.Random) -> Any:
    """A value that the schema allows; what it lists itself comes first."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        schema = next((o for o in options if o.get("type") != "null"), options[0])
    listed = schema.get("enum") or schema.get("examples")
    listed = listed or [schema[key] for key in ("const", "example") if key in schema]
    if listed:
        return rng.choice(listed)
    kind = schema.get("type", "string")
    kind = next((k for k in kind if k != "null"), "null") if isinstance(kind, list) else kind
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    high = schema.get("maximum", max(low + 20, low * 2))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randint(round(low), round(high))
    if kind == "number":
        return round(rng.uniform(low, high), 2)
    if kind == "array":
        count = rng.randint(max(1, schema.get("minItems", 1)), min(3, schema.get("maxItems", 3)))
        return [draw_value(name, schema.get("items", {}), split, rng) for _ in range(count)]
    if kind == "object":
        inner = schema.get("properties", {}).items()
        return {key: draw_value(key, value, split, rng) for key, value in inner}
    return draw_text(name.lower(), schema.get("format", ""), split, rng)


def draw_text(name: str, form: str, split: Family, rng: random.Random) -> str:
    if form in ("date", "date-time"):
        day = TODAY[split] + timedelta(days=rng.randrange(60))
        return f"{day}T09:00:00Z" if form == "date-time" else str(day)
    if name.endswith("id"):
        return f"{name[:2].upper()}-{rng.randrange(1000, 9999)}"
    known = "person" if name.endswith("name") else ""
    pool = next((p for p in shared_pools() if p in (form, *name.split("_"))), known)
    return rng.choice(part(shared_pools()[pool], split) if pool else frames(split)["own_words"])


def arguments_for(spec: ToolSpec, split: Family, rng: random.Random) -> Json:
    """The required parameters, and now and then an optional one."""
    required = spec.parameters.get("required", [])
    return {
        name: draw_value(name, schema, split, rng)
        for name, schema in spec.parameters.get("properties", {}).items()
        if name in required or rng.random() < 0.3
    }


def request_text(spec: ToolSpec, given: Json, split: Family, rng: random.Random) -> str:
    told = ", ".join(f"{name.replace('_', ' ')} {spoken(value)}" for name, value in given.items())
    frame = rng.choice(frames(split)["own_requests"])
    text = frame.format(task=task_of(spec.description), given=sentence(f"{told}.") if told else "")
    return " ".join(text.split())


def task_of(description: str) -> str:
    """A description's first sentence as a verb phrase: "Finds a van." → "find a van"."""
    verb, _, rest = description.split(". ")[0].strip().rstrip(".").partition(" ")
    if verb.endswith("ies"):
        verb = verb[:-3] + "y"
    elif verb.endswith(("ches", "shes", "sses", "xes")):
        verb = verb[:-2]
    elif verb.endswith("s") and not verb.endswith("ss"):
        verb = verb[:-1]
    return f"{verb[:1].lower()}{verb[1:]} {rest}".strip()


def rephrased(text: str, given: Json, policy: Policy, seed: int) -> str:
    """The policy's wording, if it kept every value; else the plain one."""
    values = [spoken(value) for value in given.values()]
    asked = REPHRASE.format(values=", ".join(values) or "none", text=text)
    turn = replies(policy, [asked], 96, 0.7, seed)[0]
    said = turn.message.content.strip().strip('"')
    return said if said and all(value in said for value in values) else text


# Rows ------------------------------------------------------------------------------------------


def own_row(
    tools: list[Own], kind: str, split: Family, rng: random.Random, policy: Policy | None
) -> tuple[Dialog, Task] | None:
    """One dialog and the task of deciding its first turn."""
    tool = rng.choice(tools)
    spec, arguments = tool.spec, arguments_for(tool.spec, split, rng)
    call = ToolCall(spec.name, arguments, "call_1")
    required = spec.parameters.get("required", [])
    dropped = rng.choice(required) if kind == "ask" and required else ""
    if check_call(call, spec) or (kind == "ask" and not dropped):
        return None
    given = {name: value for name, value in arguments.items() if name != dropped}
    text = request_text(spec, given, split, rng)
    text = rephrased(text, given, policy, rng.randrange(1 << 30)) if policy else text
    others = [t for t in tools if t is not tool]
    shown = rng.sample(others, min(CANDIDATES - 1, len(others)))
    shown += [] if kind == "decline" else [tool]
    rng.shuffle(shown)
    messages, gold = [Message("user", text)], Json(decision=kind)
    if kind == "decline":
        messages.append(Message("assistant", "None of the tools I have here can do that."))
    else:
        gold["tools"] = [spec.name]
    if kind == "call":
        gold["calls"] = [{"name": spec.name, "arguments": arguments}]
    if kind == "ask":
        gold["missing"] = [dropped]
        about = spec.parameters["properties"][dropped].get("description") or dropped
        messages.append(Message("assistant", f"I still need to know: {about.rstrip('.')}."))
        messages.append(Message("user", f"{spoken(arguments[dropped])}."))
    if kind != "decline":
        done, wrong = called(tool, call)
        if wrong:
            return None
        messages += done
    specs, executed = tuple(t.spec for t in shown), tool.run is not None and kind != "decline"
    task_type = "tool_selection" if kind == "call" else "timing_decision"
    metadata = {"kind": kind, "executed": executed}
    dialog = Dialog(tuple(messages), specs, task_type=task_type, metadata=metadata)
    return dialog, Task("", text, specs, gold, "timing", DIFFICULTY[kind])


def called(tool: Own, call: ToolCall) -> tuple[list[Message], str]:
    """The call with its real result and an answer, or alone where nothing can be executed; and what
    went wrong."""
    asked = Message("assistant", tool_calls=(call,))
    if tool.run is None:
        return [asked], ""
    result = tool.run(call.arguments)
    wrong = f"{result.error}: {result.content}"[:200] if result.error else ""
    answer = Message("assistant", f"Here is what {call.name} found: {result.content}")
    return [asked, result.message(call), answer], wrong


def why_unusable(tool: Own, seed: int) -> str:
    """Why no call with drawn values fits and, where it can be executed, succeeds; else empty."""
    rng, reason = seeded("own", seed, tool.spec.name), ""
    for _ in range(TRIES):
        call = ToolCall(tool.spec.name, arguments_for(tool.spec, "train", rng))
        reason = "; ".join(check_call(call, tool.spec)) or called(tool, call)[1]
        if not reason:
            return ""
    return f"{reason}; give its parameters examples"


def own_rows(
    tools: list[Own], split: Family, count: int, seed: int, policy: Policy | None, taken: set[str]
) -> list[tuple[Dialog, Task]]:
    """As many rows as wanted, or as many different ones as the tools allow."""
    shares = {kind: share for kind, share in KINDS.items() if kind != "decline" or len(tools) > 1}
    made = []
    for kind, quota in build.portions(count, shares).items():
        rng, wanted = seeded("own", seed, split, kind), len(made) + quota
        for _ in range(quota * TRIES):
            if len(made) == wanted:
                break
            row = own_row(tools, kind, split, rng, policy)
            if row is not None and row[1].instruction not in taken:
                taken.add(row[1].instruction)
                made.append(row)
    seeded("order", seed, split).shuffle(made)
    named = [(f"own-{split}-{number:05d}", *row) for number, row in enumerate(made, 1)]
    return [(replace(dialog, id=name), replace(task, id=name)) for name, dialog, task in named]


def build_own(
    path: str | Path,
    out: str | Path,
    seed: int = 0,
    rows: int | None = None,
    policy: Policy | None = None,
) -> Json:
    """The three sets over a file of tools. Tools that never succeed are left out and named."""
    path, out, taken = Path(path), Path(out), set[str]()
    build.refuse_foreign(out)
    given = load_own(path)
    reasons = {tool.spec.name: why_unusable(tool, seed) for tool in given}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    tools = [tool for tool in given if tool.spec.name not in left_out]
    if not tools:
        raise SharpenError(f"{path}: no tool can be used: {json.dumps(left_out)}")
    total = rows or ROWS_PER_TOOL * len(tools)
    files = {"agent_tools/tools.jsonl": [tool_to_wire(tool.spec) for tool in tools]}
    for split in build.SPLITS:
        count = round(total * build.SFT[split])
        made = own_rows(tools, split, count, seed, policy, taken)
        files[f"agent_sft/{split}.jsonl"] = [dialog_to_row(dialog) for dialog, _ in made]
        count = round(total * build.BENCHMARK[split])
        tasks = [task for _, task in own_rows(tools, split, count, seed + 1, policy, taken)]
        chosen = [replace(task, kind="selection") for task in tasks if "calls" in task.gold]
        for name, found in (("selection", chosen), ("timing", tasks)):
            files[f"agent_benchmark/{name}/{split}.jsonl"] = [task_to_row(task) for task in found]
    origin = {"seed": seed, "tools": {path.name: sha256_file(path)}, "left_out": left_out}
    return build.write_sets(out, files, origin)
