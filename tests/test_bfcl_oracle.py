"""Our call evaluator, and the benchmark `bfcl:PATH` as a whole, against the BFCL AST checker, on
the external rows that have answers and on rows made here, each with many mutations. The checker
lives in .venv-oracle, which `scripts/oracle.sh` makes; its own data is not there and is never
read."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
from pathlib import Path

import pytest

from sharpen.evals.benchmarks import load_benchmark
from sharpen.evals.evaluator import AgentTrainingEvaluator
from sharpen.rewards.calls import ToolCallEvaluator
from sharpen.types import Message, ToolCall, ToolSpec, Turn
from sharpen.world.gold import first_allowed

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ORACLE = HERE.parent / ".venv-oracle" / "bin" / "python"
PARTS = ("sql", "exec_simple", "exec_multiple", "exec_parallel", "exec_parallel_multiple")


def function(name, properties, required=(), **more):
    parameters = {"type": "dict", "properties": properties, "required": list(required)}
    return {"name": name, "parameters": parameters} | more


def field(kind, inner=None, **more):
    return {"type": kind} | ({"items": {"type": inner}} if inner else {}) | more


ADDRESS = {"street": ["Main St. 5"], "zip": ["123", 123], "unit": ["", "b"]}
BOOK = function(
    "shop.book",
    {
        "title": field("string"),
        "count": field("integer", default=1),
        "price": field("float"),
        "gift": field("boolean", default=False),
        "tags": field("array", "string"),
        "sizes": field("array", "float"),
        "at": field("tuple", "integer"),
        "note": field("any"),
        "address": field("dict"),
        "lines": field("array", "dict"),
    },
    ["title"],
)
BOOKED = {
    "title": ["Dune", "Dune (novel)"],
    "count": [2, ""],
    "price": [5.0, 5.5],
    "gift": [True, ""],
    "tags": [["sci-fi", "Used"], ""],
    "sizes": [[1.5, 2.0]],
    "at": [[3, 4], ""],
    "note": ["call first", ""],
    "address": [ADDRESS, ""],
    "lines": [[{"sku": ["A-1"], "n": [1]}, {"sku": ["B-2"], "n": [2, ""]}], ""],
}
VARIABLE = function("run", {"x": field("integer"), "xs": field("array", "integer")}, ["x"])
JAVA = function(
    "Renderer.draw",
    {
        "n": field("integer"),
        "big": field("long"),
        "part": field("float"),
        "whole": field("double"),
        "on": field("boolean"),
        "label": field("String"),
        "mark": field("char"),
        "names": field("ArrayList", "String"),
        "scores": field("ArrayList", "integer"),
        "cells": field("Array", "integer"),
        "words": field("Array", "String"),
        "options": field("HashMap"),
        "free": field("any"),
    },
    ["n"],
)
JAVA_ANSWER = {
    "n": [5],
    "big": [7, ""],
    "part": [1.5, ""],
    "whole": [2.5, ""],
    "on": [True, ""],
    "label": ["Front Page", ""],
    "mark": ["'c'", ""],
    "names": [["ann", "bob"], ""],
    "scores": [[1, 2], ""],
    "cells": [[1, 2, 3], ""],
    "words": [['"a"', '"b"'], ""],
    "options": [{"depth": [3], "mode": ["fast", ""], "deep": [True, ""]}, ""],
    "free": ["canvas", ""],
}
JAVA_VALUES = {
    "n": ["5", "-5", "5L", "x", 5, "05"],
    "big": ["7L", "7l", "7", "bigNumber"],
    "part": ["1.5f", "1.5F", "1.5", "15e-1f"],
    "whole": ["2.5", "2.5f", "25e-1", "2"],
    "on": ["true", "false", "True", True],
    "label": ["Front Page", "front-page", '"Front Page"', "Back"],
    "mark": ["'c'", "c", "'d'"],
    "names": [
        'new ArrayList<>(Arrays.asList("ann", "bob"))',
        'new ArrayList<String>(Arrays.asList("Ann","B.ob"))',
        'new ArrayList<String>() {{ add("ann"); add("bob"); }}',
        "new ArrayList<>()",
        "names",
        ["ann", "bob"],
    ],
    "scores": [
        "new ArrayList<Integer>(Arrays.asList(1, 2))",
        "new ArrayList<Integer>() {{ add(1); add(2); }}",
        "new ArrayList<Integer>(Arrays.asList(1, 2, 3))",
        "new ArrayList<Integer>(Arrays.asList(1.0, 2))",
    ],
    "cells": ["new int[]{1, 2, 3}", "new int[] { 1,2,3 }", "new int[]{1, 2}", "{1, 2, 3}"],
    "words": ['new String[]{"a", "b"}', 'new String[]{"A", "b"}', "words"],
    "options": [
        'new HashMap<String, Object>() {{ put("depth", 3); put("mode", "fast"); }}',
        'new HashMap<>() { { put("depth", 3); } }',
        'new HashMap<>() {{ put("depth", 3); put("deep", true); }}',
        'new HashMap<>() {{ put("depth", 4); }}',
        'new HashMap<String, Object>() {{ put("depth", 3); put("size", 3); }}',
        "new HashMap<>()",
        "settings",
    ],
    "free": ["canvas", "Canvas", "other"],
}
SCRIPT = function(
    "app.mount",
    {
        "n": field("integer"),
        "big": field("Bigint"),
        "part": field("float"),
        "on": field("Boolean"),
        "label": field("String"),
        "xs": field("array", "integer"),
        "names": field("array", "String"),
        "grid": field("array", "array"),
        "options": field("dict"),
        "free": field("any"),
    },
    ["n"],
)
SCRIPT_ANSWER = {
    "n": [5],
    "big": [7, ""],
    "part": [1.5, ""],
    "on": [False, ""],
    "label": ["Front Page", ""],
    "xs": [[1, 2], ""],
    "names": [["ann", "bob"], ""],
    "grid": [[[1, 2], [3, 4]], ""],
    "options": [{"depth": [3], "mode": ["fast", ""], "list": [["a", "b"], ""]}, ""],
    "free": ["canvas", ""],
}
SCRIPT_VALUES = {
    "n": ["5", "5n", "5.0", "five", 5],
    "big": ["7n", "7"],
    "part": ["1.5", "1.50", "1.5f", "x"],
    "on": ["false", "true", "False"],
    "label": ["'Front Page'", '"front page"', "Front Page", "'Back'"],
    "xs": ["[1, 2]", "[1,2]", "new Array(1, 2)", "[2, 1]", "[1, '2']", "xs", "[]", "[1, 2, 3]"],
    "names": ["['ann', 'bob']", '["Ann", "bob"]', "[ann, bob]", "new Array('ann', 'bob')"],
    "grid": ["[[1, 2], [3, 4]]", "[ [1,2], [3, 4] ]", "[[1, 2]]", "new Array([1, 2], [3, 4])"],
    "options": [
        "{depth: 3, mode: 'fast'}",
        '{"depth": 3}',
        '{"depth": "3"}',
        "{'depth': 3, 'list': ['a', 'b']}",
        "{depth: 3, size: 1}",
        "{mode: 'fast'}",
        "{}",
        "settings",
    ],
    "free": ["canvas", "Canvas"],
}


def case(functions, answers, predicted, category="simple", language="python"):
    return {
        "functions": functions,
        "answers": answers,
        "predicted": predicted,
        "category": category,
        "language": language,
    }


def mutations(arguments, rng):
    """The arguments as they are, then each value exchanged, dropped, and others added."""
    yield arguments
    yield arguments | {"unheard_of": 1}
    for name, value in arguments.items():
        yield {k: v for k, v in arguments.items() if k != name}
        yield from ({**arguments, name: other} for other in variants(value, rng))


def variants(value, rng):
    """Other values near this one: of another type, spelt otherwise, longer, shorter, reordered."""
    yield from ("", None, "else", 1, 1.0, True, [], {}, str(value), [value])
    if isinstance(value, bool):
        yield not value
        yield int(value)
    elif isinstance(value, (int, float)):
        yield from (value + 1, -value, float(value), int(value), value + 0.25)
    elif isinstance(value, str):
        yield from (value.upper(), value.lower(), f" {value} ", value.replace(" ", "-"))
        yield from (f"{value}.", f"{value}!", f"'{value}'", value[:-1])
    elif isinstance(value, list):
        yield from (value[::-1], value[:-1], [*value, *value[:1]], [str(v) for v in value])
        yield from ([*value[:-1], v] for v in variants(value[-1], rng)) if value else ()
    elif isinstance(value, dict):
        yield value | {"unheard_of": 1}
        for key, inner in value.items():
            yield {k: v for k, v in value.items() if k != key}
            others = list(variants(inner, rng))
            yield from ({**value, key: other} for other in rng.sample(others, min(8, len(others))))


def external_cases(folder: Path):
    rng = random.Random(0)
    for part in PARTS:
        answers = {
            row["id"]: row["ground_truth"]
            for row in read_lines(folder / "possible_answer" / f"BFCL_v4_{part}.json")
        }
        for row in read_lines(folder / "question" / f"BFCL_v4_{part}.json"):
            if any(isinstance(a, str) and "(" in a and "=" not in a for a in answers[row["id"]]):
                continue  # an answer by position, which the checker cannot judge either
            wanted = [as_answer(answer) for answer in answers[row["id"]]]
            category = "parallel" if len(wanted) > 1 else part
            gold = [named(answer) for answer in wanted]
            for predicted in sets_of_calls(gold, rng):
                yield case(row["function"], wanted, predicted, category)


def read_lines(path: Path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def as_answer(answer):
    if isinstance(answer, dict):
        return answer
    call = ast.parse(answer, mode="eval").body
    assert isinstance(call, ast.Call)
    values = {str(k.arg): arithmetic(k.value) for k in call.keywords}
    return {ast.unparse(call.func): {name: [as_allowed(v)] for name, v in values.items()}}


def arithmetic(node):
    """A literal, or a sum or quotient of literals, as some answers have it."""
    if isinstance(node, ast.BinOp):
        left, right = arithmetic(node.left), arithmetic(node.right)
        return left / right if isinstance(node.op, ast.Div) else left * right
    return ast.literal_eval(node)


def as_allowed(value):
    """In a list of allowed values an object's values are lists of allowed values themselves."""
    if isinstance(value, dict):
        return {key: [inner] for key, inner in value.items()}
    if isinstance(value, list):
        return [as_allowed(inner) if isinstance(inner, dict) else inner for inner in value]
    return value


