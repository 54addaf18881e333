"""Compare tool calls with the wanted ones: is a call valid, is it the right one, how near is it?

One comparison serves the rewards, the metrics of the evaluator and BFCL rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.rewards.allowed_values import value_is_allowed
from sharpen.rows import call_from_wire
from sharpen.tools import check_call
from sharpen.types import Json, Message, RowError, Score, Task, ToolCall, ToolSpec, Trajectory

_MAX_COMPARED_CALLS = 64  # predicted calls that are compared; all others count as wrong
# In JSON text: "$var1.price$", "API_call_0" or {"$from": "s1.price"}, for an earlier result.
_REFERENCE = re.compile(
    r'"\$(\w++)(\.[^"$]*+)?\$"|"(API_call_\d++)"|\{"\$from": "(\w++)(\.[^"]*+)?"\}'
)


# Calls against the tools on offer -----------------------------------------------------------------


def call_problems(message: Message, tools: Sequence[ToolSpec]) -> list[str]:
    """Why a message is not a valid call of the offered tools; empty when every call in it is."""
    offered = {tool.name: tool for tool in tools}
    if not message.tool_calls and not message.unparsed:
        return ["no tool call"]
    problems = [f"broken call: {broken.reason}" for broken in message.unparsed]
    for call in message.tool_calls:
        if call.name in offered:
            complaints = check_call(call, offered[call.name])
            problems += [f"{call.name}: {complaint}" for complaint in complaints]
        else:
            problems.append(f"tool {call.name!r} is not offered")
    return problems


class ToolVerifier:
    """Checks calls against the tools on offer."""

    def verify(
        self, calls: Sequence[ToolCall], offered: Mapping[str, ToolSpec]
    ) -> tuple[list[str], list[str]]:
        """Returns the names that are not on offer, and a complaint about each call that does not
        fit its schema. Both are empty where the tools on offer are not known."""
        invented_names = []
        complaints = []
        for call in calls:
            if call.name not in offered:
                if offered:
                    invented_names.append(call.name)
                continue
            problems = check_call(call, offered[call.name])
            if problems:
                complaints.append(f"{call.name}: {problems[0]}")
        return invented_names, complaints


# Equality -----------------------------------------------------------------------------------------


def call_key(call: ToolCall, spec: ToolSpec | None = None) -> str:
    """Returns the same text for calls that ask for the same.

    An argument with its default value is as if it were not given."""
    defaults = _default_arguments(spec)
    arguments = {}
    for name, value in call.arguments.items():
        if name not in defaults or value != defaults[name]:
            arguments[name] = value
    return f"{call.name} {value_key(arguments)}"


def _default_arguments(spec: ToolSpec | None) -> Json:
    fields = spec.parameters.get("properties") or {} if spec else {}
    defaults = {}
    for name, field in fields.items():
        if isinstance(field, dict) and "default" in field:
            defaults[name] = field["default"]
    return defaults


def value_key(value: object) -> str:
    """Returns the same text for equal values; see `equal_value`."""
    try:
        return json.dumps(_normalize_value(value), sort_keys=True, default=repr)
    except (RecursionError, TypeError, ValueError):  # too deep, or not JSON: equal to itself only
        return f"{type(value).__name__} {id(value)}"


def _normalize_value(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, dict):
        return {key: _normalize_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalize_value(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def equal_value(a: object, b: object) -> bool:
    """2 equals 2.0, but True is not 1; case and blanks around text do not matter."""
    return value_key(a) == value_key(b)


def as_call(value: Any) -> ToolCall | None:
    """Read a call, or a dict that names its tool (`name`, `tool`, `action`) and its arguments.

    Returns None for anything else."""
    if isinstance(value, ToolCall):
        return value
    if isinstance(value, Mapping) and "function" not in value:
        value = {
            "name": value.get("name", value.get("tool", value.get("action"))),
            "arguments": value.get("arguments", value.get("action_input")),
            "id": value.get("label", value.get("id")),
        }
    try:
        return call_from_wire(value)
    except (RowError, RecursionError):
        return None


# References to earlier results --------------------------------------------------------------------


def references(value: Any) -> list[str]:
    """Returns the labels of the earlier results that a value refers to."""
    return [_label_of(match) for match in _REFERENCE.finditer(json.dumps(value))]


def _label_of(reference: re.Match[str]) -> str:
    return reference[1] or reference[3] or reference[4]


def resolve(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Replace references to earlier calls by digests of what those calls ask for.

    So two lists of calls can be compared whatever labels they use."""
    if not any(references(call.arguments) for call in calls):
        return list(calls)
    digests: dict[str, str] = {}

    def insert_digest(reference: re.Match[str]) -> str:
        digest = digests.get(_label_of(reference))
        if not digest:
            return reference[0]
        path = reference[2] or reference[5] or ""
        return f'"${digest}{path}$"'

    resolved_calls = []
    for i, call in enumerate(calls):
        arguments = json.loads(_REFERENCE.sub(insert_digest, json.dumps(call.arguments)))
        resolved_call = ToolCall(call.name, arguments, call.id)
        resolved_calls.append(resolved_call)
        digest = hashlib.blake2b(call_key(resolved_call).encode(), digest_size=12).hexdigest()
        # A call without a label goes by its place, as in NESTFUL, our plans and Seal-Tools.
        labels = [call.id] if call.id else [f"var{i + 1}", f"s{i + 1}", f"API_call_{i}"]
        for label in labels:
            digests[label] = digest
    return resolved_calls


