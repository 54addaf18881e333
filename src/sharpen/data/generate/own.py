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

from sharpen.data.generate.build import (
    BENCHMARK,
    SFT,
    SPLITS,
    portions,
    refuse_foreign,
    write_sets,
)
from sharpen.data.generate.openapi import openapi_tools
from sharpen.records import sha256_file
from sharpen.rows import dialog_to_row, task_to_row, tool_to_wire
from sharpen.tools import ToolResult, check_call, load_tools
from sharpen.types import (
    Dialog,
    Json,
    Message,
    Policy,
    Sampling,
    SharpenError,
    Task,
    ToolCall,
    ToolSpec,
)
from sharpen.world.fields import TODAY, Family, part, shared_pools
from sharpen.world.phrases import spoken
from sharpen.world.state import seeded

ROWS_PER_TOOL, CANDIDATES, TRIES = 40, 5, 40
KINDS = {"call": 0.6, "ask": 0.2, "decline": 0.2}
WORDS: dict[Family, tuple[str, ...]] = {
    "train": ("blue lantern", "first draft", "garden gate", "weekly notes", "paper boat"),
    "dev": ("silver spoon", "open question"),
    "test": ("stone bridge", "spare key", "late breakfast"),
}
REQUESTS: dict[Family, tuple[str, ...]] = {
    "train": ("Please {task}. {given}", "I want you to {task}. {given}", "{given} Now {task}."),
    "dev": ("Would you {task}? {given}", "My wish: {task}. {given}"),
    "test": ("Here is my case. {given} Could you {task}?", "Someone should {task}. {given}"),
}
REPHRASE = (
    "Rewrite this as one natural request to an assistant. Keep every one of these values exactly "
    "as it is written: {values}. Answer with the request only.\n\n{text}"
)


@dataclass(frozen=True, slots=True)
class OwnTool:
    spec: ToolSpec
    run: Callable[[Json], ToolResult] | None  # None: only the schema is known


def load_own(path: Path) -> list[OwnTool]:
    if path.suffix == ".py":
        return [OwnTool(tool.spec, tool.run) for tool in load_tools(path).values()]
    if path.suffix in (".json", ".yaml", ".yml"):
        return [OwnTool(spec, None) for spec in openapi_tools(path)]
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
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        high = schema.get("maximum", max(low + 20, low * 2))
        return (
            rng.randint(round(low), round(high))
            if kind == "integer"
            else round(rng.uniform(low, high), 2)
        )
    if kind == "array":
        count = rng.randint(max(1, schema.get("minItems", 1)), min(3, schema.get("maxItems", 3)))
        return [draw_value(name, schema.get("items", {}), split, rng) for _ in range(count)]
    if kind == "object":
        inner = schema.get("properties", {}).items()
        return {key: draw_value(key, value, split, rng) for key, value in inner}
    return draw_text(name, schema.get("format", ""), split, rng)


def draw_text(name: str, form: str, split: Family, rng: random.Random) -> str:
    if form in ("date", "date-time"):
        day = TODAY[split] + timedelta(days=rng.randrange(60))
        return f"{day}T09:00:00Z" if form == "date-time" else str(day)
    pools = shared_pools()
    pool = next((p for p in pools if p in (form, *name.lower().split("_"))), "")
    if name.lower().endswith("name") and not pool:
        pool = "person"
    if name.lower().endswith("id"):
        return f"{name[:2].upper()}-{rng.randrange(1000, 9999)}"
    return rng.choice(part(pools[pool], split) if pool else WORDS[split])


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
    values = f"{told[:1].upper()}{told[1:]}." if told else ""
    text = rng.choice(REQUESTS[split]).format(task=task_of(spec.description), given=values)
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
    turn = policy.respond([Dialog((Message("user", asked),))], Sampling(96, 0.7, seed=seed))[0]
    said = turn.message.content.strip().strip('"')
    return said if said and all(value in said for value in values) else text


# Rows ------------------------------------------------------------------------------------------


