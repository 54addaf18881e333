"""Rehearsal across rounds, and forgetting measured over a sequence of tasks."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from sharpen import Datum, Dialog, Message, OnlineContinualLearner, SharpenError
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.continual import (
    EWC,
    DarkReplay,
    Naive,
    Rehearsal,
    TaskRows,
    fisher_diagonal,
    train_sequence,
    transfer_figures,
)
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean


def rows(count: int, name: str = "r", kind: str = "", losses=None) -> list[Dialog]:
    said = (Message("user", "hi"), Message("assistant", "yes"))
    given = [{"loss": loss} for loss in losses] if losses is not None else [{}] * count
    return [Dialog(said, (), f"{name}{i}", kind, given[i]) for i in range(count)]


def names(found) -> list[str]:
    return [row.id for row in found]


# The buffer ----------------------------------------------------------------------------------


def test_rounds_are_replayed_later_and_only_later(capsys):
    learner = OnlineContinualLearner(100, 0.5)
    first, second, third = rows(20, "a"), rows(10, "b"), rows(40, "c")
    assert learner.mix(first) == first
    assert "round 1: nothing to replay yet" in capsys.readouterr().out
    mixed = learner.mix(second)
    assert mixed[:10] == second and len(mixed) == 15
    assert set(names(mixed[10:])) <= set(names(first)) and len(set(names(mixed))) == 15
    assert "round 2: 5 rows replayed (5 wanted, 20 kept)" in capsys.readouterr().out
    replayed = names(learner.mix(third)[40:])
    assert len(replayed) == 20 and {n[0] for n in replayed} == {"a", "b"}


def test_rows_of_the_current_round_are_not_replayed():
    learner = OnlineContinualLearner(50, 1.0)
    learner.observe(rows(30, "a"))
    assert learner.replay(10) == []
    learner.round += 1
    learner.observe(rows(10, "b"))
    assert len(learner.replay(100)) == 30 and all(n[0] == "a" for n in names(learner.replay(100)))


def test_the_reservoir_is_uniform_over_everything_seen():
    """3,000 buffers of 5 from 25 rows in three rounds: every row is kept about a fifth of the
    time, whenever it came, and drawn as often as any other."""
    kept, drawn = Counter(), Counter()
    for seed in range(3000):
        learner = OnlineContinualLearner(5, 1.0, seed=seed)
        for start, end in ((0, 10), (10, 12), (12, 25)):
            learner.observe(rows(25)[start:end])
            learner.round += 1
        assert len(learner) == 5 and learner.seen == 25
        kept.update(names(learner.replay(5)))
        drawn.update(names(learner.replay(2)))
    assert len(kept) == 25 and all(abs(count - 600) < 4 * 22 for count in kept.values())
    assert all(abs(count - 240) < 4 * 15 for count in drawn.values())


def test_loss_weighted_keeps_and_draws_high_losses_more_often():
    """Two rows, losses 1 and 3: the second is the one kept, or the one drawn, 3 times of 4."""
    kept = drawn = 0
    for seed in range(2000):
        small, large = (OnlineContinualLearner(n, 1.0, "loss_weighted", seed) for n in (1, 2))
        for learner in (small, large):
            learner.mix(rows(2, losses=[1.0, 3.0]))
        kept += names(small.replay(1)) == ["r1"]
        drawn += names(large.replay(1)) == ["r1"]
    assert abs(kept - 1500) < 80 and abs(drawn - 1500) < 80
    learner = OnlineContinualLearner(4, 1.0, "loss_weighted")
    learner.mix(rows(4), losses=[0.0, 0.0, 1.0, 0.0])  # given losses, and none at all
    assert len(learner) == 4 and names(learner.replay(1)) == ["r2"]


def test_loss_weighted_makes_no_loss_up():
    with pytest.raises(SharpenError, match="r0: loss_weighted replay needs the row's loss"):
        OnlineContinualLearner(4, 1.0, "loss_weighted").mix(rows(4))
    with pytest.raises(SharpenError, match=r"r1: .* found nan"):
        OnlineContinualLearner(4, 1.0, "loss_weighted").mix(rows(2), losses=[1.0, float("nan")])


def test_class_balanced_keeps_and_draws_types_evenly():
    learner = OnlineContinualLearner(30, 1.0, "class_balanced")
    learner.mix(rows(500, "s", "selection"))
    learner.mix(rows(12, "p", "planning"))
    learner.mix(rows(4, "t", "timing"))
    kept = Counter(row.task_type for row in learner.replay(30))
    assert kept["timing"] == 4 and kept["planning"] in (12, 13) and sum(kept.values()) == 30
    drawn = Counter(row.task_type for row in learner.replay(9))
    assert drawn == {"selection": 3, "planning": 3, "timing": 3}


def test_class_balanced_is_uniform_within_a_type():
    """A type that has given way to others still holds early and late rows alike."""
    kept, data = Counter(), (rows(12, "s", "selection"), rows(12, "p", "planning"))
    for seed in range(2000):
        learner = OnlineContinualLearner(5, 1.0, "class_balanced", seed)
        for pair in zip(*data, strict=True):
            learner.observe(pair)
        learner.round += 1
        kept.update(names(learner.replay(5)))
    for kind in "sp":
        counts = [kept[f"{kind}{number}"] for number in range(12)]
        mean = sum(counts) / 12
        assert all(abs(count - mean) < 4.5 * mean**0.5 for count in counts)


@pytest.mark.parametrize("strategy", ["reservoir", "loss_weighted", "class_balanced"])
@pytest.mark.parametrize("as_datums", [False, True])
def test_a_saved_buffer_goes_on_exactly(tmp_path, strategy, as_datums):
    def made(name: str) -> list:
        if not as_datums:
            found = rows(30, name, losses=range(30))
            return [
                Dialog(d.messages, d.tools, d.id, "xy"[i % 2], d.metadata)
                for i, d in enumerate(found)
            ]
        ids = np.arange(6, dtype=np.int32)
        return [Datum(ids + i, ids % 2 == 0, f"{name}{i}", "xy"[i % 2], 0.5) for i in range(30)]

    losses = [float(i) for i in range(30)]
    whole, before, after = (OnlineContinualLearner(20, 0.5, strategy, seed) for seed in (1, 1, 9))
    for learner in (whole, before):
        learner.mix(made("a"), losses)
    before.save(tmp_path / "replay.json")
    after.load(tmp_path / "replay.json")
    for name in "bcd":
        wanted, found = (learner.mix(made(name), losses) for learner in (whole, after))
        assert names(found) == names(wanted) and len(found) == 45
    assert json.dumps(after.state()) == json.dumps(whole.state())
    one, other = after.replay(1)[0], whole.replay(1)[0]
    if as_datums:
        assert one.ids.dtype == np.int32 and one.mask.dtype == bool and one.weight == 0.5
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.mask, other.mask)
    else:
        assert one == other


def test_bad_settings(tmp_path):
    with pytest.raises(SharpenError, match="'best' is unknown; known are reservoir, loss_weighted"):
        OnlineContinualLearner(4, 1.0, "best")
    for size, ratio in ((0, 0.5), (4, -0.1), (4, float("nan"))):
        with pytest.raises(SharpenError, match="replay: a buffer of"):
            OnlineContinualLearner(size, ratio)
    other = OnlineContinualLearner(5, 1.0).state()
    with pytest.raises(SharpenError, match=r"kept by \[5, 'reservoir'\], not by \[4"):
        OnlineContinualLearner(4, 1.0).load_state(json.loads(json.dumps(other)))
    (tmp_path / "other.json").write_text('{"loss": 1}')
    with pytest.raises(SharpenError, match=r"other\.json: not a replay buffer"):
        OnlineContinualLearner(4, 1.0).load(tmp_path / "other.json")


# Figures -------------------------------------------------------------------------------------


def test_transfer_figures():
    matrix = np.array([[0.1, 0.2, 0.3], [0.9, 0.4, 0.3], [0.5, 0.8, 0.6], [0.6, 0.7, 1.0]])
    found = transfer_figures(matrix)
    assert found["average"] == pytest.approx((0.6 + 0.7 + 1.0) / 3)
    assert found["backward_transfer"] == pytest.approx((-0.3 - 0.1) / 2)
    assert found["forgetting"] == pytest.approx((0.3 + 0.1) / 2)
    assert found["forward_transfer"] == pytest.approx((0.2 + 0.3) / 2)
    assert transfer_figures(-matrix, higher_is_better=False) == found
    gain = transfer_figures(np.array([[0.0, 0.0], [0.5, 0.2], [0.7, 0.9]]))
    assert gain["backward_transfer"] == pytest.approx(0.2) == -gain["forgetting"]


# A sequence of tasks on pico -----------------------------------------------------------------


def task(name: str, marker: int, count: int = 24) -> TaskRows:
    """Keys and their values, another value for the same key in every task."""
    values = np.random.default_rng(marker).integers(100, 110, (count, 3))
    ids = [np.array([marker, 10 + key, *values[key]], np.int32) for key in range(count)]
    mask = np.array([0, 0, 1, 1, 1], bool)
    data = [Datum(row, mask, f"{name}{key}", name) for key, row in enumerate(ids)]
    return TaskRows(name, data, data)


TASKS = (task("a", 1), task("b", 2))


def known(learner: Learner, task: TaskRows) -> float:
    """The share of keys whose value is the likeliest, every token of it."""
    return float(np.mean([v.min() > np.log(0.5) for v in learner.logprobs(task.dev)]))


def pico_model(folder, lora: bool = False):
    model = load_model(ModelConfig(base_model=str(folder), device="cpu"))
    torch.manual_seed(0)
    return attach_lora(model, LoRAConfig(lora_r=4)) if lora else model.requires_grad_(True)


def learned(folder, method: Naive, rate: float = 3e-3, epochs: int = 45) -> dict[str, np.ndarray]:
    config = LearnerConfig(learning_rate=rate, lr_scheduler="constant", warmup_ratio=0.0)
    return train_sequence(pico_model(folder), TASKS, config, method, epochs, 24, known)


@pytest.fixture(scope="module")
def naive(pico_folder):
    return learned(pico_folder, Naive())


def test_naive_fine_tuning_forgets(naive):
    assert naive["score"].shape == naive["loss"].shape == (3, 2)
    found = transfer_figures(naive["score"])
    assert naive["score"][1, 0] == 1 and naive["score"][2, 1] == 1  # each is learned in its turn
    assert found["forgetting"] == 1 and found["backward_transfer"] == -1
    assert transfer_figures(naive["loss"], higher_is_better=False)["forgetting"] > 3


def slowly(*values):
    """The first value quickly, the others among the slow tests."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]


