"""The curriculum: what is within reach is drawn more often, and a killed run draws the same."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sharpen.data.sources import read_tasks
from sharpen.train.curriculum import MIN_WEIGHT, Curriculum, sampling_weight
from sharpen.types import SharpenError, Task

TASKS = [Task(f"{level}-{i}", "", difficulty=str(level)) for level in range(4) for i in range(10)]
ABILITY = {"0": 1.0, "1": 0.6, "2": 0.0, "3": 0.0}


def steps(curriculum: Curriculum, count: int, ability=ABILITY) -> list[list[str]]:
    picked = []
    for _ in range(count):
        tasks = curriculum.pick(8)
        curriculum.update([t.id for t in tasks], [ability[t.difficulty] for t in tasks])
        picked.append([task.id for task in tasks])
    return picked


def test_what_is_within_reach_is_drawn_more_often():
    curriculum = Curriculum(TASKS, seed=1)
    steps(curriculum, 10)
    drawn = Counter(name[0] for step in steps(curriculum, 40) for name in step)
    assert drawn["1"] > 0.5 * drawn.total()  # a quarter of the tasks
    assert min(drawn["0"], drawn["2"], drawn["3"]) > 0 and drawn.total() == 320
    better = {"0": 1.0, "1": 1.0, "2": 0.5, "3": 0.0}
    steps(curriculum, 30, better)
    later = Counter(name[0] for step in steps(curriculum, 40, better) for name in step)
    assert later["2"] > later["1"] and later["2"] > 2 * drawn["2"]


def test_a_level_speaks_for_tasks_that_nobody_tried():
    curriculum = Curriculum(TASKS)
    assert {curriculum.rate(task) for task in TASKS} == {0.5}
    curriculum.update(["2-0", "1-0"], [0.0, 1.0])
    assert curriculum.rate(TASKS[29]) == 0.0 and curriculum.rate(TASKS[19]) == 1.0
    curriculum.update(["2-1"], [1.0])
    rates = [curriculum.rate(TASKS[at]) for at in (20, 29, 21)]
    assert rates == sorted(rates) and rates[0] < rates[1] == 0.5 < rates[2]


def test_kinds_of_one_difficulty_are_not_equally_hard():
    tasks = [Task(f"{kind}-{i}", "", kind=kind) for kind in ("plan", "select") for i in range(20)]
    curriculum = Curriculum(tasks)
    curriculum.update(["plan-0", "select-0", "select-1"], [0.0, 0.5, 0.0])
    rates = {task.id: curriculum.rate(task) for task in tasks}
    assert rates["plan-1"] == 0 and rates["select-2"] == 0.25
    # what was tried says more of a task than its level does
    assert rates["select-0"] > 0.4 and rates["select-1"] < 0.1


@pytest.mark.parametrize("killed", [0, 1, 7])
def test_a_run_that_was_killed_draws_the_same(killed):
    whole = steps(Curriculum(TASKS, seed=3), 12)
    first = Curriculum(TASKS, seed=3)
    begun = steps(first, killed)
    second = Curriculum(TASKS, seed=3)
    second.load_state(json.loads(json.dumps(first.state())))
    assert begun + steps(second, 12 - killed) == whole
    assert whole != steps(Curriculum(TASKS, seed=4), 12)


def test_a_step_has_different_tasks():
    curriculum = Curriculum(list(read_tasks("procedural/arithmetic:train?levels=0-2&count=30")))
    assert len({task.id for task in curriculum.pick(30)}) == 30
    assert curriculum.pick(4) != curriculum.pick(4)


def test_rates_at_the_edges():
    assert sampling_weight(0.0) == sampling_weight(1.0) == MIN_WEIGHT
    assert sampling_weight(0.2) == sampling_weight(0.5) == pytest.approx(1) == sampling_weight(0.8)
    assert MIN_WEIGHT < sampling_weight(0.05) < sampling_weight(0.15) < 1


def test_wrong_reports_are_refused():
    curriculum = Curriculum(TASKS)
    for name, rate in (("x", 0.5), ("0-0", 1.5), ("0-0", float("nan"))):
        with pytest.raises(SharpenError, match="cannot have the pass rate"):
            curriculum.update([name], [rate])
    with pytest.raises(SharpenError, match="41 tasks per step, but there are 40"):
        curriculum.pick(41)
    for tasks in ([], [TASKS[0], TASKS[0]]):
        with pytest.raises(SharpenError, match="ids of their own"):
            Curriculum(tasks)
