"""Sampling ahead of the learner: bounded, stamped with the weights' step, never too old."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from guessing import accuracy, metrics, tasks
from sharpen.scored_rollout import TrajectoryGroup
from sharpen.train.async_sampler import AsyncGroupSource
from sharpen.train.group_source import SampledStep
from sharpen.train.grpo import GRPOTrainer
from sharpen.types import SharpenError, StopReason, Task, Trajectory
from test_grpo import code, config

pytestmark = pytest.mark.usefixtures("without_reports")


def prepared(guesser, tmp_path, **more) -> tuple[GRPOTrainer, AsyncGroupSource]:
    trainer = GRPOTrainer(config(guesser, tasks(tmp_path), async_steps=1, **more), tmp_path / "run")
    trainer.prepare()
    assert isinstance(trainer.source, AsyncGroupSource)
    return trainer, trainer.source


def test_the_base_is_shared_and_the_adapter_copied(guesser, tmp_path):
    trainer, source = prepared(guesser, tmp_path, full=False, lora_r=2)
    for name, theirs in source.model.named_parameters():
        ours = dict(trainer.model.named_parameters())[name]
        assert (ours.data_ptr() == theirs.data_ptr()) == (name not in trainer.learner.trained)
    assert len(source.copied_weights) == len(trainer.learner.trained)


def test_old_samples_are_dropped_and_counted(guesser, tmp_path):
    """The thread is let go once a group: what it made of the first weights is too old later."""
    _, source = prepared(guesser, tmp_path, max_staleness=1)
    entered, go, seen = threading.Semaphore(0), threading.Semaphore(0), []
    samples = [Trajectory("t", (), StopReason.ANSWERED)] * 3

    def sample(step):
        entered.release()
        go.acquire()
        seen.append(float(next(iter(source.copied_weights.values())).sum()))
        source.local.position += 1
        group = TrajectoryGroup(Task("t", "t"), samples, np.zeros(3))
        return SampledStep([group], {"at": source.local.position})

    source.local.next = sample
    with source:
        go.release()
        figures = source.next(0).figures
        assert figures["stale"] == 0 and figures["staleness"] == 0
        assert source.state()["position"] == 1
        go.release()  # of the weights of step 0 too, and waiting since
        for _ in range(3):  # and so is the third, whose weights are loaded
            entered.acquire()
        weights = source.learner.trained[next(iter(source.copied_weights))]
        weights.data.add_(1.0)
        source.publish(2)
        go.release()
        go.release()
        sampled = source.next(2)
        assert sampled.figures == {"at": 4, "staleness": 0, "stale": 6}
        assert len(sampled.groups) == 1 and source.state()["position"] == 4
        go.release()
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_what_fails_in_the_thread_fails_the_run(guesser, tmp_path):
    reward = code(tmp_path, "def score(task, made):\n    return float('nan')\n")
    settings = config(guesser, tasks(tmp_path), reward=reward, async_steps=1)
    with pytest.raises(SharpenError, match="no sample of the step could be scored"):
        GRPOTrainer(settings, tmp_path / "run").train()
    settings = config(guesser, tasks(tmp_path), env=code(tmp_path, BROKEN, "Broken"), async_steps=1)
    with pytest.raises(SharpenError, match="task n: wrong"):
        GRPOTrainer(settings, tmp_path / "other").train()
    assert not [t for t in threading.enumerate() if t.name == "sampler"]


BROKEN = """
from sharpen.types import SharpenError

class Broken:
    def reset(self, task):
        raise SharpenError("task n: wrong")

    def step(self, message):
        return (), None
"""


@pytest.mark.slow
def test_it_learns_and_goes_on(guesser, tmp_path):
    """Stopped and continued, with samples of weights that are a step or two old."""
    more = {"tasks_per_step": 8, "group_size": 8, "updates_per_step": 2, "max_flat_steps": 99}
    settings = config(guesser, tasks(tmp_path), async_steps=1, max_steps=40, **more)
    trainer = GRPOTrainer(settings, tmp_path / "run")
    update = trainer.update

    class Killed(BaseException):
        pass

    def dying(groups, state):
        if trainer.learner.steps_done == 20:
            raise Killed
        return update(groups, state)

    trainer.update = dying
    with pytest.raises(Killed):
        trainer.train()
    GRPOTrainer(settings, tmp_path / "run").train()
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(row["staleness"] for row in rows) in (1, 2)
    assert accuracy(tmp_path / "run" / "final") > accuracy(guesser) + 0.25
