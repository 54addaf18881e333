"""Tool calls against what was wanted: is a call valid, is it the right one, and how near did it
come? One comparison serves rewards, metrics and BFCL rows."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.rewards.literals import TYPES, read_literal
from sharpen.rows import call_from_wire
from sharpen.tools import check_call
from sharpen.types import Json, Message, RowError, Score, Task, ToolCall, ToolSpec, Trajectory

MAX_CALLS = 64  # predicted calls that are compared; more of them only count as wrong
# In JSON text: "$var1.price$", "API_call_0" or {"$from": "s1.price"}, for an earlier result.
REFERENCE = re.compile(
    r'"\$(\w++)(\.[^"$]*+)?\$"|"(API_call_\d++)"|\{"\$from": "(\w++)(\.[^"]*+)?"\}'
)
LOOSE = re.compile(r"[ ,./\-_*^]")


def call_problems(message: Message, tools: Sequence[ToolSpec]) -> list[str]:
    """Why a message is not a valid call of the offered tools; empty when every call in it is."""
    offered = {tool.name: tool for tool in tools}
    if not message.tool_calls and not message.unparsed:
        return ["no tool call"]
    problems = [f"broken call: {bad.reason}" for bad in message.unparsed]
    for call in message.tool_calls:
        if call.name in offered:
            problems += [f"{call.name}: {text}" for text in check_call(call, offered[call.name])]
        else:
            problems.append(f"tool {call.name!r} is not offered")
    return problems


def call_key(call: ToolCall, spec: ToolSpec | None = None) -> str:
    """The same text for calls that ask for the same; a default value is as if it were not given."""
    default = defaults(spec)
    given = {n: v for n, v in call.arguments.items() if n not in default or v != default[n]}
    return f"{call.name} {value_key(given)}"


def defaults(spec: ToolSpec | None) -> Json:
    fields = spec.parameters.get("properties") or {} if spec else {}
    return {n: f["default"] for n, f in fields.items() if isinstance(f, dict) and "default" in f}


def value_key(value: object) -> str:
    try:
        return json.dumps(plain(value), sort_keys=True, default=repr)
    except (RecursionError, TypeError, ValueError):  # too deep, or not JSON: equal to itself only
        return f"{type(value).__name__} {id(value)}"


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def equal_value(a: object, b: object) -> bool:
    """2 equals 2.0, but True is not 1; case and blanks around text do not matter."""
    return value_key(a) == value_key(b)


def as_call(value: Any) -> ToolCall | None:
    """A call, or a dict that names its tool (`name`, `tool`, `action`) and arguments; else None."""
    if isinstance(value, Mapping) and "function" not in value:
        name = value.get("name", value.get("tool", value.get("action")))
        arguments = value.get("arguments", value.get("action_input"))
        value = {"name": name, "arguments": arguments, "id": value.get("label", value.get("id"))}
    try:
        return value if isinstance(value, ToolCall) else call_from_wire(value)
    except (RowError, RecursionError):
        return None


def references(value: Any) -> list[str]:
    """Labels of the earlier results that a value refers to."""
    return [found[1] or found[3] or found[4] for found in REFERENCE.finditer(json.dumps(value))]


def resolve(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """References to earlier calls as digests of what those ask for: labels do not matter."""
    known, done = dict[str, str](), list[ToolCall]()

    def point(found: re.Match[str]) -> str:
        digest = known.get(found[1] or found[3] or found[4])
        return f'"${digest}{found[2] or found[5] or ""}$"' if digest else found[0]

    if not any(references(call.arguments) for call in calls):
        return list(calls)
    for i, call in enumerate(calls):
        arguments = json.loads(REFERENCE.sub(point, json.dumps(call.arguments)))
        done.append(ToolCall(call.name, arguments, call.id))
        digest = hashlib.blake2b(call_key(done[-1]).encode(), digest_size=12).hexdigest()
        labels = (call.id,) if call.id else (f"var{i + 1}", f"s{i + 1}", f"API_call_{i}")
        known |= dict.fromkeys(labels, digest)
    return done


class ToolCallEvaluator:
    """Compares calls. With `allowed`, expected arguments are lists of allowed values as in BFCL's
    possible answers (`""` among them: may be left out), judged as its AST checker does."""

    def __init__(
        self, tools: Sequence[ToolSpec] = (), allowed: bool = False, language: str = "python"
    ):
        self.tools = {tool.name: tool for tool in tools}
        self.allowed, self.language = allowed, language.lower()

    def evaluate(self, predicted_call: Any, expected_call: Any) -> Json:
        predicted, expected = as_call(predicted_call), as_call(expected_call)
        rate = self.rate(predicted, expected) if predicted and expected else 0.0
        named = bool(predicted and expected and predicted.name == expected.name)
        found = {"tool_name_correct": named, "args_correct": rate == 1}
        return found | {"overall_correct": named and rate == 1, "args_match_rate": rate}

    def evaluate_calls(self, predicted: Sequence[Any], expected: Sequence[Any]) -> Json:
        """Calls in any order: `overall_correct`; precision, recall and F1 over call instances, the
        right tool with wrong arguments earning 0.25 to 0.75; `exact`, the places of right calls."""
        found, wanted = [[as_call(c) for c in calls] for calls in (predicted, expected)]
        pairs = self.pairs([c for c in found if c], [c for c in wanted if c])
        earned = sum(credit for *_, credit in pairs)
        precision = earned / len(found) if found else float(not wanted)
        recall = earned / len(wanted) if wanted else float(not found)
        f1 = 2 * precision * recall / (precision + recall) if earned else precision * recall
        scores = {"precision": precision, "recall": recall, "f1": f1}
        exact = [place for place, _, credit in pairs if credit == 1]
        return scores | {"overall_correct": len(found) == len(wanted) == earned, "exact": exact}

    def pairs(
        self, predicted: Sequence[ToolCall], expected: Sequence[ToolCall]
    ) -> list[tuple[int, int, float]]:
        """(predicted, expected, credit): equal calls first, then those of the same tool."""
        try:
            found, wanted = resolve(predicted[:MAX_CALLS]), resolve(expected)
        except (RecursionError, TypeError, ValueError):
            return []
        both = itertools.product(enumerate(wanted), enumerate(found))
        rates = [(-self.rate(c, want), j, i) for (j, want), (i, c) in both if c.name == want.name]
        used, out = set[int](), dict[int, tuple[int, int, float]]()
        for rate, j, i in sorted(rates):
            if j not in out and i not in used:
                used.add(i)
                out[j] = i, j, 1.0 if rate == -1 else 0.25 - 0.5 * rate
        return list(out.values())

    def rate(self, call: ToolCall, want: ToolCall) -> float:
        """The share of arguments that are right, over all that were given or wanted."""
        spec = self.tools.get(want.name)
        if not self.allowed:
            given, due = defaults(spec) | call.arguments, defaults(spec) | want.arguments
            both = {n: n in given and n in due for n in given | due}
            right = {n: known and equal_value(given[n], due[n]) for n, known in both.items()}
        else:
            schema, fields = spec.parameters if spec else {}, want.arguments
            right = {name: "" in values for name, values in fields.items()}
            right |= dict.fromkeys(schema.get("required") or (), False)
            for name, value in call.arguments.items():
                field = (schema.get("properties") or {}).get(name, None if spec else {})
                given = value, fields.get(name, ())
                right[name] = field is not None and fits(*given, field, self.language)
        return sum(right.values()) / len(right) if right else 1.0


def fits(value: Any, allowed: Sequence[Any], field: Json, language: str) -> bool:
    """Whether a value is among the allowed ones and of the declared type. Where those are of
    another type they are a variable's name, which has to be exact."""
    kind, shown = str(field.get("type")), first_type(allowed)
    inner = str((field.get("items") or {}).get("type")) if TYPES.get(kind) is list else ""
    if language != "python":
        if not isinstance(value, str):
            return False
        value = read_literal(value, language, kind, inner)
    elif TYPES.get(kind) is float and type(value) is int:
        value = float(value)
    wanted, within = TYPES.get(kind, shown), TYPES.get(inner)
    if type(value) is not wanted or shown not in (None, wanted):
        return type(value) in (shown, wanted) and value in allowed
    if wanted is dict:
        return any(dict_fits(value, option) for option in allowed)
    if wanted is not list:
        return loose(value) in [*map(loose, allowed)]
    if within and not any(
        option == "" or all(type(v) in (within, first_type(option)) for v in value)
        for option in allowed
    ):
        return False
    if within is dict:
        return any(len(o) == len(value) and all(map(dict_fits, value, o)) for o in allowed)
    return [*map(loose, value)] in [[*map(loose, option)] for option in allowed]


