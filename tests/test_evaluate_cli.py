"""`sharpen evaluate` and `AgentTrainingEvaluator`: tables, items that are kept and not asked again,
comparisons, and whatever can be wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_items import EMPTY, Says
from chat_server import ChatServer, served_by
from sharpen import AgentTrainingEvaluator, SharpenError, evaluate_merged
from sharpen.evals.baselines import Gold
from sharpen.evals.benchmarks import load_benchmark
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.records import read_jsonl
from sharpen.rewards.judge import Judge, JudgeConfig
from sharpen.spec.data import AgentTrainingUsage
from sharpen.types import Message, StopReason, Turn

SELECTION = "agent_benchmark/selection:test"
QUIET = {"general": False}


@pytest.fixture(autouse=True)
def home(agent_data, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARPEN_DATA", str(agent_data))
    monkeypatch.setenv("SHARPEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def items(folder) -> list:
    return [row.value for row in read_jsonl(Path(folder) / "items.jsonl")]


def last(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_a_table_a_comparison_and_a_loss(sharpen):
    code, out, _ = sharpen("evaluate", "--model", "baseline:gold", "--output", "gold")
    assert code == 0 and "tool_selection_accuracy       1.0000  [0." in out
    assert "general accuracy" in out and len(items("gold")) == 49 + 40
    command = ["evaluate", "--model", "baseline:random", "--output", "bad", "--compare", "gold"]
    code, out, _ = sharpen(*command, "--metrics", "tool_accuracy,plan_success,mrr", "--json")
    found = last(out)
    assert code == 0 and list(found["metrics"]) == ["tool_accuracy", "plan_success", "mrr"]
    assert "LOSS on general items against gold: -" in out and found["comparison"]["general_loss"]
    change = found["comparison"]["metrics"]["plan_success_rate"]
    assert change["difference"] < -0.5 and change["p"] < 0.01 and change["test"] == "McNemar"
    assert json.loads(Path("bad/results.json").read_text())["metrics"] == found["metrics"]
    code, out, _ = sharpen(
        "evaluate", "--model", "baseline:gold", "--output", "g", "--compare", "bad"
    )
    assert code == 0 and "LOSS" not in out
    row = items("gold")[0]
    assert {"id", "part", "metrics", "messages", "decision", "parts"} <= set(row)


def test_garbage_scores_nothing_and_is_asked_once(sharpen, pico_folder):
    command = ["evaluate", "--model", str(pico_folder), "--limit", "6", "--no-general"]
    command += ["--output", "pico", "--json", "max_tokens=24", "--benchmark"]
    code, out, _ = sharpen(*command, "agent_benchmark/timing:test")
    figure = last(out)["metrics"]["timing_precision"]
    assert code == 0 and figure["mean"] == 0.0 and figure["count"] == 6 == len(items("pico"))
    written = Path("pico/items.jsonl").read_bytes()
    assert sharpen(*command, "agent_benchmark/timing:test")[0] == 0
    assert Path("pico/items.jsonl").read_bytes() == written
    code, _, err = sharpen(*command, SELECTION)
    assert code == 2 and "pico: holds a run with another config (benchmark:" in err


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--metrics", "tool_acuracy"], "metric 'tool_acuracy': expected"),
        (["--benchmark", SELECTION, "--metrics", "plan_success"], "says nothing about agent_bench"),
        (["--model", "baseline:best"], "baseline: and one of random, keyword, gold"),
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--perturb", "renam"], "perturb 'renam'"),
        (["--compare", "nothing"], "nothing: holds no evaluation"),
        (["--benchmark", "gsm8k:empty.jsonl"], "nothing in it can be scored"),
        (["limits=3"], "limits"),
    ],
)
def test_wrong_input(sharpen, given, problem):
    Path("empty.jsonl").write_text("")
    usual = ["--model", "baseline:gold", "--limit", "2", "--no-general"]
    code, _, err = sharpen("evaluate", *usual, *given)
    assert code == 2 and problem in err and err.count("\n") == 1 + err.count(" in 0 s")


def test_comparing_with_other_items_is_an_error(sharpen):
    base = ["evaluate", "--model", "baseline:gold", "--no-general"]
    assert sharpen(*base, "--benchmark", SELECTION, "--output", "a")[0] == 0
    code, _, err = sharpen(*base, "--benchmark", "kv_retrieval:5", "--compare", "a")
    assert code == 2 and "a: is of other items than kv_retrieval:5's" in err


def test_one_s_own_tasks_and_a_comparison_without_general_items(sharpen, agent_data):
    spec = f"tasks:{agent_data / 'agent_benchmark/selection/test.jsonl'}"
    command = ["evaluate", "--model", "baseline:gold", "--output"]
    assert sharpen(*command, "a", "--benchmark", SELECTION, "--no-general")[0] == 0
    code, out, _ = sharpen(*command, "b", "--benchmark", spec, "--compare", "a", "--json")
    assert code == 0 and last(out)["comparison"]["metrics"]["accuracy"]["count"] == 19
    assert last(out)["comparison"]["general"] == {}


def test_the_cache_knows_what_was_asked():
    gold = AgentTrainingEvaluator(SELECTION, "first", options=QUIET)
    wanted = gold.evaluate("baseline:gold")
    again = AgentTrainingEvaluator(SELECTION, "second", options=QUIET)
    assert again.evaluate("baseline:gold") == wanted
    assert items("second") == items("first")  # with the same latencies: none was asked again
    assert AgentTrainingEvaluator(SELECTION, options=QUIET | {"seed": 1}).output is None


# one that is overloaded is asked again for some seconds, one that lost its model is not
@pytest.mark.parametrize("status", [404, pytest.param(503, marks=pytest.mark.slow)])
def test_a_server_that_goes_down_half_way(status):
    tasks = load_benchmark(SELECTION).tasks
    gold = served_by(named(Gold(tasks, lambda _, m: m), tasks))

    def reply(body, number):
        return gold(body, number) if number < 7 else (status, {}, "down")

    with ChatServer(reply) as server:
        judge = AgentTrainingEvaluator(SELECTION, "served", options=QUIET)
        with pytest.raises(
            SharpenError, match=f"HTTP {status}: down; 7 of 19 items done, the same comm"
        ):
            judge.evaluate(f"{server.url}#gold")
        assert len(items("served")) == 7 and not Path("served/results.json").exists()
        server.reply, before = gold, len(server.bodies)
        found = judge.evaluate(f"{server.url}#gold")
        assert found["tool_selection_accuracy"]["mean"] == 1.0 and len(items("served")) == 19
        assert len(server.bodies) - before == 12
        assert "tokens_per_task" not in judge.results["all"]  # a server does not show them


def named(policy, tasks):
    """What comes over the wire has no id: a dialog is known by its request."""
    ids = {task.instruction: task.id for task in tasks}
    respond = policy.respond
    policy.respond = lambda dialogs, sampling: respond(
        [type(d)(d.messages, d.tools, ids[d.messages[-1].content], "selection") for d in dialogs],
        sampling,
    )
    return policy


KILLED = """
import sys, time
from sharpen import AgentTrainingEvaluator
from sharpen.evals import items
from sharpen.evals.baselines import Gold
slow, items.CHUNK = Gold.turn, 4
Gold.turn = lambda self, *given: time.sleep(0.05) or slow(self, *given)
judge = AgentTrainingEvaluator("agent_benchmark/selection:test", "out", options={"general": False})
judge.evaluate("baseline:gold")
"""


def test_killed_anywhere_it_goes_on():
    process = subprocess.Popen([sys.executable, "-c", KILLED], stderr=subprocess.DEVNULL)
    file = Path("out/items.jsonl")
    until = time.monotonic() + 60
    while not (file.exists() and len(file.read_bytes().splitlines()) >= 4):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with open(file, "ab") as cut:
        cut.write(b'{"suite": "agent_ben')  # a line that was being written
    done = [row.value for row in read_jsonl(file, on_bad=lambda *_: None)]
    found = AgentTrainingEvaluator(SELECTION, "out", options=QUIET).evaluate("baseline:gold")
    assert 4 <= len(done) < 19 and items("out")[: len(done)] == done
    assert found["tool_selection_accuracy"] == found["tool_selection_accuracy"] | {
        "mean": 1.0, "count": 19
    }  # fmt: skip


def test_a_folder_a_model_and_an_adapter_agree(pico_folder):
    """A fresh adapter changes nothing; in memory or in a folder, a model says the same."""
    model = load_model(ModelConfig(base_model=str(pico_folder)))
    found = {"folder": str(pico_folder), "memory": model, "adapter": "lora"}
    for name, one in found.items():
        options = QUIET | {"limit": 3, "max_tokens": 8}
        AgentTrainingEvaluator(AgentTrainingUsage(), name, options=options).evaluate(one)
        found[name] = [row["messages"] for row in items(name)]
        if name == "memory":
            attach_lora(model, LoRAConfig(lora_r=2, lora_alpha=4)).save_pretrained("lora")
    assert found["folder"] == found["memory"] == found["adapter"]


def test_a_loader_without_tasks_is_an_error():
    class Nothing:
        def iter_samples(self, split):
            return iter(())

    with pytest.raises(SharpenError, match="there are no tasks"):
        AgentTrainingEvaluator(Nothing()).evaluate("baseline:gold")


def test_merged_models_by_ability():
    abilities = {"math": "general:math", "tool_use": SELECTION}
    found = evaluate_merged("baseline:random", ["baseline:gold", Says(EMPTY)], abilities)
    assert set(found["abilities"]) == set(abilities) and 0 <= found["overall"] < 0.5
    assert [(r["ability"], r["parent"], r["sure"]) for r in found["regressions"]] == [
        ("math", "baseline:gold", True), ("tool_use", "baseline:gold", True)
    ]  # fmt: skip
    better = evaluate_merged("baseline:gold", ["baseline:random"], abilities, "out")
    assert better["overall"] == 1.0 and not better["regressions"]
    assert Path("out/math/1/results.json").exists()


def test_writing_is_judged_or_an_error():
    marks = Says(
        lambda d: Message("assistant", '{"reason": "", "correctness": 10, "usefulness": 10}')
    )
    judge = Judge(marks, JudgeConfig(backoff_s=0))
    writer = Says(Message("assistant", "Once upon a time."))
    found = evaluate_merged(writer, [], ["writing"], judge=judge)
    assert found["overall"] == 1.0 and found["abilities"]["writing"]["count"] == 6
    silent = Judge(Says(EMPTY), JudgeConfig(backoff_s=0, attempts=1))
    for wrong, given in ((["writing"], None), (["writing"], silent), (["code"], None), ([], None)):
        with pytest.raises(SharpenError):
            evaluate_merged(writer, [], wrong, judge=given)


def test_a_request_that_a_server_refuses_is_the_items_own_fault():
    tasks = load_benchmark(SELECTION).tasks
    gold = served_by(named(Gold(tasks, lambda _, m: m), tasks))
    with ChatServer(lambda body, n: gold(body, n) if n != 3 else (400, {}, "too odd")) as server:
        judge = AgentTrainingEvaluator(SELECTION, "served", options=QUIET)
        found = judge.evaluate(server.url)["tool_selection_accuracy"]
    assert found["count"] == 19 and found["mean"] == pytest.approx(18 / 19)
    assert [row["error"] for row in items("served") if row["error"]] == ["HTTP 400: too odd"]


def test_a_simulated_user_that_fails_stops_the_evaluation(tmp_path):
    row = {"id": "1", "user_scenario": {"instructions": "Cancel W1."}}
    action = {"name": "cancel_order", "arguments": {"id": "W1"}}
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row | {"evaluation_criteria": {"actions": [action]}}) + "\n")
    down = Turn(EMPTY, StopReason.POLICY_ERROR, error="HTTP 503")

    class Leaves:
        def respond(self, dialogs, sampling):
            return [
                Turn(Message("assistant", "Hello.")) if len(d.messages) < 3 else down
                for d in dialogs
            ]

    judge = AgentTrainingEvaluator(load_benchmark(f"tau2:{file}", Leaves()), options=QUIET)
    with pytest.raises(SharpenError, match="the simulated user: HTTP 503; 0 of 1 items done"):
        judge.evaluate("baseline:gold")
