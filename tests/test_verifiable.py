"""Verifiable rewards: each verifier accepts gold, rejects the empty answer, and is not fooled."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from sharpen.rewards.code import extract_code, read_tests, run_tests
from sharpen.rewards.math import MathJudge, final_answer, math_answer, plain_number
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.rewards.verifiers import is_ordered
from sharpen.sandbox import Limits, Sandbox
from sharpen.types import Message, RowError, Score, SharpenError, StopReason, Task, Trajectory, Turn

needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
SCHEMA = """
CREATE TABLE people (name TEXT, age INTEGER, city TEXT);
INSERT INTO people VALUES ('Ann', 30, 'Oslo'), ('Bo', 25, 'Rome'), ('Cy', 41, 'Oslo');
"""
SQUARE = {"tests": ["assert square(2) == 4", "assert square(-3) == 9", "assert square(0) == 0"]}
GOLD = {  # kind → gold, a right answer, a wrong one
    "math": ({"answer": "18"}, "She pays 18.\n#### 18", "#### 19"),
    "code": (SQUARE, "```python\ndef square(x):\n    return x * x\n```", "def square(x): return 7"),
    "sql": (
        {"schema": SCHEMA, "sql": "SELECT name FROM people WHERE city = 'Oslo'"},
        "```sql\nSELECT name FROM people WHERE city LIKE 'oslo' ORDER BY age DESC;\n```",
        "SELECT name FROM people",
    ),
    "json": (
        {
            "schema": {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": "integer"}},
            },
            "json": {"a": 2, "b": [1.5]},
        },
        'Here: ```json\n{"b": [1.50], "a": 2}\n```',
        '{"a": "2", "b": [1.5]}',
    ),
    "exact": ({"answers": ["The Eiffel Tower"]}, "The answer is **Eiffel tower**.", "Big Ben"),
    "set": ({"answers": ["red", "blue"]}, "Answer: blue and red", "Answer: red"),
    "choice": ({"answer": "C"}, "So the answer is (C).", "The answer is B"),
    "qa": ({"answers": ["北京", "Beijing"]}, "答案是：北京。", "上海"),
}
ANSWERABLE = [
    pytest.param(kind, marks=needs_bwrap if kind in ("code", "sql") else ()) for kind in GOLD
]


@pytest.fixture(scope="module")
def calculator():
    with VerifiableRewardCalculator() as found:
        yield found


@pytest.fixture(scope="module")
def sandbox():
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    with Sandbox(limits=Limits(wall_s=2.5)) as found:
        yield found


def trajectory(text: str) -> Trajectory:
    return Trajectory("t", (Turn(Message("assistant", text)),), StopReason.ANSWERED)


def score(calculator: VerifiableRewardCalculator, kind: str, text: str) -> Score:
    return calculator.score(Task("t", "?", gold=GOLD[kind][0], kind=kind), trajectory(text))


@pytest.mark.parametrize("kind", ANSWERABLE)
def test_gold_is_right_and_empty_is_wrong(calculator, kind):
    _, right, wrong = GOLD[kind]
    good = score(calculator, kind, right)
    assert good.parts["correctness"] == 1 and good.value >= 0.9 and not good.feedback
    for empty in ("", " \n", "<think>" + right, f"<think>{right}</think>"):
        bad = score(calculator, kind, empty)
        assert bad.parts["correctness"] == 0 and bad.value <= 0.1 and bad.feedback, empty
    assert score(calculator, kind, "").value == 0
    missed = score(calculator, kind, wrong)
    assert missed.parts["correctness"] < 1 and missed.feedback


@pytest.mark.parametrize("kind", ANSWERABLE)
def test_form_cannot_make_a_wrong_answer_win(calculator, kind):
    gold, right, wrong = GOLD[kind]
    dressed = f"<think>让我思考</think>第一步 Step 1\n{wrong}\n"
    dressed += "" if kind in ("code", "sql", "json") else wrong
    bare = {"code": "def square(x):\n    return x * x", "sql": gold.get("sql"), "math": "18"}
    bare |= {"json": '{"b": [1.5], "a": 2}', "exact": "Eiffel Tower", "qa": "北京"}
    assert (
        score(calculator, kind, dressed).value
        < score(calculator, kind, bare.get(kind) or right).value
    )


def test_a_half_right_program_never_beats_a_right_one(calculator, sandbox):
    tests = [f"assert square({n}) == {n * n}" for n in range(40)]
    reward = VerifiableRewardCalculator("code", sandbox)
    fenced = "```python\ndef square(x):\n    return x * x if x < {} else 0\n```"
    values = [reward.calculate_reward("", fenced.format(n), tests)["total"] for n in (1, 20, 39)]
    plain = reward.calculate_reward("", "def square(x): return x * x", tests)["total"]
    assert values == sorted(values) and len(set(values)) == 3 and max(values) < plain


def test_spec_interface(calculator):
    found = calculator.calculate_reward("1+1?", "第一步…… 答案是：2", "答案是：2")
    assert found == {"total": pytest.approx(0.97), "components": {"correctness": 1, "format": 0.7}}
    with pytest.raises(SharpenError, match=r"no verifier for kind 'poetry'.*math"):
        VerifiableRewardCalculator("poetry")
    batch = calculator.calculate_rewards(["q"] * 3, ["2", "3", "\\boxed{2}"], ["2"] * 3)
    assert [each["components"]["correctness"] for each in batch] == [1, 0, 1]
    with pytest.raises(ValueError):
        calculator.calculate_rewards(["q"], [], [])


# Mathematics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("答案是：5", "5"),
        ("答案为 5。谢谢 7", "5"),
        ("所以，答案：-3/4", "-3/4"),
        ("结果等于 12 元", "12 元"),
        ("最终答案是\n12 个苹果", "12 个苹果"),
        ("The answer is 5. Then he has 7.", "5"),
        ("The final answer to the question is: **1,234**", "1,234"),
        ("Answer: $x = 5$", "$x = 5$"),
        ("so \\boxed{1} or rather \\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("reasoning 1 2 3\n#### 1,000\n", "1,000"),
        ("<answer> 42 </answer> or 43", "42"),
        ("so we get 5 - 3 = 2", "2"),
        ("so we get \\frac{3}{4}", "\\frac{3}{4}"),
        ("the ratio is 3/4", "3/4"),
        ("x^2 + 1", "x^2 + 1"),
        ("\\sqrt{2}\\text{ cm}", "\\sqrt{2}\\text{ cm}"),
        ("it is 5-3", "3"),
        ("from 10 to -4", "-4"),
        ("<think>the answer is 4</think> The answer is 5", "5"),
        ("<think>the answer is 4", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_final_answers(text, answer):
    assert math_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "18.00"),
        ("1234", "$1,234"),
        ("1/2", "\\frac{1}{2}"),
        ("0.5", "\\dfrac12"),
        ("3/2", "1 1/2"),
        ("1.5", "1\\frac{1}{2}"),
        ("0.5", "50%"),
        ("50\\%", "0.5"),
        ("50", "50\\%"),
        ("18", "18 dollars"),
        ("18 dollars", "\\$18"),
        ("5", "5\\text{ km}"),
        ("5 km", "5 kilometers"),
        ("30000", "3万"),
        ("12元", "１２ 元"),
        ("90", "90^\\circ"),
        ("-5", "−5"),
        ("1/3", "0.333333"),
        ("x^2+2x+1", "(x+1)^2"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("(1, 2)", "(1,2)"),
        ("\\{1, 2\\}", "\\{2, 1\\}"),
        ("[0, 1)", "[0,1)"),
        ("3\\times10^5", "300000"),
        ("x = 5", "5"),
        ("3+4i", "4i+3"),
        ("2", "5 - 3 = 2"),
        ("\\text{Monday}", "Monday"),
        ("\\sqrt{2}\\text{ cm}", "\\sqrt2"),
    ],
)
def test_equal_answers(calculator, gold, answer):
    assert calculator.judge.equal(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "19"),
        ("18", "-18"),
        ("18", ""),
        ("1/2", "1/3"),
        ("5x", "5"),
        ("5", "5x"),
        ("5 km", "5 m"),
        ("5 dollars", "5 cents"),
        ("0.5", "50"),
        ("1000000", "1000001"),
        ("(1, 2)", "(2, 1)"),
        ("[0, 1)", "[0, 1]"),
        ("x^2+1", "x^2-1"),
        ("1/0", "1"),
        ("a", "b"),
    ],
)
def test_unequal_answers(calculator, gold, answer):
    assert calculator.judge.equal(gold, answer) is False


def test_a_judge_that_hangs_is_replaced():
    judge = MathJudge(workers=1, limit_s=1.5)
    try:
        assert judge.equal("x+1", "1+x") is True
        started = time.monotonic()
        assert judge.equal("1", "9^{9^{9^{9^{9}}}}") is None
        assert time.monotonic() - started < 4
        assert judge.equal("x+1", "1+x") is True
    finally:
        judge.close()


def test_numbers_are_quick():
    pairs = [(f"{n}", f"The answer is {n}.") for n in range(2000)]
    with VerifiableRewardCalculator() as fresh:
        started = time.process_time()
        found = [fresh.calculate_reward("", answer, gold)["total"] for gold, answer in pairs]
        assert min(found) >= 0.9 and time.process_time() - started < 5  # at least 400 a second


def test_gsm8k_gold(shared_data, calculator):
    for line in (shared_data / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        found = calculator.calculate_reward(row["question"], row["answer"], row["answer"])
        assert found["components"]["correctness"] == 1, row
    assert calculator.calculate_reward("", "", row["answer"])["total"] == 0


# Code ------------------------------------------------------------------------------------------


def passed(sandbox: Sandbox, code: str, gold: dict, where: str = "") -> list[bool]:
    return [not problem for problem in run_tests(sandbox, code, read_tests(gold, where))]


def test_which_block_is_the_answer():
    two = "```python\ndef f(x):\n    return x\n```\nUse it:\n```python\nprint(f(2))\n```"
    assert extract_code(two, ["f"]) == "def f(x):\n    return x\n"
    assert extract_code("def f(x): return x", ["f"]) == "def f(x): return x"
    assert extract_code("```\nf = abs\n```\n```bash\nls\n```", ["f"]) == "f = abs\n"
    assert extract_code("```py\ndef f(): pass", ["f"]) == "def f(): pass"


def test_kinds_of_tests(sandbox):
    code = """
