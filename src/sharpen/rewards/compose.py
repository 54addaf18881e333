"""Find rewards by name, and compose them from one block of a recipe.

    reward: {parts: [{name: agent}, {name: "my.py:score", weight: 0.5}],
             gates: [{part: agent.format_compliance, at_least: 1}], clip: [-1, 1]}

Trainers, the pipeline and `sharpen reward try` call `build_reward`.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from sharpen.config import Config, ConfigError, one_line, parse_config, raised
from sharpen.tools import call_with_limit, load_object
from sharpen.types import Score, SharpenError, Task, Trajectory

_VERIFIED_KINDS = ("math", "code", "sql", "json", "exact", "set", "choice")
REWARDS: dict[str, tuple[str, str]] = {  # name → module, class
    "agent": ("agent", "AgentRewardModel"),
    "calls": ("calls", "CallReward"),
    **dict.fromkeys(_VERIFIED_KINDS, ("verifiable", "VerifiableRewardCalculator")),
    "learned": ("learned", "LearnedReward"),
}
TIMEOUT_S = 30.0  # of one call of a user's own function
_MAX_REASON_CHARS = 300
_TOTAL_KEYS = ("total", "value", "score", "reward")  # of a dict that a user's function returns


class _PartConfig(Config):
    """A reward's name, or `file.py:name` of a function or class; `options` are its settings."""

    name: str = Field(description="Reward: a name, or file.py:name.")
    weight: float = Field(1.0, allow_inf_nan=False, description="Weight in the sum.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the reward's class."
    )


class _GateConfig(Config):
    """Where `part` (a name, or `name.part`) is below `at_least`, the value is `otherwise`."""

    part: str = Field(description="Reward, or part of one, that is tested.")
    at_least: float = Field(1.0, description="Lowest value that passes.")
    otherwise: float = Field(0.0, description="Value of a trajectory that does not pass.")


class RewardConfig(Config):
    """A weighted sum of rewards, then gates, then limits."""

    parts: list[_PartConfig] = Field(min_length=1, description="Rewards that are added up.")
    gates: list[_GateConfig] = Field(default_factory=list, description="Tests that must pass.")
    clip: tuple[float, float] = Field((-math.inf, math.inf), description="Limits of the value.")
    normalise: bool = Field(False, description="Divide by the sum of the weights.")


def build_reward(config: RewardConfig | Mapping[str, Any] | str) -> _ComposedReward:
    """Build a reward from a config, its plain values, or one name."""
    if isinstance(config, str):
        config = {"parts": [{"name": config}]}
    if not isinstance(config, RewardConfig):
        config = parse_config(RewardConfig, dict(config), "reward")
    return _ComposedReward(config)


def _find_score_function(
    name: str, options: Mapping[str, Any]
) -> Callable[[Task, Trajectory], Any]:
    """Returns the function that scores a trajectory under this name."""
    if name in REWARDS:
        module_name, class_name = REWARDS[name]
        module = importlib.import_module(f"sharpen.rewards.{module_name}")
        reward = getattr(module, class_name)
    elif ".py:" in name:
        reward = load_object(name)
    else:
        raise ConfigError(f"reward {name!r}: expected {', '.join(REWARDS)} or file.py:name")
    kind = (name,) if name in _VERIFIED_KINDS else ()
    if isinstance(reward, type):
        try:
            reward = reward(*kind, **options)
        except TypeError as error:
            raise ConfigError(f"reward {name!r}: {one_line(error)}") from None
    score = getattr(reward, "score", reward)
    if not callable(score):
        raise ConfigError(f"reward {name!r}: neither a function nor a class with score")
    if name in REWARDS:
        return score

    def score_in_time(task: Task, trajectory: Trajectory) -> Any:
        return call_with_limit(lambda: score(task, trajectory), {}, TIMEOUT_S)

    return score_in_time


class _ComposedReward:
    """A weighted sum of rewards. A task is solved if every part that says so says yes.

    A part that raises, hangs or gives no finite number adds nothing: it counts in `failures` and
    in the score's `failed`, and the feedback says why."""

    def __init__(self, config: RewardConfig):
        _check_config(config)
        self.config = config
        self.failures: Counter[str] = Counter()  # reason → how often
        self._score_functions = {
            part.name: _find_score_function(part.name, part.options) for part in config.parts
        }

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        parts: dict[str, float] = {}
        notes: list[str] = []
        failed = 0
        total = 0.0
        verdicts: list[bool] = []  # of the parts that say whether the task is solved
        for part in self.config.parts:
            try:
                score = as_score(self._score_functions[part.name](task, trajectory))
            except Exception as error:  # a user's code may raise anything: the score says so
                reason = f"{part.name}: {raised(error)}"[:_MAX_REASON_CHARS]
                self.failures[reason] += 1
                notes.append(f"failed: {reason}")
                failed += 1
                continue
            for name, value in score.parts.items():
                parts[f"{part.name}.{name}"] = value
            parts[part.name] = score.value
            total += part.weight * score.value
            if score.solved is not None:
                verdicts.append(score.solved)
            if score.feedback:
                notes.append(f"{part.name}: {score.feedback}")
        if self.config.normalise:
            total /= sum(abs(part.weight) for part in self.config.parts) or 1.0
        for gate in reversed(self.config.gates):  # so the first gate that is shut decides
            if parts.get(gate.part, -math.inf) < gate.at_least:
                total = gate.otherwise
                verdicts.append(False)
                notes.append(f"gate: {gate.part} < {gate.at_least:g}")
        low, high = self.config.clip
        value = min(max(total, low), high)
        solved = all(verdicts) if verdicts else None
        return Score(value, parts | {"failed": failed}, "; ".join(notes), solved)


def _check_config(config: RewardConfig) -> None:
    """Raise for a block that cannot mean what its author wanted."""
    low, high = config.clip
    if not low < high:
        raise ConfigError(f"reward: clip: expected low below high, found {[low, high]}")
    names = [part.name for part in config.parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward: parts: a name is given twice in {', '.join(names)}")
    for gate in config.gates:
        if not any(gate.part == name or gate.part.startswith(f"{name}.") for name in names):
            expected = ", ".join(names)
            raise ConfigError(
                f"reward: gates: expected one of the parts ({expected}), found {gate.part!r}"
            )


def as_score(value: Any) -> Score:
    """Read a number, a `Score`, or a dict with `total`, `breakdown` and `feedback` as a `Score`.

    Raises for anything else and for numbers that are not finite; an exception as the value is
    raised as an error."""
    if isinstance(value, BaseException):
        raise SharpenError(raised(value))
    score = value if isinstance(value, Score) else _score_from_plain(value)
    for name, number in {"value": score.value, **score.parts}.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise SharpenError(f"{name}: expected a finite number, found {repr(number)[:60]}")
    return score


def _score_from_plain(value: Any) -> Score:
    """A number or a dict as a `Score` that is not checked yet."""
    if not isinstance(value, Mapping):
        return Score(value)
    total: Any = value  # a dict without a total is reported as it is
    for key in _TOTAL_KEYS:
        if key in value:
            total = value[key]
            break
    return Score(total, value.get("breakdown") or {}, str(value.get("feedback") or ""))
