"""Dialogs and a benchmark for one's own tools: a Python file of `@tool` functions, which are really
executed, or an OpenAPI file, whose rows end with the call. Values are drawn from the schemas,
requests worded from the descriptions, or by a policy. The splits differ in values and wording only.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml
from sharpen.data.generate import build
from sharpen.data.generate.dialog_draft import frames, parts
from sharpen.data.generate.plans import value_at, written
from sharpen.data.generate.samples import replies
from sharpen.records import sha256_file
from sharpen.rows import dialog_to_row, task_to_row, tool_to_wire
from sharpen.tools import ToolResult, check_call, load_tools, recursive_ref
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, Task, ToolCall, ToolSpec
from sharpen.world.fields import TODAY, Family, part, sentence, shared_pools
from sharpen.world.phrases import spoken
from sharpen.world.state import seeded

METHODS = ("get", "post", "put", "patch", "delete")
ROWS_PER_TOOL, CANDIDATES, TRIES = 40, 5, 40
SHARES = {"call": 0.6, "ask": 0.2, "decline": 0.2}
DIFFICULTY = {"call": "easy", "ask": "medium", "decline": "hard"}


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
        for method in (m for m in METHODS if isinstance((methods or {}).get(m), dict)):
            shared = methods.get("parameters", [])
            spec = operation_spec(document, f"{method} {route}", methods[method], shared)
            if spec.name in found:
                raise SharpenError(f"{path}: two operations are called {spec.name!r}")
            found[spec.name] = spec
    if not found:
        raise SharpenError(f"{path}: it has no operations")
    return list(found.values())


def operation_spec(document: Json, route: str, operation: Json, shared: list[Json]) -> ToolSpec:
    given = inlined([*shared, *operation.get("parameters", [])], document, route)
    body = inlined(operation.get("requestBody") or {}, document, route)
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    properties = {}
    for parameter in given:
        kind = parameter.get("schema") or {"type": parameter.get("type", "string")}
        told = parameter.get("description")
        properties[parameter["name"]] = kind | ({"description": told} if told else {})
    properties |= schema.get("properties", {})
    required = {p["name"] for p in given if p.get("required")} | {*schema.get("required", [])}
    parameters = {"type": "object", "properties": properties, "required": sorted(required)}
    name = re.sub(r"\W+", "_", operation.get("operationId") or route).strip("_")
    about = operation.get("description") or operation.get("summary") or route
    return ToolSpec(name, about, parameters)


def inlined(value: Any, document: Json, where: str) -> Any:
    """The value with local references put in their place."""
    if isinstance(value, list):
        return [inlined(item, document, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" not in value:
        return {key: inlined(item, document, where) for key, item in value.items()}
    target = value_at(document, str(value["$ref"]).removeprefix("#/").split("/"))
    if target is None:
        raise SharpenError(f"{where}: $ref {value['$ref']!r} leads nowhere in the file")
    return inlined(target, document, where)


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


def draw_call(spec: ToolSpec, split: Family, rng: random.Random) -> ToolCall:
    """The required parameters, and now and then an optional one."""
    arguments, required = {}, spec.parameters.get("required", [])
    for name, schema in spec.parameters.get("properties", {}).items():
        if name in required or rng.random() < 0.3:
            arguments[name] = draw_value(name, schema, split, rng)
    return ToolCall(spec.name, arguments, "call_1")


def task_of(description: str) -> str:
    """A description's first sentence as a verb phrase: "Finds a van." → "find a van"."""
    verb, _, rest = description.split(". ")[0].strip().rstrip(".").partition(" ")
    verb = re.sub(r"ies$", "ys", verb)  # copies, fetches, finds; but not pass
    verb = re.sub(r"(?<=ch|sh|ss|.x)es$|(?<!s)s$", "", verb)
    return f"{verb[:1].lower()}{verb[1:]} {rest}".strip()


def rephrased(text: str, given: Json, policy: Policy, seed: int) -> str:
    """The policy's wording, if it kept every value; else the plain one."""
    values = [spoken(value) for value in given.values()]
    asked = frames("rephrase").format(values=", ".join(values) or "none", text=text)
    said = replies(policy, [asked], 96, 0.7, seed)[0].message.content.strip().strip('"')
    return said if said and all(value in said for value in values) else text


def solved(tool: Own, call: ToolCall) -> tuple[list[Message], str]:
    """The call, where it can be executed with its real result and an answer; and what is wrong."""
    problems, asked = check_call(call, tool.spec), Message("assistant", tool_calls=(call,))
    if problems or tool.run is None:
        return [asked], "; ".join(problems)
    result = tool.run(call.arguments)
    wrong = f"{result.error}: {result.content}"[:200] if result.error else ""
    answer = Message("assistant", f"Here is what {call.name} found: {result.content}")
    return [asked, result.message(call), answer], wrong