@pytest.mark.parametrize("strategy", slowly("reservoir", "loss_weighted", "class_balanced"))
def test_rehearsal_forgets_less(pico_folder, naive, strategy):
    found = learned(pico_folder, Rehearsal(OnlineContinualLearner(18, 1.0, strategy)))
    assert np.array_equal(found["loss"][:2], naive["loss"][:2])  # there was nothing to replay yet
    assert found["score"][2, 1] == 1
    assert transfer_figures(found["score"])["forgetting"] < 0.4
    assert found["loss"][2, 0] < 0.4 * naive["loss"][2, 0]


@pytest.mark.parametrize("beta", slowly(0.5, 0.0))
def test_dark_replay_forgets_less(pico_folder, naive, beta):
    buffer = OnlineContinualLearner(18, 1.0)
    found = learned(pico_folder, DarkReplay(buffer, 0.5, beta, count=18))
    assert np.array_equal(found["loss"][:2], naive["loss"][:2]) and found["score"][2, 1] == 1
    assert transfer_figures(found["score"])["forgetting"] < 0.5
    assert found["loss"][2, 0] < 0.5 * naive["loss"][2, 0]


def test_ewc_forgets_less_and_still_learns(pico_folder):
    naive, found = (learned(pico_folder, m, 1e-3, 60)["loss"] for m in (Naive(), EWC(1e4)))
    assert np.array_equal(found[:2], naive[:2])
    forgot = [transfer_figures(m, higher_is_better=False)["forgetting"] for m in (naive, found)]
    assert forgot[0] > 2 and forgot[1] < 0.35 * forgot[0]
    assert found[2, 1] < 0.3 * found[1, 1] and found[2].mean() < naive[2].mean()