import math
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __eq__(self, other): return self.value == other.value
    def __iter__(self): yield self.value
    def __len__(self): return 3
def total(*numbers, start=0): return sum(numbers, start)
def order(items): items.sort()
def fill(table, key): table[key] = (1, {2}, b"3", 4j, None, 1.5)
def apply(function, value): return function(value)
def count():
    n = 0
    while True:
        yield n
        n += 1
def refuse(): raise ValueError("no")
def kind(value): return type(value)
LIMIT = 7
"""
    tests = [
        "assert total(1, 2, start=3) == 6",
        "items = [3, 1, 2]\norder(items)\nassert items == [1, 2, 3]",
        "table = {}\nfill(table, 'a')\nassert table == {'a': (1, {2}, b'3', 4j, None, 1.5)}",
        "assert apply(lambda v: v + 1, 2) == 3",
        "numbers = count()\nassert [next(numbers), next(numbers)] == [0, 1]",
        "a, b = Node(1), Node(2)\na.next = b\nassert a.next.value == 2 and a == Node(1) != b",
        "assert list(Node(5)) == [5] and len(Node(5)) == 3",
        "try:\n    refuse()\nexcept ValueError as error:\n    assert str(error) == 'no'\n"
        "else:\n    raise AssertionError",
        "assert kind(1) is int and kind('') == str",
        "assert LIMIT == 7",
        "assert math.isclose(total(0.1, 0.2), 0.3)",
        "for n in range(50):\n    assert total(n, n) == 2 * n",
        "def check(candidate):\n    assert candidate(1) == 1\ncheck(total)",
        "assert total(10 ** 5000) == 10 ** 5000",
        "assert total(float('inf')) == float('inf')",
    ]
    found = run_tests(sandbox, code, read_tests({"tests": tests}, ""))
    assert not any(found), found
    wrong = [f"{test}\nassert False" for test in tests] + [
        "assert missing(1) == 1",
        "assert total(1) == 2",
    ]
    assert not any(passed(sandbox, code, {"tests": wrong}))


def test_human_eval_shape(sandbox):
    prompt = 'from typing import List\n\ndef add(a: int, b: int) -> int:\n    """Sum."""\n'
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4"
    gold = {"tests": [f"{test}\ncheck(add)"], "setup": prompt, "entry_point": "add"}
    reward = VerifiableRewardCalculator("code", sandbox)
    for answer in ("    return a + b\n", "```python\ndef add(a, b):\n    return a + b\n```"):
        assert reward.calculate_reward("", answer, gold)["components"]["correctness"] == 1
    for answer in ("    return a - b\n", "    pass\n"):
        assert reward.calculate_reward("", answer, gold)["components"]["correctness"] == 0


def test_tests_as_a_script(sandbox):
    gold = {"tests": "import math\nn = 3\nassert f(n) == 9\nassert f(2) == math.prod([2, 2])"}
    assert passed(sandbox, "def f(x): return x * x", gold) == [True, True]
    assert passed(sandbox, "def f(x): return 9", gold) == [True, False]
    for bad in ({}, {"tests": ""}, {"tests": "x = 1"}, {"tests": ["assert ("]}, {"tests": [3]}):
        with pytest.raises(RowError, match=r"^row: gold\.tests"):
            read_tests(bad, "row")


FORGERIES = {
    "exit": "import sys; sys.exit(0)",
    "hard_exit": "import os; os._exit(0)",
    "exit_in_call": "import os\ndef square(x): os._exit(0)",
    "always_equal": "class E:\n    def __eq__(self, other): return True\n"
    "    def __bool__(self): return True\ndef square(x): return E()",
    "equal_subclass": "class E(int):\n    def __eq__(self, other): return True\n"
    "def square(x): return E(7)",
    "any_method": "class E:\n    def __getattr__(self, name): return lambda *a: True\n"
    "def square(x): return E()",
    "print_verdicts": 'def square(x): return 7\nfor _ in range(9): print(\'{"verdict": ""}\')',
    "write_verdicts": "import os\nfor f in range(1, 64):\n    for _ in range(9):\n        try:\n"
    '            os.write(f, b\'{"verdict": ""}\\n\')\n        except OSError: pass\n'
    "def square(x): return 7",
    "verdict_instead_of_value": "import os\ndef square(x):\n"
    '    os.write(3, b\'{"verdict": ""}\\n\' * 9)\n    return 7',
    "fake_replies": 'import os\nos.write(3, b\'{"value": true, "args": {"list": []}}\\n\' * 9)\n'
    "def square(x): return True",
    "patch_builtins": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
    "builtins.__build_class__ = None\nbuiltins.compile = lambda *a: None\ndef square(x): return 7",
    "patch_peer": "import __main__\n__main__.problem_of = lambda *a: ''\n"
    "__main__.judge = None\ndef square(x): return 7",
    "frames": "import sys\ndef square(x):\n    frame = sys._getframe()\n    seen = ''\n"
    "    while frame:\n        seen += repr(frame.f_locals) + repr(frame.f_globals)\n"
    "        frame = frame.f_back\n    import re\n"
    "    found = re.findall(r'square\\(' + str(x) + r'\\) == (\\d+)', seen)\n"
    "    return int(found[0]) if found else 7",
    "garbage_collector": "import gc, re\ndef square(x):\n"
    "    for each in gc.get_objects():\n        try:\n"
    "            found = re.findall(r'square\\(' + str(x) + r'\\) == (\\d+)', repr(each))\n"
    "        except Exception:\n            continue\n"
    "        if found: return int(found[0])\n    return 7",
    "memory": "import re\ndef square(x):\n    for line in open('/proc/self/maps'):\n"
    "        if 'rw' not in line: continue\n"
    "        start, end = (int(n, 16) for n in line.split()[0].split('-'))\n"
    "        try:\n            with open('/proc/self/mem', 'rb') as m:\n"
    "                m.seek(start)\n                data = m.read(end - start)\n"
    "        except (OSError, ValueError): continue\n"
    "        found = re.findall(rb'square\\(' + str(x).encode() + rb'\\) == (\\d+)', data)\n"
    "        if found: return int(found[0])\n    return 7",
    "other_processes": "import glob, re\ndef square(x):\n    seen = ''\n"
    "    for path in glob.glob('/proc/*/cmdline') + glob.glob('/tmp/*'):\n"
    "        try: seen += open(path).read()\n        except OSError: pass\n"
    "    found = re.findall(r'square\\(' + str(x) + r'\\) == (\\d+)', seen)\n"
    "    return int(found[0]) if found else 7",
    "exit_hook": "import atexit\natexit.register(print, 'verdict')\ndef square(x): return 7",
    "raise_in_load": "def square(x): return 7\nraise SystemExit(0)",
    "recursive_value": "def square(x):\n    a = []\n    a.append(a)\n    return a",
    "huge_value": "def square(x): return 'x' * (64 << 20)",
    "nested_value": "def square(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "nan": "def square(x): return float('nan')",
    "hang": "def square(x):\n    while True: pass",
    "hang_in_load": "while True: pass",
    "close_channel": "import os; os.close(3)\ndef square(x): return 7",
    "syntax": "def square(x) return",
    "text": "I would square the number.",
}


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if "hang" in name else name for name in FORGERIES
]


@pytest.mark.parametrize("name", SLOW)
def test_no_verdict_can_be_forged(sandbox, name):
    gold = {"tests": ["assert square(2) == 4", "assert square(13) == 169", "assert square(1) != 2"]}
    assert passed(sandbox, FORGERIES[name], gold)[:2] == [False, False]


def test_expected_values_never_reach_the_candidate(sandbox):
    """A candidate sees the arguments of its calls and nothing else."""
    code = """
