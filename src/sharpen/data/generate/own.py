"""Dialogs and a benchmark for one's own tools: a Python file of `@tool` functions, which are really
executed, or an OpenAPI file, whose rows end with the call. Values are drawn from the schemas,
requests worded from the descriptions, or by a policy. The splits differ in values and wording only.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml
from sharpen.data.generate import build
from sharpen.data.generate.reasoning import replies
from sharpen.data.generate.scene import parts
from sharpen.data.generate.splits import frames
from sharpen.records import sha256_file
from sharpen.rows import dialog_to_row, task_to_row, tool_to_wire
from sharpen.tools import ToolResult, check_call, load_tools, recursive_ref
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, Task, ToolCall, ToolSpec
from sharpen.world.fields import TODAY, Family, part, sentence, shared_pools
from sharpen.world.phrases import spoken
from sharpen.world.state import seeded

METHODS = ("get", "post", "put", "patch", "delete")
ROWS_PER_TOOL, CANDIDATES, TRIES = 40, 5, 40
KINDS = {"call": (0.6, "easy"), "ask": (0.2, "medium"), "decline": (0.2, "hard")}


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


def openapi_tools(path: Path) -> list[ToolSpec]:
    """One tool for each operation of an OpenAPI document, with all its parameters in one schema."""
    document = read_yaml(path)  # JSON is YAML
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        raise SharpenError(f"{path}: not an OpenAPI document: it has no paths")
    if cycle := recursive_ref(document):
        raise SharpenError(f"{path}: $ref {cycle!r} contains itself")
    found: dict[str, ToolSpec] = {}
    for route, methods in document["paths"].items():
        for method in METHODS:
            operation = (methods or {}).get(method)
            if isinstance(operation, dict):
                shared = methods.get("parameters", [])
                spec = operation_spec(document, f"{method} {route}", operation, shared)
                if spec.name in found:
                    raise SharpenError(f"{path}: two operations are called {spec.name!r}")
                found[spec.name] = spec
    if not found:
        raise SharpenError(f"{path}: it has no operations")
    return list(found.values())


def operation_spec(document: Json, route: str, operation: Json, shared: list[Json]) -> ToolSpec:
    properties, required = {}, []
    for given in (*shared, *operation.get("parameters", [])):
        parameter = inlined(given, document, route)
        schema = parameter.get("schema") or {"type": parameter.get("type", "string")}
        about = parameter.get("description")
        properties[parameter["name"]] = schema | ({"description": about} if about else {})
        required += [parameter["name"]] if parameter.get("required") else []
    body = inlined(operation.get("requestBody") or {}, document, route)
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    properties |= schema.get("properties", {})
    required += schema.get("required", [])
    name = operation.get("operationId") or route
    parameters = {"type": "object", "properties": properties, "required": sorted(set(required))}
    about = operation.get("description") or operation.get("summary") or route
    return ToolSpec(re.sub(r"\W+", "_", name).strip("_"), about, parameters)


def inlined(value: Any, document: Json, where: str) -> Any:
    """The value with local references put in their place."""
    if isinstance(value, list):
        return [inlined(item, document, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        target: Any = document
        for key in str(value["$ref"]).removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        if target is None:
            raise SharpenError(f"{where}: $ref {value['$ref']!r} leads nowhere in the file")
        return inlined(target, document, where)
    return {key: inlined(item, document, where) for key, item in value.items()}


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
    asked = frames("rephrase").format(values=", ".join(values) or "none", text=text)
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
    done, wrong = [Message("assistant", "None of the tools I have here can do that.")], ""
    if kind != "decline":
        gold["tools"] = [spec.name]
        done, wrong = called(tool, call)
    if kind == "call":
        gold["calls"] = [{"name": spec.name, "arguments": arguments}]
    if kind == "ask":
        gold["missing"] = [dropped]
        about = spec.parameters["properties"][dropped].get("description") or dropped
        messages.append(Message("assistant", f"I still need to know: {about.rstrip('.')}."))
        messages.append(Message("user", f"{spoken(arguments[dropped])}."))
    if wrong:
        return None
    messages, specs = (*messages, *done), tuple(t.spec for t in shown)
    task_type = "tool_selection" if kind == "call" else "timing_decision"
    metadata = {"kind": kind, "executed": tool.run is not None and kind != "decline"}
    dialog = Dialog(messages, specs, task_type=task_type, metadata=metadata)
    return dialog, Task("", text, specs, gold, "timing", KINDS[kind][1])


def called(tool: Own, call: ToolCall) -> tuple[list[Message], str]:
    """The call, where it can be executed with its real result and an answer; and what failed."""
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
    shares = {kind: share for kind, (share, _) in KINDS.items()}
    shares |= {} if len(tools) > 1 else {"decline": 0.0}
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
    path: Path, out: Path, seed: int = 0, rows: int | None = None, policy: Policy | None = None
) -> Json:
    """The three sets over a file of tools. Tools that never succeed are left out and named."""
    build.refuse_foreign(out)
    given = [(tool, why_unusable(tool, seed)) for tool in load_own(path)]
    left_out = {tool.spec.name: reason for tool, reason in given if reason}
    tools = [tool for tool, reason in given if not reason]
    if not tools:
        raise SharpenError(f"{path}: no tool can be used: {json.dumps(left_out)}")
    total, taken = rows or ROWS_PER_TOOL * len(tools), set[str]()
    files = {"agent_tools/tools.jsonl": [tool_to_wire(tool.spec) for tool in tools]}
    for split in build.SPLITS:
        count = round(total * parts()["sft"].splits[split])
        made = own_rows(tools, split, count, seed, policy, taken)
        files[f"agent_sft/{split}.jsonl"] = [dialog_to_row(dialog) for dialog, _ in made]
        count = round(total * parts()["selection"].splits[split])
        tasks = [task for _, task in own_rows(tools, split, count, seed + 1, policy, taken)]
        chosen = [replace(task, kind="selection") for task in tasks if "calls" in task.gold]
        for name, found in (("selection", chosen), ("timing", tasks)):
            files[f"agent_benchmark/{name}/{split}.jsonl"] = [task_to_row(task) for task in found]
    origin = {"seed": seed, "tools": {path.name: sha256_file(path)}, "left_out": left_out}
    return build.write_sets(out, files, origin)