def first_type(values: Sequence[Any]) -> type | None:
    return next((type(value) for value in values if value != ""), None)


def dict_fits(value: Any, option: Any) -> bool:
    """Every key of the value has one of its allowed values, and none is missing."""
    if not isinstance(value, dict) or not isinstance(option, dict):
        return False
    right = [k in option and loose(v) in [*map(loose, option[k])] for k, v in value.items()]
    return all(right) and all(key in value or "" in values for key, values in option.items())


def loose(value: Any) -> Any:
    """Text without case, blanks and light punctuation."""
    return LOOSE.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


class CallReward:
    """1 when the first turn makes exactly the calls of `gold["calls"]`; parts say how near."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = trajectory.turns[0].message if trajectory.turns else Message("assistant")
        found, gold = message.tool_calls, task.gold["calls"]
        wanted = [call_from_wire(c, task.id, f"gold.calls[{i}]") for i, c in enumerate(gold)]
        allowed, language = task.gold.get("match") == "allowed", task.gold.get("language", "python")
        judge = ToolCallEvaluator(task.tools, allowed, language)
        problems = call_problems(message, task.tools) if wanted or found or message.unparsed else []
        names = [sorted(call.name for call in calls) for calls in (found, wanted)]
        exact = judge.evaluate_calls([*found, *message.unparsed], wanted)["overall_correct"]
        parts = {"valid_call": float(not problems), "right_tool": float(names[0] == names[1])}
        return Score(float(exact), parts | {"exact_call": float(exact)}, "; ".join(problems))
