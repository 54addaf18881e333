"""The builder over a small world: same bytes, real results, executed gold, no leak."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest

from sharpen.data.check import CheckReport, check_rows
from sharpen.data.generate.build import Sizes, build_data, divide_by_shares, fill_file
from sharpen.data.generate.dialog_draft import DialogDraft
from sharpen.data.generate.draw import BuiltFile, draw_rows
from sharpen.data.generate.guard import Guard
from sharpen.data.generate.scenarios import find_scenario, scenario
from sharpen.data.generate.sets import parts
from sharpen.data.generate.tool_pool import ToolPool, split_categories, touched_entities
from sharpen.data.generate.verify import resolve_reference, run_gold, verify_gold
from sharpen.data.overlap import compare_splits, find_leaks
from sharpen.data.sources import read_dialogs, read_rows, read_tasks
from sharpen.data.sources import resolve_files as resolve_name
from sharpen.envs.toolworld import ToolWorld
from sharpen.rows import dialog_from_row, task_from_row
from sharpen.spec.data import AgentDialogProcessor, AgentSFTFormatter, AgentTrainingUsage
from sharpen.types import Dialog, Message, SharpenError, StopReason, Task, ToolCall
from sharpen.world.episode import DOMAINS, Faults, World
from sharpen.world.state import seeded_rng

NAMES = ("calendar_meetings", "finance_accounts", "home_lighting", "travel_flights")
SIZES = Sizes(dialogs=120, tasks=0.04, extended=20)
PARTS = ("selection", "planning", "timing", "end_to_end")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("domains")
    for name in NAMES:
        shutil.copy(DOMAINS / f"{name}.yaml", folder)
    return World(folder)


@pytest.fixture(scope="module")
def built(world, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "out"
    build_data(out, 3, SIZES, world=world)
    return out


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_same_seed_same_bytes_other_seed_other_rows(world, built, tmp_path):
    first = json.loads((built / "manifest.json").read_text("utf-8"))
    assert build_data(tmp_path / "again", 3, SIZES, world=world) == first
    other = build_data(tmp_path / "other", 4, SIZES, world=world)
    same = [f for f, digest in first["files"].items() if other["files"][f] == digest]
    assert same == ["agent_tools/tools.jsonl"]


def test_counts_and_every_row_is_valid(built):
    manifest = json.loads((built / "manifest.json").read_text("utf-8"))
    assert manifest["rows"]["agent_sft/train.jsonl"] == 96
    assert manifest["rows"]["agent_benchmark/timing/extended.jsonl"] == 20
    for path in sorted(built.rglob("*.jsonl")):
        report = CheckReport(str(path))
        bad = [problems for _, problems in check_rows(path, report) if problems]
        assert not bad, path
        assert report.rows == manifest["rows"][path.relative_to(built).as_posix()]


def test_splits_do_not_leak(built):
    for folder in ("agent_sft", *(f"agent_benchmark/{part}" for part in PARTS)):
        found = compare_splits(
            [built / folder / f"{split}.jsonl" for split in ("train", "dev", "test")]
        )
        assert find_leaks(found) == []
        assert found["distinct"]["all"] == 1.0
    tools = {}
    for split in ("train", "dev", "test"):
        tools[split] = set()
        for row in rows(built / "agent_sft" / f"{split}.jsonl"):
            tools[split] |= {tool["function"]["name"] for tool in row["tools"]}
    assert not tools["train"] & tools["test"] and not tools["train"] & tools["dev"]


def test_dialogs_have_the_promised_shape(world, built):
    for row in rows(built / "agent_sft" / "train.jsonl"):
        dialog = dialog_from_row(row)
        assert 6 <= len(dialog.messages) <= 12
        assert dialog.messages[-1].role == "assistant" and not dialog.messages[-1].tool_calls
        called = {c.name for m in dialog.messages for c in m.tool_calls}
        others = {t.name for t in dialog.tools} - called
        category = dialog.metadata["category"]
        assert any(world.tool(name).category == category for name in others)
    types = {row["task_type"] for row in rows(built / "agent_sft" / "train.jsonl")}
    expected = {"tool_selection", "multi_step_planning", "timing_decision", "tool_retrieval"}
    assert types == expected


def test_tool_results_are_what_the_world_answers(world, built):
    failures = 0
    for row in rows(built / "agent_sft" / "train.jsonl"):
        dialog = dialog_from_row(row)
        meta = dialog.metadata
        at = {int(n): kind for n, kind in meta["faults"]["at"].items()}
        episode = world.episode([meta["category"]], meta["seed"], "train", Faults(at=at))
        for message in dialog.messages:
            answers = [episode.call(call) for call in message.tool_calls]
            if message.tool_calls:
                expected = answers
            elif message.role == "tool":
                assert json.loads(message.content) == expected.pop(0)
                failures += "error" in json.loads(message.content)
    assert failures > 5


def test_mistakes_are_read_and_corrections_trained(built):
    """A wrong call that is not trained, its error, and a right call that is: in kinds that say so,
    and nowhere else."""
    errors = Counter()
    for split in ("train", "dev", "test"):
        for dialog in read_dialogs(str(built / "agent_sft" / f"{split}.jsonl")):
            messages = dialog.messages
            wrong_turns = [n for n, message in enumerate(messages) if not message.trained]
            assert len(wrong_turns) == ("correction" in dialog.metadata["kind"])
            for wrong_turn in wrong_turns:
                next_turn = wrong_turn + 1
                while messages[next_turn].role == "tool":
                    next_turn += 1
                answers = messages[wrong_turn + 1 : next_turn]
                results = [json.loads(message.content) for message in answers]
                [failed] = [n for n, result in enumerate(results) if "error" in result]
                errors[results[failed]["error"]] += 1
                [right_call] = messages[next_turn].tool_calls
                assert right_call != messages[wrong_turn].tool_calls[failed]
                assert messages[next_turn].trained
                assert "error" not in json.loads(messages[next_turn + 1].content)
                assert right_call.name in dialog.metadata["target_tools"]
    assert {*errors} == {"invalid_argument", "not_found", "unknown_tool"}


def test_some_dialogs_call_nothing_and_some_in_parallel(built):
    dialogs = [dialog_from_row(row) for row in rows(built / "agent_sft" / "train.jsonl")]
    calls = [sum(len(m.tool_calls) for m in d.messages) for d in dialogs]
    assert sum(count == 0 for count in calls) >= 0.04 * len(dialogs)
    assert any(len(m.tool_calls) > 1 for d in dialogs for m in d.messages)


@pytest.mark.parametrize("split", ["train", "dev", "test", "extended"])
def test_gold_is_executable_and_spoiled_gold_is_named(world, built, split):
    tasks = []
    for part in PARTS:
        path = built / "agent_benchmark" / part / f"{split}.jsonl"
        tasks += [task_from_row(row) for row in rows(path)]
    for task in tasks:
        verify_gold(world, task.gold, task.id)
    task = next(t for t in tasks if t.kind == "end_to_end")
    with pytest.raises(SharpenError, match=r"row-7: .* recorded end state"):
        verify_gold(world, task.gold | {"calls": []}, "row-7")
    plan = next(t for t in tasks if t.kind == "planning").gold
    with pytest.raises(SharpenError, match=r"row-8: .* recorded end state"):
        verify_gold(world, plan | {"calls": plan["calls"][:1]}, "row-8")
    with pytest.raises(SharpenError, match="row-7: the gold call of nothing fails"):
        verify_gold(world, task.gold | {"calls": [{"name": "nothing", "arguments": {}}]}, "row-7")


def test_any_order_that_respects_a_plan_is_right(world, built):
    linked = 0
    for row in rows(built / "agent_benchmark" / "planning" / "extended.jsonl"):
        gold = row["gold"]
        end_states = set()
        linked += bool(gold["edges"])
        for order in permutations(gold["steps"]):
            place = {step["id"]: at for at, step in enumerate(order)}
            if all(place[a] < place[b] for a, b in gold["edges"]):
                episode, _ = run_gold(world, gold | {"steps": order}, row["id"])
                end_states.add(episode.digest())
        assert end_states == {gold["state"]}
        values = [value for step in gold["steps"] for value in step["arguments"].values()]
        references = [value for value in values if isinstance(value, dict) and "$from" in value]
        assert bool(gold["edges"]) == bool(references)
    assert linked > 5
    with pytest.raises(SharpenError, match=r"s1\.flights\.0\.flight_id is not in the results"):
        resolve_reference({"$from": "s1.flights.0.flight_id"}, {"s1": {"flights": []}}, "row")


def test_end_to_end_tasks_are_solved_by_gold_and_not_by_nothing(world, built):
    environment = ToolWorld(world)
    for row in rows(built / "agent_benchmark" / "end_to_end" / "extended.jsonl"):
        task = task_from_row(row)
        environment.reset(task)
        assert not environment.end_state_reached()
        for call in task.gold["calls"]:
            message = Message("assistant", tool_calls=(ToolCall(call["name"], call["arguments"]),))
            answers, _ = environment.step(message)
            if json.loads(answers[0].content).get("error") in ("timeout", "rate_limit"):
                environment.step(message)
        assert environment.end_state_reached(), environment.differences()
        assert environment.step(Message("assistant", "Done.")) == ((), StopReason.ANSWERED)


def test_timing_decisions_fit_what_is_offered(world, built):
    seen = set()
    for row in rows(built / "agent_benchmark" / "timing" / "extended.jsonl"):
        offered = {tool["function"]["name"] for tool in row["tools"]}
        gold = row["gold"]
        seen.add(gold["decision"])
        assert set(gold.get("tools", [])) <= offered
        if gold["decision"] == "ask":
            required = world.tool(gold["tools"][0]).required
            assert gold["missing"] and set(gold["missing"]) <= set(required)
        if row["metadata"]["variant"] == "remember":
            assert any(m["role"] == "tool" for m in row["context"])
    assert seen == {"call", "ask", "answer", "decline"}


def test_held_out_tools_show_no_requests(built):
    for row in rows(built / "agent_tools" / "tools.jsonl"):
        assert all(("request" in e) == (row["split"] == "train") for e in row["examples"])


def test_categories_are_held_out_by_name_alone():
    names = [f"d/{i}" for i in range(50)]
    places = split_categories(names)
    assert list(places.values()).count("test") == 5 and list(places.values()).count("dev") == 3
    assert split_categories(names[::-1])["d/7"] == places["d/7"]
    with pytest.raises(SharpenError, match=r"2 cannot be split .* at least 3"):
        split_categories(["a/b", "c/d"])


def test_candidates_leave_out_what_is_withheld(world):
    pool = ToolPool(world, "train", 0)
    kind = parts()["timing"].kinds["decline"]
    tool = pool.tools[0]
    episode = world.episode([tool.category], 0)
    draft = DialogDraft(pool, episode, seeded_rng(1), kind, tool, tool.operation.ask[0], 0)
    draft.withhold_tool()
    siblings = draft.domain.tools.values()
    assert tool in draft.withheld_tools and len(draft.withheld_tools) < len(siblings)
    offered = pool.draw_candidates([], 5, draft.rng, draft.withheld_tools)
    assert len(offered) == 5
    for candidate in offered:
        if candidate in siblings:
            assert not touched_entities(candidate) & touched_entities(tool)


def test_scenarios_are_found_by_name():
    for part in parts().values():
        for kind in part.kinds.values():
            assert callable(find_scenario(kind.scenario))
    with pytest.raises(SharpenError, match="'nothing' is not registered; use one of answer_calc"):
        find_scenario("nothing")
    with pytest.raises(ValueError, match="two scenarios are called 'select_tool'"):
        scenario("select_tool")(print)


def test_guard_turns_away_copies():
    def task(text: str, **arguments: str) -> Task:
        return Task("", text, gold={"calls": [{"name": "t", "arguments": arguments}]})

    guard = Guard()
    first = task("Cancel booking AB-1 for the lady with the green umbrella", key="AB-1")
    assert guard.admit(first, "test", "test.jsonl")
    assert not guard.admit(first, "train", "train.jsonl"), "verbatim"
    near = task("Please cancel the booking CD-2 of the lady with a green umbrella!", key="CD-2")
    assert not guard.admit(near, "train", "train.jsonl"), "the same words"
    assert guard.admit(near, "test", "test.jsonl"), "its own split may"
    again = task("Cancel booking CD-9 for the lady with the green umbrella", key="CD-9")
    assert not guard.admit(again, "test", "test.jsonl"), "only the value differs"
    assert guard.admit(again, "test", "extended.jsonl", values_count=True)
    long = " ".join(f"word{c}" for c in "abcdefghijklm")
    assert guard.admit(task(long + " and some other ending that goes on"), "dev", "dev.jsonl")
    rest = " ".join(f"more{c}{d}" for c in "abcdef" for d in "abcdefgh")
    assert not guard.admit(task(f"{rest} {long}"), "train", "train.jsonl"), "13 words in a row"


def test_portions_add_up():
    assert divide_by_shares(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}


def test_a_quota_that_cannot_be_met_is_named(world):
    file = BuiltFile("agent_benchmark/timing/test.jsonl", "test", {"reckon": 30}, "timing")
    with pytest.raises(SharpenError, match=r"timing/test\.jsonl: only \d of 30 rows of kind"):
        fill_file(
            file, 0, Guard(), lambda jobs: (draw_rows(job, world) for job in jobs), advance=print
        )


def test_a_foreign_folder_is_not_replaced(world, tmp_path):
    (tmp_path / "agent_sft").mkdir()
    with pytest.raises(SharpenError, match="agent_sft without a manifest"):
        build_data(tmp_path, 0, SIZES, world=world)


# Loaders ---------------------------------------------------------------------------------------


def test_sets_by_name(built, monkeypatch):
    monkeypatch.setenv("SHARPEN_DATA", str(built))
    assert len(list(read_dialogs("agent_sft:dev"))) == 12
    assert len(resolve_name("agent_benchmark:test")) == 4
    assert {t.kind for t in read_tasks("agent_benchmark/timing:dev")} == {"timing"}
    assert len(list(read_rows("agent_tools"))) == 96
    for wrong in ("agent_sft:all", "agent_benchmark/cooking:test", "nothing", "agent_tools:dev"):
        with pytest.raises(SharpenError, match="neither a file nor"):
            resolve_name(wrong)


def test_sets_are_built_in_the_cache_on_first_use(monkeypatch, tmp_path):
    built_folders = []

    def build(folder: Path, workers: int) -> None:
        built_folders.append(folder)
        (folder / "agent_sft").mkdir(parents=True)
        (folder / "agent_sft" / "dev.jsonl").touch()
        (folder / "manifest.json").write_text('{"files": {}}')

    monkeypatch.delenv("SHARPEN_DATA", raising=False)
    monkeypatch.setenv("SHARPEN_CACHE", str(tmp_path))
    monkeypatch.setattr("sharpen.data.sources.build_data", build)
    assert resolve_name("agent_sft:dev") == resolve_name("agent_sft:dev")
    assert len(built_folders) == 1 and built_folders[0].parent == tmp_path
    with pytest.raises(SharpenError, match=r"has no agent_sft/test\.jsonl; run sharpen data build"):
        resolve_name("agent_sft:test")
    other = tmp_path / "other/data/generate"  # of a generator that has changed
    other.mkdir(parents=True)
    (other / "scenarios.py").touch()
    monkeypatch.setattr("sharpen.data.sources.PACKAGE_FOLDER", tmp_path / "other")
    resolve_name("agent_sft:dev")
    assert len({*built_folders}) == 2


def test_training_usage(built, monkeypatch):
    monkeypatch.setenv("SHARPEN_DATA", str(built))
    usage = AgentTrainingUsage()
    row = next(usage.get_sft_data("train"))
    assert set(row) == {"input", "output", "task_type", "metadata"}
    assert row["input"].endswith("<|assistant|>\n") and "<tools>" in row["input"]
    for pair in usage.get_preference_data():
        assert pair.chosen != pair.rejected and pair.chosen[0].tool_calls
        assert (pair.chosen_score, pair.rejected_score) == (1.0, 0.0)
    assert {t.kind for t in usage.get_evaluation_data("test")} == set(PARTS)


def test_formatter_classifies_rows_without_a_type():
    call = Message("assistant", tool_calls=(ToolCall("t", {"a": 1}),))
    user = Message("user", "Do it.")
    answer = Message("assistant", "Done.")
    formatter = AgentSFTFormatter()
    row = formatter.format_dialog(Dialog((user, call, Message("tool", "ok", name="t"), answer)))
    assert row["task_type"] == "tool_selection"
    assert "<tool_result>ok</tool_result>\nDone." in row["output"]
    assert formatter.classify_task(Dialog((user, answer))) == "timing_decision"
    assert formatter.classify_task(Dialog((user, call, call, answer))) == "multi_step_planning"


def test_processor_measures_and_keeps_a_loss_that_is_there(pico_tokenizer):
    class Scorer:
        def losses(self, dialogs):
            return [0.5 for _ in dialogs]

    said = (Message("user", "go go go stop"), Message("assistant", "好的 好的"))
    known = Dialog(said, metadata={"loss": 2.0}, id="known")
    fresh = Dialog(said, id="fresh")
    first, second = AgentDialogProcessor(pico_tokenizer, Scorer()).process([known, fresh])
    assert (first.metadata["loss"], second.metadata["loss"]) == (2.0, 0.5)
    assert first.metadata["token_length"] > 20
    assert first.metadata["lexical_diversity"] == 0.5  # go stop 好 的 of eight words
    unscored = AgentDialogProcessor(pico_tokenizer).process([fresh])[0]
    assert "loss" not in unscored.metadata