def named(answer):
    [(name, arguments)] = answer.items()
    return {"name": name, "arguments": first_allowed(arguments)}


def sets_of_calls(gold, rng):
    yield from (gold, gold[::-1], gold[:-1], [*gold, gold[0]], [{**gold[0], "name": "other"}])
    at = rng.randrange(len(gold))
    for arguments in mutations(gold[at]["arguments"], rng):
        changed = copy.deepcopy(gold)
        changed[at]["arguments"] = arguments
        yield changed if rng.random() < 0.5 else changed[::-1]


def made_cases():
    rng = random.Random(1)
    full = {"name": "shop.book", "arguments": first_allowed(BOOKED)}
    singles = list(mutations(full["arguments"], rng))
    crossed = [cross(*rng.sample(singles, 2), rng) for _ in range(1000)]
    for arguments in (*singles, *crossed):
        yield case([BOOK], [{"shop.book": BOOKED}], [{"name": "shop.book", "arguments": arguments}])
    answer = {"x": ["total"], "xs": [["first", "second"], [1, 2]]}
    for arguments in mutations({"x": "total", "xs": [1, 2]}, rng):
        yield case([VARIABLE], [{"run": answer}], [{"name": "run", "arguments": arguments}])
    answers = [{"run": {"x": [n]}} for n in (1, 2, 2)]
    for numbers in ((1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 2), (1, 2), (1, 2, 2, 2), (1, 2, 3)):
        calls = [{"name": "run", "arguments": {"x": n}} for n in numbers]
        yield case([BOOK, VARIABLE], answers, calls, "parallel_multiple")
    overlapping = [{"run": {"x": [1, 2]}}, {"run": {"x": [1]}}]
    for numbers in ((1, 2), (2, 1), (1, 1), (2, 2)):
        calls = [{"name": "run", "arguments": {"x": n}} for n in numbers]
        yield case([VARIABLE], overlapping, calls, "parallel")
    for doc, answer, values, language in (
        (JAVA, JAVA_ANSWER, JAVA_VALUES, "java"),
        (SCRIPT, SCRIPT_ANSWER, SCRIPT_VALUES, "javascript"),
    ):
        one = [{n: v} for n, options in values.items() for v in (*options, "", "x y", "null")]
        several = [one[0] | rng.choice(one) | rng.choice(one) | rng.choice(one) for _ in range(400)]
        for arguments in (*one, *({"n": "5"} | o for o in one), *several):
            calls = [{"name": doc["name"], "arguments": arguments}]
            yield case([doc], [{doc["name"]: answer}], calls, "simple", language)