def own_dialog(
    tools: list[OwnTool], kind: str, split: Family, rng: random.Random, policy: Policy | None
) -> tuple[Dialog, Task] | None:
    """One dialog and the task of deciding its first turn."""
    tool = rng.choice(tools)
    arguments = arguments_for(tool.spec, split, rng)
    call = ToolCall(tool.spec.name, arguments, "call_1")
    required = tool.spec.parameters.get("required", [])
    dropped = rng.choice(required) if kind == "ask" and required else ""
    others = [t for t in tools if t is not tool]
    if check_call(call, tool.spec) or (kind == "ask" and not dropped):
        return None
    if kind == "decline" and not others:
        return None
    given = {name: value for name, value in arguments.items() if name != dropped}
    text = request_text(tool.spec, given, split, rng)
    text = rephrased(text, given, policy, rng.randrange(1 << 30)) if policy else text
    shown = rng.sample(others, min(CANDIDATES - 1, len(others)))
    shown += [] if kind == "decline" else [tool]
    rng.shuffle(shown)
    specs = tuple(t.spec for t in shown)
    messages = [Message("user", text)]
    gold: Json = {"decision": kind}
    if kind == "decline":
        messages.append(Message("assistant", "None of the tools I have here can do that."))
    elif kind == "ask":
        about = tool.spec.parameters["properties"][dropped].get("description") or dropped
        messages.append(Message("assistant", f"I still need to know: {about.rstrip('.')}."))
        messages.append(Message("user", f"{spoken(arguments[dropped])}."))
        gold |= {"tools": [tool.spec.name], "missing": [dropped]}
    else:
        gold |= {"tools": [tool.spec.name]}
        gold |= {"calls": [{"name": call.name, "arguments": arguments}]}
    if kind != "decline":
        done = called(tool, call)
        if done is None:
            return None
        messages += done
    metadata = {"kind": kind, "executed": tool.run is not None and kind != "decline"}
    task_type = "tool_selection" if kind == "call" else "timing_decision"
    dialog = Dialog(tuple(messages), specs, task_type=task_type, metadata=metadata)
    difficulty = {"call": "easy", "ask": "medium", "decline": "hard"}[kind]
    return dialog, Task("", text, specs, gold, "timing", difficulty)


def called(tool: OwnTool, call: ToolCall) -> list[Message] | None:
    """The call with its real result and an answer, the call alone where nothing can be executed,
    None when the tool failed."""
    asked = Message("assistant", tool_calls=(call,))
    if tool.run is None:
        return [asked]
    result = tool.run(call.arguments)
    if result.error:
        return None
    answer = Message("assistant", f"Here is what {call.name} found: {result.content}")
    return [asked, result.message(call), answer]


def build_own(
    path: str | Path,
    out: str | Path,
    seed: int = 0,
    rows: int | None = None,
    policy: Policy | None = None,
) -> Json:
    """The three sets over a file of tools. Tools that never succeed are left out and named."""
    path, out = Path(path), Path(out)
    refuse_foreign(out)
    tools, left_out = usable(load_own(path), seed)
    if not tools:
        raise SharpenError(f"{path}: no tool can be used: {json.dumps(left_out)}")
    total = rows or ROWS_PER_TOOL * len(tools)
    files: dict[str, list[Json]] = {
        "agent_tools/tools.jsonl": [tool_to_wire(tool.spec) for tool in tools]
    }
    taken: set[str] = set()
    for split in SPLITS:
        made = own_rows(tools, split, round(total * SFT[split]), seed, policy, taken)
        files[f"agent_sft/{split}.jsonl"] = [dialog_to_row(dialog) for dialog, _ in made]
        tasks = own_rows(tools, split, round(total * BENCHMARK[split]), seed + 1, policy, taken)
        chosen = [replace(t, kind="selection") for _, t in tasks if "calls" in t.gold]
        files[f"agent_benchmark/selection/{split}.jsonl"] = [task_to_row(t) for t in chosen]
        files[f"agent_benchmark/timing/{split}.jsonl"] = [task_to_row(t) for _, t in tasks]
    origin = {"seed": seed, "tools": {path.name: sha256_file(path)}, "left_out": left_out}
    return write_sets(out, files, origin)


def usable(tools: list[OwnTool], seed: int) -> tuple[list[OwnTool], dict[str, str]]:
    """Tools of which a call with drawn values fits and, where it can be executed, succeeds."""
    good, bad = [], {}
    for tool in tools:
        rng, reason = seeded("own", seed, tool.spec.name), ""
        for _ in range(TRIES):
            call = ToolCall(tool.spec.name, arguments_for(tool.spec, "train", rng))
            reason = "; ".join(check_call(call, tool.spec))
            if not reason and tool.run is not None:
                result = tool.run(call.arguments)
                reason = f"{result.error}: {result.content}"[:200] if result.error else ""
            if not reason:
                break
        if reason:
            bad[tool.spec.name] = f"{reason}; give its parameters examples"
        else:
            good.append(tool)
    return good, bad


def own_rows(
    tools: list[OwnTool],
    split: Family,
    count: int,
    seed: int,
    policy: Policy | None,
    taken: set[str],
) -> list[tuple[Dialog, Task]]:
    """As many rows as wanted, or as many different ones as the tools allow."""
    shares = KINDS if len(tools) > 1 else {k: v for k, v in KINDS.items() if k != "decline"}
    made = []
    for kind, quota in portions(count, shares).items():
        rng, found = seeded("own", seed, split, kind), 0
        for _ in range(quota * TRIES):
            if found == quota:
                break
            row = own_dialog(tools, kind, split, rng, policy)
            if row is not None and row[1].instruction not in taken:
                taken.add(row[1].instruction)
                made.append(row)
                found += 1
    seeded("order", seed, split).shuffle(made)
    names = [f"own-{split}-{number:05d}" for number in range(1, len(made) + 1)]
    return [
        (replace(d, id=name), replace(t, id=name)) for name, (d, t) in zip(names, made, strict=True)
    ]