def test_fisher_is_the_mean_squared_gradient_of_single_rows(pico_folder):
    model = pico_model(pico_folder, lora=True)
    learner = Learner(model, LearnerConfig(learning_rate=1e-3), 10)
    learner.step(TASKS[0].train, token_mean)  # so that A has a gradient too
    data = TASKS[0].train[:3]
    found = fisher_diagonal(learner, data)
    model.eval()
    wanted = {name: torch.zeros_like(weight) for name, weight in learner.master.items()}
    for datum in data:
        ids = torch.tensor(datum.ids).long()[None]
        labels = torch.where(torch.tensor(datum.mask), ids[0], -100)[None]
        slopes = torch.autograd.grad(
            model(input_ids=ids, labels=labels).loss, learner.trained.values()
        )
        for name, slope in zip(learner.trained, slopes, strict=True):
            wanted[name] += slope**2 / 3
    assert all("lora" in name for name in found) and len(found) == len(wanted)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-9)
    assert all(weight.grad is None for weight in learner.master.values())


def test_ewc_adds_the_slope_of_its_penalty(pico_folder):
    learner = Learner(pico_model(pico_folder, lora=True), LearnerConfig(learning_rate=1e-2), 10)
    learner.step(TASKS[0].train, token_mean)
    method = EWC(7.0, fisher_rows=5)
    method.before_clip(learner)
    assert all(weight.grad is None for weight in learner.master.values())  # no task learned yet
    method.after(learner, TASKS[0])
    learner.step(TASKS[1].train, token_mean)
    name, weight = next((n, w) for n, w in learner.master.items() if "lora_B" in n)
    method.before_clip(learner)
    fisher, anchor = method.penalty[f"fisher.{name}"], method.penalty[f"anchor.{name}"]
    moved = weight.detach().clone().requires_grad_()
    (3.5 * fisher * (moved - anchor) ** 2).sum().backward()
    assert fisher.abs().max() > 0 and moved.grad.abs().max() > 0
    torch.testing.assert_close(weight.grad, moved.grad)
    method.before_clip(learner)  # gradients that are there are added to
    torch.testing.assert_close(weight.grad, 2 * moved.grad)
    method.after(learner, TASKS[1])
    assert (method.penalty[f"fisher.{name}"] - fisher).min() >= 0  # tasks add up
    assert torch.equal(method.penalty[f"anchor.{name}"], weight.detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rehearsal(OnlineContinualLearner(10, 1.0, seed=2)),
        lambda: DarkReplay(OnlineContinualLearner(10, 1.0, seed=2)),
        lambda: EWC(100.0),
    ],
)
def test_a_method_goes_on_exactly_from_its_state(pico_folder, tmp_path, make):
    from safetensors.torch import load_file, save_file

    config = LearnerConfig(learning_rate=1e-3, lr_scheduler="constant")
    weights = []
    for resumed in (False, True):
        method = make()
        learner = Learner(pico_model(pico_folder, lora=True), config, 20)
        learner.step(TASKS[0].train, token_mean)
        method.after(learner, TASKS[0])
        if resumed:
            tensors, values = method.state()
            save_file(tensors, tmp_path / "state.safetensors")
            method = make()
            method.load_state(
                load_file(tmp_path / "state.safetensors"), json.loads(json.dumps(values))
            )
        learner.before_clip.append(method.before_clip)
        for _ in range(3):
            learner.step(method.rows(TASKS[1]), token_mean)
        weights.append(torch.cat([w.detach().flatten() for w in learner.master.values()]))
    assert torch.equal(*weights)


def test_a_sequence_needs_tasks_with_rows(pico_folder):
    for tasks in (TASKS[:1], (TASKS[0], TaskRows("empty", [], TASKS[0].dev))):
        with pytest.raises(SharpenError, match="two tasks or more"):
            train_sequence(pico_model(pico_folder), tasks, LearnerConfig())
