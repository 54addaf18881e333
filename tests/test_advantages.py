"""Advantages, weights and the losses of RL against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpen.train.advantages import (
    KLController,
    gae,
    group_advantages,
    overlong_penalty,
    token_weights,
    whiten,
)
from sharpen.train.losses import Surrogate, policy_loss, reduce_over_rows, value_loss

GROUPS = [np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.5, 0.0, 1.0])]


def test_a_sample_is_held_against_its_group():
    first = group_advantages(GROUPS)[0]
    np.testing.assert_allclose(first, np.array([1, -1, -1, 1]) * 0.5 / (np.sqrt(1 / 3) + 1e-4))
    assert group_advantages(GROUPS, "dr_grpo")[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    # against the mean of the others
    np.testing.assert_allclose(group_advantages(GROUPS, "rloo")[1], [0.0, -0.75, 0.75])
    np.testing.assert_allclose(group_advantages(GROUPS, "rloo")[0][0], 1 - 1 / 3)
    found = group_advantages(GROUPS, "reinforce++")
    assert [len(part) for part in found] == [4, 3]
    whole = np.concatenate(found)
    assert whole.mean() == pytest.approx(0) and whole.std() == pytest.approx(1)


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("grpo", [1 / 4, 1 / 12]), ("gspo", [1 / 4, 1 / 12]), ("rloo", [1 / 4, 1 / 12]),
        ("dapo", [1 / 8, 1 / 8]), ("reinforce++", [1 / 8, 1 / 8]), ("dr_grpo", [1 / 20, 1 / 20]),
    ],
)  # fmt: skip
def test_what_a_token_weighs(variant, weights):
    assert token_weights([2, 6], variant, 10) == pytest.approx(weights)
    assert token_weights([], variant, 10) == []


def test_gae_by_hand():
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.4, 0.8])
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0)  # what came − what was expected
    np.testing.assert_allclose(advantages, 1 - values)
    np.testing.assert_allclose(returns, [1, 1, 1])
    advantages, _ = gae(rewards, values, gamma=0.9, lam=0.0)  # one step ahead
    np.testing.assert_allclose(advantages, [0.9 * 0.4 - 0.5, 0.9 * 0.8 - 0.4, 1 - 0.8])
    mixed, _ = gae(rewards, values, gamma=0.9, lam=0.5)
    np.testing.assert_allclose(mixed[1], advantages[1] + 0.45 * advantages[2])
    np.testing.assert_allclose(mixed[0], advantages[0] + 0.45 * mixed[1])


def test_whiten_keeps_equal_values_apart_from_noise():
    assert whiten(np.array([3.0, 3.0])).tolist() == [0, 0]
    assert whiten(np.array([3.0, 3.0]), shift=False).tolist() == [3, 3]
    np.testing.assert_allclose(whiten(np.array([0.0, 4.0])), [-1, 1])
    np.testing.assert_allclose(whiten(np.array([0.0, 4.0]), shift=False), [1, 3])


@pytest.mark.parametrize(("length", "worth"), [(60, 0), (80, 0), (90, -0.5), (100, -1), (130, -1)])
def test_overlong_answers_lose_softly(length, worth):
    assert overlong_penalty(length, 100, 20) == pytest.approx(worth)
    assert overlong_penalty(length, 100, 0) == 0


def test_the_kl_controller_follows_its_target():
    fixed, adaptive = KLController(0.1), KLController(0.1, target=6.0, horizon=1000)
    fixed.update(100.0, 64)
    adaptive.update(12.0, 64)
    assert fixed.value == 0.1 and adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 0.064))
    adaptive.update(0.0, 64)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 0.064) * (1 - 0.2 * 0.064))


# Losses ----------------------------------------------------------------------------------------

NOW, OLD = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -0.1])
ROW, WEIGHT = torch.tensor([0, 0, 1]), torch.tensor([0.5, 0.5, 1.0])


def loss_of(how: Surrogate, now=NOW, **columns):
    given = {"advantage": torch.tensor([1.0, -1.0, -2.0]), **columns}
    return policy_loss(now, WEIGHT, ROW, given, how)


def test_the_surrogate_is_clipped_on_the_side_that_gains():
    loss, sums = loss_of(Surrogate(0.2, 0.28), old=OLD)
    ratios = np.exp([0.5, 0.0, -0.4])
    assert ratios[2] < 0.8 and ratios[0] > 1.28
    wanted = -0.5 * 1.28 + 0.5 * 1.0 + 2 * 0.8  # the third fell too far: clipped from below
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert sums["clip_fraction"] == 2 and sums["count"] == 3
    assert sums["surprise"] == pytest.approx(3.5)


def test_the_first_update_has_slope_one_and_no_clipping():
    now = NOW.clone().requires_grad_()
    loss, sums = loss_of(Surrogate(), now)
    loss.backward()
    np.testing.assert_allclose(now.grad, [-0.5, 0.5, 2.0])
    assert sums["clip_fraction"] == 0


@pytest.mark.parametrize(("how", "logs"), [("mean", [0.25, 0.25, -0.4]), ("sum", [0.5, 0.5, -0.4])])
def test_one_ratio_a_row(how, logs):
    np.testing.assert_allclose(reduce_over_rows(NOW - OLD, ROW, how), logs, rtol=1e-6)
    loss, _ = loss_of(Surrogate(9.0, 9.0, ratio=how), old=OLD)
    ratios = np.exp(logs)
    wanted = -0.5 * ratios[0] + 0.5 * ratios[1] + 2 * ratios[2]
    assert loss.item() == pytest.approx(wanted, rel=1e-6)


def test_kl_and_the_samplers_mismatch():
    reference, sampler = torch.tensor([-1.2, -2.0, -0.5]), torch.tensor([-1.5, -2.5, -0.1])
    plain, _ = loss_of(Surrogate(), old=NOW)
    loss, sums = loss_of(Surrogate(beta=0.1), old=NOW, reference=reference)
    kl = np.exp(-0.2) + 0.2 - 1
    assert sums["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert (loss - plain).item() == pytest.approx(0.1 * 0.5 * kl, rel=1e-4)
    loss, sums = loss_of(Surrogate(truncation=1.5), old=NOW, sampler=sampler)
    assert sums["mismatch"].item() == pytest.approx(0.5 + 0.5 + 0.4)
    wanted = -0.5 * 1.5 + 0.5 * 1.5 + 2 * np.exp(-0.4)  # e^0.5 is cut to 1.5
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_a_value_that_ran_too_far_gains_nothing():
    columns = {"value": torch.tensor([0.0, 0.0]), "return": torch.tensor([1.0, 1.0])}
    values = torch.tensor([0.1, 0.9], requires_grad=True)
    loss = value_loss(values, torch.tensor([1.0, 1.0]), columns, 0.2)
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2))
    loss.backward()
    np.testing.assert_allclose(values.grad, [-0.9, 0.0], rtol=1e-6)
