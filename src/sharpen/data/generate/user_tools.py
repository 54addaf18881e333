"""Build dialogs and a benchmark for a user's own tools.

`sharpen data build --tools FILE` calls `build_own`. FILE is a Python file of `@tool` functions,
which are really executed, or an OpenAPI file, whose rows end with the call. Arguments are drawn
from the schemas; requests are worded from the descriptions, or by a policy. The splits differ in
values and wording only.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sharpen.data.generate.build import SPLITS, divide_by_shares, refuse_foreign, write_sets
from sharpen.data.generate.openapi import openapi_tools
from sharpen.data.generate.plans import calls_to_json
from sharpen.data.generate.policy_samples import ask_policy
from sharpen.data.generate.schema_values import draw_call
from sharpen.data.generate.sets import frames, parts
from sharpen.records import sha256_file
from sharpen.rows import dialog_to_row, task_to_row, tool_to_wire
from sharpen.tools import ToolResult, check_call, load_tools
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, Task, ToolCall, ToolSpec
from sharpen.world.fields import Family, capitalize
from sharpen.world.phrases import speak_value
from sharpen.world.state import seeded_rng

_ROWS_PER_TOOL = 40
_CANDIDATES = 5  # tools on offer
_TRIES = 40  # draws per row, and calls before a tool is left out
_SHARES = {"call": 0.6, "ask": 0.2, "decline": 0.2}
_DIFFICULTIES = {"call": "easy", "ask": "medium", "decline": "hard"}
_MAX_REASON_CHARACTERS = 200
_REPHRASING_TOKENS = 96
_REPHRASING_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class _UserTool:
    """A tool of the user; `run` is None where only its schema is known."""

    spec: ToolSpec
    run: Callable[[Json], ToolResult] | None = None


# The build


def build_for_tools(
    path: Path, out: Path, seed: int = 0, rows: int | None = None, policy: Policy | None = None
) -> Json:
    """Build the three sets over a file of tools and return the manifest.

    Tools of which no call succeeds are left out and named. `policy` words the requests.
    """
    refuse_foreign(out)
    left_out = {}
    usable_tools = []
    for tool in _load_user_tools(path):
        reason = _why_unusable(tool, seed)
        if reason:
            left_out[tool.spec.name] = reason
        else:
            usable_tools.append(tool)
    if not usable_tools:
        raise SharpenError(f"{path}: no tool can be used: {json.dumps(left_out)}")

    total = rows or _ROWS_PER_TOOL * len(usable_tools)
    maker = _RowMaker(usable_tools, policy)
    files = {"agent_tools/tools.jsonl": [tool_to_wire(tool.spec) for tool in usable_tools]}
    for split in SPLITS:
        count = round(total * parts()["sft"].splits[split])
        pairs = maker.make_rows(split, count, seed)
        files[f"agent_sft/{split}.jsonl"] = [dialog_to_row(dialog) for dialog, _ in pairs]

        count = round(total * parts()["timing"].splits[split])
        pairs = maker.make_rows(split, count, seed + 1)
        timing_rows = []
        selection_rows = []
        for _, task in pairs:
            timing_rows.append(task_to_row(task))
            if "calls" in task.gold:
                selection_rows.append(task_to_row(replace(task, kind="selection")))
        files[f"agent_benchmark/selection/{split}.jsonl"] = selection_rows
        files[f"agent_benchmark/timing/{split}.jsonl"] = timing_rows
    origin = {"seed": seed, "tools": {path.name: sha256_file(path)}, "left_out": left_out}
    return write_sets(out, files, origin)


def _load_user_tools(path: Path) -> list[_UserTool]:
    """Returns the tools of a Python or OpenAPI file."""
    if path.suffix == ".py":
        return [_UserTool(tool.spec, tool.run) for tool in load_tools(path).values()]
    if path.suffix in (".json", ".yaml", ".yml"):
        return [_UserTool(spec) for spec in openapi_tools(path)]
    raise SharpenError(
        f"{path}: cannot read tools from {path.suffix or 'this file'}; give a .py file with @tool "
        "functions, or an OpenAPI file (.json, .yaml)"
    )


def _why_unusable(tool: _UserTool, seed: int) -> str:
    """Returns why no drawn call fits the schema and succeeds; empty if one does."""
    rng = seeded_rng("own", seed, tool.spec.name)
    problem = ""
    for _ in range(_TRIES):
        _, problem = _make_call(tool, draw_call(tool.spec, "train", rng))
        if not problem:
            return ""
    return f"{problem}; give its parameters examples"


def _make_call(tool: _UserTool, call: ToolCall) -> tuple[list[Message], str]:
    """Returns the messages of a call, and what is wrong with it.

    Where the tool can be executed, its real result and an answer follow the call.
    """
    call_message = Message("assistant", tool_calls=(call,))
    problems = check_call(call, tool.spec)
    if problems or tool.run is None:
        return [call_message], "; ".join(problems)
    result = tool.run(call.arguments)
    problem = ""
    if result.error:
        problem = f"{result.error}: {result.content}"[:_MAX_REASON_CHARACTERS]
    answer = Message("assistant", f"Here is what {call.name} found: {result.content}")
    return [call_message, result.message(call), answer], problem


# Rows


class _RowMaker:
    """Makes dialogs, each with the task of its first turn. No request is made twice."""

    def __init__(self, tools: Sequence[_UserTool], policy: Policy | None):
        self._tools = tools
        self._policy = policy
        self._requests: set[str] = set()

    def make_rows(self, split: Family, count: int, seed: int) -> list[tuple[Dialog, Task]]:
        """Returns `count` rows, or as many different ones as the tools allow."""
        shares = dict(_SHARES)
        if len(self._tools) == 1:
            shares["decline"] = 0.0  # without another tool there is nothing to offer
        rows: list[tuple[Dialog, Task]] = []
        for kind, quota in divide_by_shares(count, shares).items():
            rng = seeded_rng("own", seed, split, kind)
            rows += self._draw_rows(kind, split, quota, rng)
        seeded_rng("order", seed, split).shuffle(rows)
        named_rows = []
        for number, (dialog, task) in enumerate(rows, 1):
            name = f"own-{split}-{number:05d}"
            named_rows.append((replace(dialog, id=name), replace(task, id=name)))
        return named_rows

    def _draw_rows(
        self, kind: str, split: Family, quota: int, rng: random.Random
    ) -> list[tuple[Dialog, Task]]:
        """Draw rows of one kind until the quota is met or all tries are used."""
        rows = []
        for _ in range(quota * _TRIES):
            row = self._draw_row(kind, split, rng)
            if row is not None:
                rows.append(row)
            if len(rows) == quota:
                break
        return rows

    def _draw_row(self, kind: str, split: Family, rng: random.Random) -> tuple[Dialog, Task] | None:
        """Draw one row, or None if its call does not work or its request was made before."""
        tool = rng.choice(self._tools)
        spec = tool.spec
        call = draw_call(spec, split, rng)
        required = spec.parameters.get("required", [])
        missing = ""  # the parameter that the request leaves out
        if kind == "ask" and required:
            missing = rng.choice(required)
        if check_call(call, spec) or (kind == "ask" and not missing):
            return None
        request = self._word_request(call, missing, spec, split, rng)
        offered_specs = self._offer_tools(tool, kind, rng)

        messages = [Message("user", request)]
        gold: Json = {"decision": kind}
        problem = ""
        if kind == "decline":
            answer = [Message("assistant", "None of the tools I have here can do that.")]
        else:
            answer, problem = _make_call(tool, call)
            gold["tools"] = [spec.name]
        if kind == "call":
            gold["calls"] = calls_to_json(call)
        if kind == "ask":
            gold["missing"] = [missing]
            messages += _ask_for_value(spec, call, missing)
        if problem or request in self._requests:
            return None
        self._requests.add(request)

        dialog = Dialog(
            messages=(*messages, *answer),
            tools=tuple(offered_specs),
            task_type="tool_selection" if kind == "call" else "timing_decision",
            metadata={"kind": kind, "executed": tool.run is not None and kind != "decline"},
        )
        task = Task(
            id="",
            instruction=request,
            tools=dialog.tools,
            gold=gold,
            kind="timing",
            difficulty=_DIFFICULTIES[kind],
        )
        return dialog, task

    def _word_request(
        self, call: ToolCall, missing: str, spec: ToolSpec, split: Family, rng: random.Random
    ) -> str:
        """Returns a request for the call that mentions all of its values but the missing one."""
        values = {name: value for name, value in call.arguments.items() if name != missing}
        values_text = capitalize(f"{speak_value(values)}.") if values else ""
        frame = rng.choice(frames(split)["own_requests"])
        request = frame.format(task=description_to_goal(spec.description), given=values_text)
        request = " ".join(request.split())
        if self._policy:
            request = rephrase(request, values, self._policy, rng.randrange(1 << 30))
        return request

    def _offer_tools(self, tool: _UserTool, kind: str, rng: random.Random) -> list[ToolSpec]:
        """Draw the tools on offer: others, and the tool itself unless it is to be missed."""
        others = [other.spec for other in self._tools if other is not tool]
        offered_specs = rng.sample(others, min(_CANDIDATES - 1, len(others)))
        if kind != "decline":
            offered_specs.append(tool.spec)
        rng.shuffle(offered_specs)
        return offered_specs


def _ask_for_value(spec: ToolSpec, call: ToolCall, name: str) -> list[Message]:
    """Returns the assistant's question for a parameter and the user's answer."""
    about = spec.parameters["properties"][name].get("description") or name
    return [
        Message("assistant", f"I still need to know: {about.rstrip('.')}."),
        Message("user", f"{speak_value(call.arguments[name])}."),
    ]


# Wording


def description_to_goal(description: str) -> str:
    """Returns the first sentence as a verb phrase: "Finds a van." → "find a van"."""
    first_sentence = description.split(". ")[0].strip().rstrip(".")
    verb, _, rest = first_sentence.partition(" ")
    # third person to infinitive: copies, fetches, finds; but not pass
    verb = re.sub(r"ies$", "ys", verb)
    verb = re.sub(r"(?<=ch|sh|ss|.x)es$|(?<!s)s$", "", verb)
    return f"{verb[:1].lower()}{verb[1:]} {rest}".strip()


def rephrase(request: str, values: Json, policy: Policy, seed: int) -> str:
    """Returns the policy's wording if it kept every value; otherwise the request as it is."""
    value_texts = [speak_value(value) for value in values.values()]
    prompt = frames("rephrase").format(values=", ".join(value_texts) or "none", text=request)
    turns = ask_policy(policy, [prompt], _REPHRASING_TOKENS, _REPHRASING_TEMPERATURE, seed)
    wording = turns[0].message.content.strip().strip('"')
    if wording and all(text in wording for text in value_texts):
        return wording
    return request