# Comparison ---------------------------------------------------------------------------------------


class ToolCallEvaluator:
    """Compares calls. With `allowed`, expected arguments are lists of allowed values as in BFCL's
    possible answers (`""` among them: may be left out), judged as its AST checker does."""

    def __init__(
        self, tools: Sequence[ToolSpec] = (), allowed: bool = False, language: str = "python"
    ):
        self.tools = {tool.name: tool for tool in tools}
        self.allowed = allowed
        self.language = language.lower()

    def evaluate(self, predicted_call: Any, expected_call: Any) -> Json:
        """Compare one call with the expected one; a value that is no call is wrong."""
        predicted = as_call(predicted_call)
        expected = as_call(expected_call)
        if predicted and expected:
            rate = self._argument_match_rate(predicted, expected)
            name_correct = predicted.name == expected.name
        else:
            rate = 0.0
            name_correct = False
        return {
            "tool_name_correct": name_correct,
            "args_correct": rate == 1,
            "overall_correct": name_correct and rate == 1,
            "args_match_rate": rate,
        }

    def evaluate_calls(self, predicted: Sequence[Any], expected: Sequence[Any]) -> Json:
        """Compare calls in any order.

        Returns `overall_correct`; precision, recall and F1 over call instances, where the right
        tool with wrong arguments earns 0.25 to 0.75; and `exact`, the places of the right calls."""
        predicted_calls = [as_call(value) for value in predicted]
        expected_calls = [as_call(value) for value in expected]
        pairs = self.pairs(
            [call for call in predicted_calls if call], [call for call in expected_calls if call]
        )
        predicted_count = len(predicted_calls)
        expected_count = len(expected_calls)
        earned = sum(credit for _, _, credit in pairs)
        precision = earned / predicted_count if predicted_count else float(not expected_count)
        recall = earned / expected_count if expected_count else float(not predicted_count)
        f1 = precision * recall  # 1 where nothing is expected and nothing predicted
        if earned:
            f1 = 2 * precision * recall / (precision + recall)
        return {
            "precision": precision,
            "recall": recall,
            "f1": f1,
            "overall_correct": predicted_count == expected_count == earned,
            "exact": [predicted_index for predicted_index, _, credit in pairs if credit == 1],
        }

    def pairs(
        self, predicted: Sequence[ToolCall], expected: Sequence[ToolCall]
    ) -> list[tuple[int, int, float]]:
        """Match calls of the same tool, equal ones first.

        Returns (predicted index, expected index, credit) for each pair."""
        try:
            predicted_calls = resolve(predicted[:_MAX_COMPARED_CALLS])
            expected_calls = resolve(expected)
        except (RecursionError, TypeError, ValueError):
            return []
        candidates = []
        for expected_index, expected_call in enumerate(expected_calls):
            for predicted_index, predicted_call in enumerate(predicted_calls):
                if predicted_call.name == expected_call.name:
                    rate = self._argument_match_rate(predicted_call, expected_call)
                    candidates.append((rate, expected_index, predicted_index))
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        used_predictions: set[int] = set()
        pair_of_expected: dict[int, tuple[int, int, float]] = {}
        for rate, expected_index, predicted_index in candidates:
            if expected_index in pair_of_expected or predicted_index in used_predictions:
                continue
            used_predictions.add(predicted_index)
            credit = 1.0 if rate == 1 else 0.25 + 0.5 * rate
            pair_of_expected[expected_index] = (predicted_index, expected_index, credit)
        return list(pair_of_expected.values())

    def _argument_match_rate(self, call: ToolCall, expected: ToolCall) -> float:
        """Returns the share of arguments that are right, over all that are given or expected."""
        if self.allowed:
            is_right = self._compare_with_allowed(call, expected)
        else:
            is_right = self._compare_with_equal(call, expected)
        return sum(is_right.values()) / len(is_right) if is_right else 1.0

    def _compare_with_equal(self, call: ToolCall, expected: ToolCall) -> dict[str, bool]:
        """Returns for every argument, given or expected, whether both calls have the same value."""
        defaults = _default_arguments(self.tools.get(expected.name))
        arguments = defaults | call.arguments
        expected_arguments = defaults | expected.arguments
        is_right = {}
        for name in arguments | expected_arguments:
            if name in arguments and name in expected_arguments:
                is_right[name] = equal_value(arguments[name], expected_arguments[name])
            else:
                is_right[name] = False
        return is_right

    def _compare_with_allowed(self, call: ToolCall, expected: ToolCall) -> dict[str, bool]:
        """Returns for every argument, given or expected, whether its value is an allowed one."""
        spec = self.tools.get(expected.name)
        schema = spec.parameters if spec else {}
        fields = schema.get("properties") or {}
        # an argument that is not given is right if it may be left out
        is_right = {name: "" in allowed for name, allowed in expected.arguments.items()}
        for name in schema.get("required") or ():
            is_right[name] = False
        for name, value in call.arguments.items():
            unknown_field = None if spec else {}  # without a schema any name is a field
            field = fields.get(name, unknown_field)
            allowed = expected.arguments.get(name, ())
            is_right[name] = field is not None and value_is_allowed(
                value, allowed, field, self.language
            )
        return is_right


class CallReward:
    """1 when the first turn makes exactly the calls of `gold["calls"]`; parts say how near."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = trajectory.turns[0].message if trajectory.turns else Message("assistant")
        gold_rows = task.gold["calls"]
        gold_calls = [
            call_from_wire(row, task.id, f"gold.calls[{i}]") for i, row in enumerate(gold_rows)
        ]
        evaluator = ToolCallEvaluator(
            task.tools,
            allowed=task.gold.get("match") == "allowed",
            language=task.gold.get("language", "python"),
        )
        silence_is_right = not gold_calls and not message.tool_calls and not message.unparsed
        problems = [] if silence_is_right else call_problems(message, task.tools)
        names = sorted(call.name for call in message.tool_calls)
        gold_names = sorted(call.name for call in gold_calls)
        attempts = [*message.tool_calls, *message.unparsed]
        exact = float(evaluator.evaluate_calls(attempts, gold_calls)["overall_correct"])
        parts = {
            "valid_call": float(not problems),
            "right_tool": float(names == gold_names),
            "exact_call": exact,
        }
        return Score(exact, parts, "; ".join(problems))