import __main__
class Log:
    def __init__(self, file): self.file, self.text = file, ""
    def readline(self):
        line = self.file.readline()
        self.text += line.decode()
        return line
__main__.channel = log = Log(__main__.channel)
def square(x): return 7
def received(): return log.text
"""
    tests = ["assert square(4242) == 987654321", "assert '4242' in received()"]
    tests += ["assert '987654321' not in received() and 'assert' not in received()"]
    assert passed(sandbox, code, {"tests": tests}) == [False, True, True]


@pytest.mark.slow
def test_mbpp_gold(shared_data, sandbox):
    rows = [
        json.loads(line)
        for line in (shared_data / "mbpp" / "mbpp_train.jsonl").read_text("utf-8").splitlines()
    ]
    reward = VerifiableRewardCalculator("code", sandbox)
    golds = [{"tests": row["test_list"], "setup": row["test_setup_code"]} for row in rows]
    texts = [f"```python\n{row['code']}\n```" for row in rows]
    found = reward.calculate_rewards([row["text"] for row in rows], texts, golds)
    missed = [row["task_id"] for row, f in zip(rows, found, strict=True) if f["total"] != 1]
    assert not missed
    shuffled = random.Random(0).sample(texts, len(texts))
    wrong = reward.calculate_rewards([""] * len(rows), shuffled, golds)
    assert sum(f["components"]["correctness"] for f in wrong) < len(rows) * 0.05


# SQL, JSON, text ---------------------------------------------------------------------------------


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n)"


@needs_bwrap
@pytest.mark.parametrize(
    ("query", "right"),
    [
        ("SELECT name FROM people WHERE age > 26 ORDER BY age", True),
        ("SELECT name FROM people WHERE age > 26 ORDER BY age DESC", False),
        ("SELECT name, age FROM people WHERE age > 26 ORDER BY age", False),
        ("SELECT 'Ann' UNION ALL SELECT 'Cy'", True),
        ("SELECT nothing FROM people", False),
        ("ATTACH '/tmp/x' AS x", False),
        ("PRAGMA database_list", False),
        ("DROP TABLE people; SELECT 1", False),
        ("DELETE FROM people", False),
        (f"{ENDLESS} SELECT count(*) FROM n", False),
        (f"{ENDLESS} SELECT i FROM n", False),
        ("SELECT zeroblob(2000000000)", False),
        ("SELECT load_extension('/tmp/x')", False),
        ("SELECT x'ff'", False),
        ("The names are Ann and Cy.", False),
    ],
)
def test_sql(sandbox, query, right):
    gold = {"schema": SCHEMA, "sql": "SELECT name FROM people WHERE age > 26 ORDER BY age"}
    found = VerifiableRewardCalculator("sql", sandbox).calculate_reward("", query, gold)
    assert found["components"]["correctness"] == right


def test_sql_results_and_bad_gold(sandbox):
    reward = VerifiableRewardCalculator("sql", sandbox)
    gold = {"schema": SCHEMA, "result": [[32.0]]}
    found = reward.calculate_reward("", "SELECT avg(age) FROM people", gold)
    assert found["components"]["correctness"] == 1
    assert reward.calculate_reward("", "25, 30", {"answers": ["30", "25"]})["components"][
        "correctness"
    ]
    for bad in (
        {"sql": "SELECT 1"},
        {"schema": SCHEMA},
        {"schema": SCHEMA, "sql": "SELECT x FROM y"},
    ):
        with pytest.raises(RowError, match=r"gold\.(schema|sql)"):
            reward.calculate_reward("", "SELECT 1", bad)
    assert is_ordered("select a from (select 1) order  by a") and not is_ordered(
        "select a from (select b from c order by d) where e = ' order by '"
    )


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a": 2, "b": [1.5]}', True),
        ('{"a": 2.0, "b": [1.5]} and so on', True),
        ('{"a": true, "b": [1.5]}', False),
        ('{"a": 2}', False),
        ("[" * 100_000, False),
        ("{" + '"a":{' * 5000, False),
        ('{"a": NaN}', False),
        ("no JSON", False),
    ],
)
def test_json(calculator, text, right):
    assert score(calculator, "json", text).parts["correctness"] == right


def test_json_gold(calculator):
    reward = VerifiableRewardCalculator("json")
    assert reward.calculate_reward("", "[1, 2]", [1, 2])["components"]["correctness"] == 1
    with pytest.raises(RowError, match=r"gold\.schema"):
        reward.calculate_reward("", "{}", {"schema": {"type": "nothing"}})
    with pytest.raises(RowError, match=r"gold\.schema.*refused"):
        reward.calculate_reward("", "{}", {"schema": {"$ref": "http://example.com/x"}})
    with pytest.raises(RowError, match="expected a schema"):
        reward.calculate_reward("", "{}", {})


@pytest.mark.parametrize(
    ("kind", "gold", "text", "right"),
    [
        ("exact", "The Beatles", "the beatles!", True),
        ("exact", "C++", "C", False),
        ("exact", "1000", "1,000", True),
        ("exact", "《红楼梦》", "答案为：红楼梦", True),
        ("exact", "ＡＢＣ", "abc", True),
        ("exact", "...", "!!!", False),
        ("set", ["苹果", "梨"], "答案是：梨、苹果", True),
        ("set", ["a", "b"], "- b\n- a", True),
        ("set", ["a", "b"], '["a", "b"]', True),
        ("set", ["a", "b"], "a, b, c", False),
        ("choice", "B", "B) 12", True),
        ("choice", "B", "A is wrong, so I choose B", True),
        ("choice", "B", "BAD", False),
    ],
)
def test_text_answers(kind, gold, text, right):
    found = VerifiableRewardCalculator(kind).calculate_reward("", text, gold)
    assert found["components"]["correctness"] == right


def test_tool_state():
    task = Task("t", "?", kind="tool_state", gold={"done": True})
    reward = VerifiableRewardCalculator(end_state=lambda task, _: float(task.gold["done"]))
    assert reward.score(task, trajectory("")) == Score(1.0, {"correctness": 1.0}, solved=True)
    with pytest.raises(RowError, match="end_state"):
        VerifiableRewardCalculator().score(task, trajectory(""))
    with pytest.raises(RowError, match="nan"):
        VerifiableRewardCalculator(end_state=lambda *_: float("nan")).score(task, trajectory(""))


# Bad input ---------------------------------------------------------------------------------------

BAIT = ["1" * 300_000, "1," * 100_000, "1/" * 100_000, "答案" * 100_000, "\\boxed{" * 50_000]
BAIT += ["the answer " * 30_000 + "is", "```" * 60_000, " " * 300_000, "-" * 300_000, "{" * 200_000]
BAIT += ["\\boxed{" + "{" * 200_000, "<think>" * 40_000, "\ud800", "\0", "，" * 200_000]
BAIT += ["```python\n" + "(" * 100_000, "Step " * 60_000, "[1," * 70_000, "a, " * 100_000]
BAIT += [
    "\n" * 200_000,
    "\t" * 200_000 + "x",
    "步骤 " * 60_000,
    "def " * 50_000,
    "答案=\n" * 50_000,
]


def test_bait_does_not_slow_mathematics(calculator):
    started = time.process_time()
    found = [calculator.calculate_reward("", text, "7")["components"] for text in BAIT[1:]]
    assert not any(each["correctness"] for each in found)
    assert time.process_time() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANSWERABLE)
def test_bait_is_bounded(calculator, kind):
    tasks = [Task("t", "?", gold=GOLD[kind][0], kind=kind)] * len(BAIT)
    started = time.monotonic()
    scores = calculator.score_many(tasks, [trajectory(text) for text in BAIT])
    assert all(s.parts["correctness"] == 0 for s in scores)
    assert time.monotonic() - started < 60


def test_a_task_without_gold_is_an_error(calculator):
    for kind in GOLD:
        with pytest.raises(RowError, match=r"^t: gold"):
            calculator.score(Task("t", "?", kind=kind), trajectory("anything"))
    with pytest.raises(RowError, match="no verifier for kind"):
        calculator.score(Task("t", "?", kind="poetry"), trajectory("anything"))


def test_odd_responses(calculator):
    assert (
        calculator.score(
            Task("t", "?", gold={"answer": "1"}, kind="math"),
            Trajectory("t", (), StopReason.TIMEOUT),
        ).value
        == 0
    )
    assert calculator.calculate_reward("", None, "1")["total"] == 0
    assert final_answer("x" * 10_000 + "\\boxed{" + "y" * 5000 + "}") is None
    assert plain_number("1" * 201) is None


@needs_bwrap
def test_whoever_forgets_to_close_leaves_nothing(tmp_path):
    code = """
from sharpen import VerifiableRewardCalculator
reward = VerifiableRewardCalculator("code").calculate_reward
assert reward("", "def f(x): return x", "assert f(1) == 1")["total"] > 0.9
assert VerifiableRewardCalculator().calculate_reward("", "x + 1", "1 + x")["total"] >= 0.9
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_what_runs_inside_can_be_imported_outside():
    """By whoever documents or walks the package: nothing runs on import."""
    names = "sharpen.sandbox_worker", "sharpen.rewards.code_peer"
    code = f"import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