def cross(first, second, rng):
    """Some arguments of the one, the others of the other."""
    taken = [name for name in second if rng.random() < 0.3]
    return first | {name: second[name] for name in taken}


def oracle(cases):
    assert ORACLE.exists(), f"{ORACLE} is missing: run scripts/oracle.sh"
    done = subprocess.run(
        [ORACLE, HERE / "support" / "bfcl_checker.py"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


NAMES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def json_schema(value):
    """A function's parameters with the type names of JSON Schema, as an import has them."""
    if isinstance(value, list):
        return [json_schema(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    named = {
        k: NAMES.get(v, v) if k == "type" and isinstance(v, str) else v for k, v in value.items()
    }
    return {key: json_schema(inner) for key, inner in named.items()}


def ours(row, translate):
    schema = json_schema if translate else dict
    specs = [ToolSpec(f["name"], "", schema(f["parameters"])) for f in row["functions"]]
    expected = [{"name": n, "arguments": a} for answer in row["answers"] for n, a in answer.items()]
    judge = ToolCallEvaluator(specs, True, row["language"])
    return judge.evaluate_calls(row["predicted"], expected)["overall_correct"]


def compare(cases, translate=False):
    verdicts = oracle(cases)
    raised = [v for v in verdicts if isinstance(v, str)]
    different = [
        (row, verdict)
        for row, verdict in zip(cases, verdicts, strict=True)
        if ours(row, translate) != (verdict is True)  # where the checker raises, we say wrong
    ]
    for row, verdict in different[:20]:
        print(verdict, json.dumps(row["answers"])[:600], json.dumps(row["predicted"])[:600])
    print(len(cases), "cases,", verdicts.count(True), "right,", len(raised), "raised", set(raised))
    assert not different, f"{len(different)} of {len(cases)} verdicts differ"
    assert verdicts.count(True) > len(cases) / 50 and verdicts.count(False) > len(cases) / 50
    return raised


def test_external_rows_with_answers(shared_data):
    cases = list(external_cases(shared_data / "bfcl" / "unused_datasets"))
    assert len(cases) > 10_000
    compare(cases)
    compare(cases, translate=True)


def test_rows_made_here():
    compare(list(made_cases()))


class Mutant:
    """Makes one of the sets of calls that were given for an item."""

    def __init__(self, made):
        self.made = made

    def respond(self, dialogs, sampling):
        said = [tuple(ToolCall(**call) for call in self.made[dialog.id]) for dialog in dialogs]
        return [Turn(Message("assistant", tool_calls=calls)) for calls in said]


def test_the_benchmark_scores_as_bfcl_does(shared_data):
    folder, rng = shared_data / "bfcl" / "unused_datasets", random.Random(2)
    suite = load_benchmark(f"bfcl:{folder / 'question'}")
    docs, wanted, sets = {}, {}, {}
    for part in PARTS:
        name = f"BFCL_v4_{part}.json"
        for row in read_lines(folder / "possible_answer" / name):
            wanted[row["id"]] = row["ground_truth"]
        for row in read_lines(folder / "question" / name):
            docs[row["id"]] = part, row["function"]
    kept = [task.id for task in suite.tasks]
    wanted = {name: [as_answer(answer) for answer in wanted[name]] for name in kept}
    for name in kept:
        found = list(sets_of_calls([named(answer) for answer in wanted[name]], rng))
        sets[name] = json.loads(json.dumps([found[0], *rng.sample(found, 9)]))  # no tuples
    cases, ours_said = [], []
    for turn in range(10):
        judge = AgentTrainingEvaluator(suite, options={"general": False})
        judge.evaluate(Mutant({name: sets[name][turn] for name in kept}))
        ours_said += [row["metrics"]["accuracy"] == 1 for row in judge.items[0]]
        for name in kept:
            part, functions = docs[name]
            category = "parallel" if len(wanted[name]) > 1 else part
            cases.append(case(functions, wanted[name], sets[name][turn], category))
    verdicts = [verdict is True for verdict in oracle(cases)]
    assert len(cases) > 3000 and verdicts == ours_said
    assert all(verdicts[: len(kept)]) and verdicts.count(False) > 1000
