"""The quickstart recipe made small for the toy model, and a reward that tells its babble apart."""

from __future__ import annotations

from pathlib import Path

REWARD = f"{Path(__file__).resolve()}:variety"
SMALL = ["stages.1.train=8", "stages.1.test=4"]
SMALL += [f"stages.{n}.max_tokens=4" for n in (3, 5, 8)]
SMALL += [f"stages.{n}.settings.max_tokens=4" for n in (6, 7)]
SMALL += [f"stages.{n}.settings.reward={REWARD}" for n in (6, 7)]


def variety(task, trajectory):
    ids = [token for turn in trajectory.turns for token in turn.ids]
    return len(set(ids)) + sum(ids) / 10_000


class Variety:
    score = staticmethod(variety)