def why_unusable(tool: Own, seed: int) -> str:
    """Why no call with drawn values fits and, where it can be executed, succeeds; else empty."""
    rng, reason = seeded("own", seed, tool.spec.name), ""
    for _ in range(TRIES):
        reason = solved(tool, draw_call(tool.spec, "train", rng))[1]
        if not reason:
            return ""
    return f"{reason}; give its parameters examples"


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Dialogs, each with the task of deciding its first turn. No request is made twice."""

    tools: list[Own]
    policy: Policy | None
    taken: set[str] = field(default_factory=set)

    def draw(self, kind: str, split: Family, rng: random.Random) -> tuple[Dialog, Task] | None:
        tool = rng.choice(self.tools)
        spec, call = tool.spec, draw_call(tool.spec, split, rng)
        required = spec.parameters.get("required", [])
        dropped = rng.choice(required) if kind == "ask" and required else ""
        if check_call(call, spec) or (kind == "ask" and not dropped):
            return None
        given = {name: value for name, value in call.arguments.items() if name != dropped}
        told = sentence(f"{spoken(given)}.") if given else ""
        frame = rng.choice(frames(split)["own_requests"])
        text = " ".join(frame.format(task=task_of(spec.description), given=told).split())
        if self.policy:
            text = rephrased(text, given, self.policy, rng.randrange(1 << 30))
        others = [t.spec for t in self.tools if t is not tool]
        shown = rng.sample(others, min(CANDIDATES - 1, len(others)))
        shown += [] if kind == "decline" else [spec]
        rng.shuffle(shown)
        messages, gold = [Message("user", text)], Json(decision=kind)
        done, wrong = [Message("assistant", "None of the tools I have here can do that.")], ""
        if kind != "decline":
            done, wrong = solved(tool, call)
            gold["tools"] = [spec.name]
        if kind == "call":
            gold["calls"] = written(call)
        if kind == "ask":
            gold["missing"] = [dropped]
            about = spec.parameters["properties"][dropped].get("description") or dropped
            messages.append(Message("assistant", f"I still need to know: {about.rstrip('.')}."))
            messages.append(Message("user", f"{spoken(call.arguments[dropped])}."))
        if wrong or text in self.taken:
            return None
        self.taken.add(text)
        task_type = "tool_selection" if kind == "call" else "timing_decision"
        about = {"kind": kind, "executed": tool.run is not None and kind != "decline"}
        dialog = Dialog((*messages, *done), tuple(shown), task_type=task_type, metadata=about)
        return dialog, Task("", text, dialog.tools, gold, "timing", DIFFICULTY[kind])

    def rows(self, split: Family, count: int, seed: int) -> list[tuple[Dialog, Task]]:
        """As many rows as wanted, or as many different ones as the tools allow."""
        shares = SHARES if len(self.tools) > 1 else SHARES | {"decline": 0.0}
        made = []
        for kind, quota in build.portions(count, shares).items():
            rng = seeded("own", seed, split, kind)
            drawn = (self.draw(kind, split, rng) for _ in range(quota * TRIES))
            made += islice(filter(None, drawn), quota)
        seeded("order", seed, split).shuffle(made)
        named = [(f"own-{split}-{number:05d}", *row) for number, row in enumerate(made, 1)]
        return [(replace(dialog, id=name), replace(task, id=name)) for name, dialog, task in named]


def build_own(
    path: Path, out: Path, seed: int = 0, rows: int | None = None, policy: Policy | None = None
) -> Json:
    """The three sets over a file of tools. Tools that never succeed are left out and named."""
    build.refuse_foreign(out)
    tools = load_own(path)
    reasons = {tool.spec.name: why_unusable(tool, seed) for tool in tools}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    own = OwnRows([tool for tool in tools if tool.spec.name not in left_out], policy)
    if not own.tools:
        raise SharpenError(f"{path}: no tool can be used: {json.dumps(left_out)}")
    total = rows or ROWS_PER_TOOL * len(own.tools)
    files = {"agent_tools/tools.jsonl": [tool_to_wire(tool.spec) for tool in own.tools]}
    for split in build.SPLITS:
        made = own.rows(split, round(total * parts()["sft"].splits[split]), seed)
        files[f"agent_sft/{split}.jsonl"] = [dialog_to_row(dialog) for dialog, _ in made]
        made = own.rows(split, round(total * parts()["timing"].splits[split]), seed + 1)
        tasks = [task for _, task in made]
        chosen = [replace(task, kind="selection") for task in tasks if "calls" in task.gold]
        for name, found in (("selection", chosen), ("timing", tasks)):
            files[f"agent_benchmark/{name}/{split}.jsonl"] = [task_to_row(task) for task in found]
    origin = {"seed": seed, "tools": {path.name: sha256_file(path)}, "left_out": left_out}
    return build.write_sets(out, files, origin)
