"""Rewards by name, and their composition from one block of a recipe:

reward: {parts: [{name: agent}, {name: "my.py:score", weight: 0.5}],
         gates: [{part: agent.format_compliance, at_least: 1}], clip: [-1, 1]}
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from sharpen.config import Config, ConfigError, one_line, parse_config, raised
from sharpen.tools import call_with_limit, load_object
from sharpen.types import Score, SharpenError, Task, Trajectory

REWARDS = {"agent": ("agent", "AgentRewardModel"), "calls": ("calls", "CallReward")}
VERIFIED = ("math", "code", "sql", "json", "exact", "set", "choice")
REWARDS |= dict.fromkeys(VERIFIED, ("verifiable", "VerifiableRewardCalculator"))
REWARDS["learned"] = ("learned", "LearnedReward")
TIMEOUT_S = 30.0  # of a user's own function


class PartConfig(Config):
    """A reward's name, or `file.py:name` of a function or class; `options` are its settings."""

    name: str
    weight: float = Field(1.0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default_factory=dict)


class GateConfig(Config):
    """Where `part` (a name, or `name.part`) is below `at_least`, the value is `otherwise`."""

    part: str
    at_least: float = 1.0
    otherwise: float = 0.0


class RewardConfig(Config):
    parts: list[PartConfig] = Field(min_length=1)
    gates: list[GateConfig] = Field(default_factory=list)
    clip: tuple[float, float] = (-math.inf, math.inf)
    normalise: bool = False  # divide by the sum of the weights


def build_reward(config: RewardConfig | Mapping[str, Any] | str) -> ComposedReward:
    """A reward from a config, its plain values, or one name."""
    if isinstance(config, str):
        config = {"parts": [{"name": config}]}
    if not isinstance(config, RewardConfig):
        config = parse_config(RewardConfig, dict(config), "reward")
    return ComposedReward(config)


def find_reward(name: str, options: Mapping[str, Any]) -> Any:
    """What scores a trajectory under this name."""
    if name in REWARDS:
        module = importlib.import_module(f"sharpen.rewards.{REWARDS[name][0]}")
        found = getattr(module, REWARDS[name][1])
    elif ".py:" in name:
        found = load_object(name)
    else:
        raise ConfigError(f"reward {name!r}: expected {', '.join(REWARDS)} or file.py:name")
    given = (name,) if name in VERIFIED else ()
    try:
        found = found(*given, **options) if isinstance(found, type) else found
    except TypeError as error:
        raise ConfigError(f"reward {name!r}: {one_line(error)}") from None
    score = getattr(found, "score", found)
    if not callable(score):
        raise ConfigError(f"reward {name!r}: neither a function nor a class with score")
    if name in REWARDS:
        return score
    return lambda *given: call_with_limit(lambda: score(*given), {}, TIMEOUT_S)


class ComposedReward:
    """A weighted sum. A part that raises, hangs or gives no finite number adds nothing: it counts
    in `failures` and in the score's `failed`, and the feedback says why."""

    def __init__(self, config: RewardConfig):
        self.config, names = config, [part.name for part in config.parts]
        if not config.clip[0] < config.clip[1]:
            raise ConfigError(f"reward: clip {list(config.clip)} does not rise")
        if len(set(names)) < len(names):
            raise ConfigError(f"reward: a part stands twice among {', '.join(names)}")
        for gate in config.gates:
            if not any(gate.part == name or gate.part.startswith(f"{name}.") for name in names):
                raise ConfigError(f"reward: the gate {gate.part!r} is on none of the parts")
        self.rewards = {part.name: find_reward(part.name, part.options) for part in config.parts}
        self.failures: Counter[str] = Counter()  # reason → how often

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        parts, notes, failed, total = dict[str, float](), list[str](), 0, 0.0
        for part in self.config.parts:
            try:
                found = as_score(self.rewards[part.name](task, trajectory))
            except Exception as error:  # a user's code may raise anything: the score says so
                reason = f"{part.name}: {raised(error)}"[:300]
                self.failures[reason] += 1
                notes, failed = [*notes, f"failed: {reason}"], failed + 1
                continue
            parts |= {f"{part.name}.{name}": inner for name, inner in found.parts.items()}
            parts[part.name] = found.value
            total += part.weight * found.value
            notes += [f"{part.name}: {found.feedback}"] if found.feedback else []
        if self.config.normalise:
            total /= sum(abs(part.weight) for part in self.config.parts) or 1.0
        for gate in reversed(self.config.gates):  # the first that is shut decides
            if parts.get(gate.part, -math.inf) < gate.at_least:
                total, notes = gate.otherwise, [*notes, f"gate: {gate.part} < {gate.at_least:g}"]
        low, high = self.config.clip
        return Score(min(max(total, low), high), parts | {"failed": failed}, "; ".join(notes))


def as_score(value: Any) -> Score:
    """A number, a Score, or a dict with `total`, `breakdown`, `feedback` → a finite Score."""
    if isinstance(value, BaseException):
        raise SharpenError(raised(value))
    if isinstance(value, Mapping):
        total = next((value[k] for k in ("total", "value", "score", "reward") if k in value), value)
        value = Score(total, value.get("breakdown") or {}, str(value.get("feedback") or ""))  # type: ignore[arg-type]
    score = value if isinstance(value, Score) else Score(value)
    for name, number in {"value": score.value, **score.parts}.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise SharpenError(f"{name}: expected a finite number, found {repr(number)[:60]}")
    return score
