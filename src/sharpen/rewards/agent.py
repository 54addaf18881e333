"""The agent reward: what a trajectory did, against what its task needed.

Calls are executed again in the tool world, so that the end state and what was found out decide
whether the task is done, not its wording. Only what can be verified is scored. Where a tool was
needed, a response that calls none has the floor, below every attempt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from sharpen.calls import parse_message
from sharpen.config import Config, parse_config, read_yaml
from sharpen.rewards.calls import ToolCallEvaluator, as_call, call_key, references
from sharpen.rewards.trajectory import turns_from_steps, words
from sharpen.rows import number_field, tools_from_wire
from sharpen.tools import check_call
from sharpen.types import Json, Score, StopReason, Task, ToolCall, ToolSpec, Trajectory, Turn
from sharpen.world.episode import World, shipped_world
from sharpen.world.gold import MAX_CALLS, CallExecutor, gold_calls, gold_outcome, start

TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
WEIGHTS: dict[str, float] = TABLES["weights"]
PENALTIES: dict[str, float] = TABLES["penalties"]
ASKS, REFUSES = (re.compile(TABLES[name], re.I) for name in ("asks", "refuses"))
LOOKED_AT = 20_000  # characters of a text


class AgentRewardConfig(Config):
    """Names that are not given keep their defaults; 0 switches one off."""

    weights: dict[str, float] = WEIGHTS
    penalties: dict[str, float] = PENALTIES
    clip: tuple[float, float] = (-1.0, 1.0)
    max_repeats: int = Field(3, ge=1)  # a penalty counts for so many calls at most
    max_penalty: float = Field(0.9, ge=0)  # all of them together, but for no_call
    max_calls: int = Field(MAX_CALLS, ge=1)

    @field_validator("weights", "penalties")
    @classmethod
    def known(cls, given: dict[str, float], info: Any) -> dict[str, float]:
        default, sign = (WEIGHTS, 1) if info.field_name == "weights" else (PENALTIES, -1)
        wrong = [n for n, v in given.items() if n not in default or not 0 <= v * sign < 1e6]
        if wrong:
            least = "0 or more" if sign > 0 else "0 or less"
            raise ValueError(f"{wrong[0]}: expected {least} for one of {', '.join(default)}")
        return default | given


class ToolVerifier:
    """Calls against the tools on offer."""

    def verify(
        self, calls: Sequence[ToolCall], offered: Mapping[str, ToolSpec]
    ) -> tuple[list[str], list[str]]:
        """Names that are not on offer, and a complaint about each call that does not fit its
        schema. Where nothing is known to be on offer, nothing can be said."""
        invented = [call.name for call in calls if offered and call.name not in offered]
        known = [(call, offered[call.name]) for call in calls if call.name in offered]
        return invented, [f"{c.name}: {bad[0]}" for c, s in known if (bad := check_call(c, s))]


class PlanEvaluator:
    """A plan as a graph: steps `{"id", "tool", "arguments"}` that may refer to earlier results."""

    def evaluate(self, plan: Sequence[Json], gold: Json, tools: Sequence[ToolSpec] = ()) -> Json:
        """`valid` (tools on offer, ids once, references that point back), `step_f1`, `edges` (the
        share of gold's dependencies that the order keeps), `success` (all of it), `problems`. Steps
        of the same `turn` were taken at once."""
        labels = [str(step.get("id") or f"s{i + 1}") for i, step in enumerate(plan)]
        problems = [f"{label}: stands twice" for label, n in Counter(labels).items() if n > 1]
        points = [references(step.get("arguments")) for step in plan]
        for i, step in enumerate(plan):
            if tools and step.get("tool") not in {tool.name for tool in tools}:
                problems.append(f"{labels[i]}: there is no tool {step.get('tool')!r}")
            wrong = [label for label in points[i] if label not in labels[:i]]
            problems += [f"{labels[i]}: {label} is no earlier step" for label in wrong]
        wanted = gold.get("steps" if any(points) or "calls" not in gold else "calls") or []
        made, due = [[as_call(s) or ToolCall("") for s in steps] for steps in (plan, wanted)]
        judge = ToolCallEvaluator(tools)
        turn = {j: plan[i].get("turn", i) for i, j, rate in judge.pairs(made, due) if rate == 1}
        place = {step["id"]: j for j, step in enumerate(gold.get("steps") or ())}
        edges = [(turn.get(place[a]), turn.get(place[b])) for a, b in gold.get("edges") or ()]
        kept = [a is not None and b is not None and a < b for a, b in edges]
        found = {"valid": not problems, "step_f1": judge.evaluate_calls(made, due)["f1"]}
        found["edges"] = sum(kept) / len(kept) if kept else 1.0
        return found | {"success": min(found.values()) == 1, "problems": problems}


class AgentRewardModel:
    """1 for a task done as its gold does it. `score` and `compute_reward` are one function."""

    def __init__(self, config: AgentRewardConfig | Json | None = None, world: World | None = None):
        if not isinstance(config, AgentRewardConfig):
            config = parse_config(AgentRewardConfig, config or {}, "reward")
        self.config, self.world = config, world
        self.tool_verifier, self.plan_evaluator = ToolVerifier(), PlanEvaluator()

    def compute_reward(
        self, query: str, response: str, ground_truth: Json | None = None, execution_trace: Any = ()
    ) -> Json:
        """`ground_truth` is a task's gold, or `target_tools` and `optimal_steps`; `available_tools`
        in it are those on offer. A call of the response that the trace has too counts once."""
        gold, steps = dict(ground_truth or {}), execution_trace or ()
        tools = tools_from_wire(gold.pop("available_tools", None), "ground_truth")
        turns, said = turns_from_steps(steps), parse_message(response or "")
        ran = Counter(call_key(call) for turn in turns for call in turn.message.tool_calls)
        rest = []
        for call in said.tool_calls:
            ran[call_key(call)] -= 1
            rest += [call] if ran[call_key(call)] < 0 else []
        last = Turn(replace(said, tool_calls=tuple(rest)))
        late = any(isinstance(step, dict) and step.get("timeout") is True for step in steps)
        stop = StopReason.TIMEOUT if late else StopReason.ANSWERED
        score = self.score(Task("", query, tools, gold), Trajectory("", (*turns, last), stop))
        return {"total": score.value, "breakdown": dict(score.parts), "feedback": score.feedback}

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        deed, config = TrajectoryFacts(self, task, trajectory), self.config
        parts, counts = deed.parts(), deed.counts()
        most = config.max_repeats
        taken = {n: config.penalties[n] * min(c, most) + 0.0 for n, c in counts.items()}
        weight = sum(config.weights[name] for name in parts) or 1.0
        value = sum(config.weights[name] * part for name, part in parts.items()) / weight
        others = sum(taken.values()) - taken["no_call"]
        value += taken["no_call"] + max(-config.max_penalty, others)
        value = min(max(value, config.clip[0]), config.clip[1])
        notes = [*deed.notes, *(f"{name}: {count}" for name, count in counts.items() if count)]
        if left_out := [name for name in WEIGHTS if name not in parts]:
            notes.append(f"not verifiable and left out: {', '.join(left_out)}")
        return Score(value, parts | deed.extra | taken, "; ".join(notes)[:1000])


class TrajectoryFacts:
    """What a trajectory did about its task. Calls that an injected fault hit do not count."""

    def __init__(self, model: AgentRewardModel, task: Task, trajectory: Trajectory):
        self.task, self.gold, self.extra = task, task.gold, dict[str, float]()
        messages = [turn.message for turn in trajectory.turns]
        made = [(i, call) for i, message in enumerate(messages) for call in message.tool_calls]
        self.broken = [f"broken call: {bad.reason}" for m in messages for bad in m.unparsed]
        self.tried = len(made) + len(self.broken)
        self.text = messages[-1].content[:LOOKED_AT].strip() if messages else ""
        self.late = trajectory.stop in (StopReason.TIMEOUT, StopReason.TURNS)
        self.offered = {tool.name: tool for tool in task.tools}
        self.missing: list[str] | None = None  # of the end state; None: cannot be executed
        if "categories" in self.gold and self.gold.get("calls"):
            world = model.world or shipped_world()
            episode, limit = start(world, task.id, self.gold), model.config.max_calls
            run = CallExecutor(episode, self.offered or None, limit)
            for message in messages:
                run.step(message)
            self.missing = gold_outcome(world, task).missing(run)
            self.offered = self.offered or {t.name: t.spec for t in episode.tools()}
            faulted = {n for n, ran in enumerate(run.executed) if ran.faulted}
            made = [pair for n, pair in enumerate(made) if n not in faulted]
        self.calls = [call for _, call in made]
        self.exact = isinstance(self.gold.get("calls"), list)
        self.decision, self.wanted = self.needed()
        judge = ToolCallEvaluator(task.tools, self.gold.get("match") == "allowed")
        bare = [call if self.exact else ToolCall(call.name) for call in self.calls]
        self.fit = judge.evaluate_calls([*bare, *[None] * len(self.broken)], self.wanted or ())
        right = self.fit["exact"] if self.exact else ()  # what gold does is never at fault
        others = [call for place, call in enumerate(self.calls) if place not in right]
        self.invented, self.invalid = model.tool_verifier.verify(others, self.offered)
        self.notes = [*(self.missing or [])[:3], *self.broken[:2], *self.invalid[:2]]
        if self.gold.get("steps") and self.exact:
            steps = [{"tool": c.name, "arguments": c.arguments, "turn": t} for t, c in made]
            plan = model.plan_evaluator.evaluate(steps, self.gold)
            self.extra["plan_success"] = float(plan["success"])

    def needed(self) -> tuple[str, list[ToolCall] | None]:
        """What gold decides (call, ask, answer, decline, none: no call, or unknown), and its calls,
        without arguments where only names are known; None: not known."""
        names = self.gold.get("target_tools", self.gold.get("tools"))
        names = [names] if isinstance(names, str) else names
        calls = gold_calls(self.task) if self.exact else [ToolCall(str(n)) for n in names or ()]
        known = self.exact or names is not None
        implied = "call" if calls else "none" if known else "unknown"
        decision = str(self.gold.get("decision") or implied)
        wanted = calls if known else None
        return decision, wanted if decision in ("call", "unknown") else []

    def parts(self) -> dict[str, float]:
        """Those that can be verified, each from 0 to 1."""
        known = self.decision != "unknown"
        if not self.tried and (self.decision == "call" or not self.text):
            self.notes.append("a tool was needed" if self.text else "empty response")
            return dict.fromkeys(WEIGHTS if known else ("format_compliance",), 0.0)
        bad = len(self.broken) + len(self.invalid)
        form = {"format_compliance": 1 - bad / max(self.tried, 1)}
        if not known:
            self.notes.append("no ground truth")
            distinct = len({call_key(call) for call in self.calls})
            return ({"efficiency": distinct / len(self.calls)} if self.calls else {}) | form
        if self.decision != "call":
            quiet = float(not self.tried)
            timing = quiet * (1.0 if self.says() else 0.5)
            self.notes += [f"expected: {self.decision}"] if timing < 1 else []
            return dict(zip(WEIGHTS, (timing // 1, quiet, quiet, timing), strict=False)) | form
        form = {"timing_quality": 1.0} | form
        if self.wanted is None:
            return form
        fit, used = self.fit, len(self.calls) + len(self.broken)
        done = fit["overall_correct"] if self.missing is None else not self.missing
        steps = number_field(self.gold, "optimal_steps", self.task.id) or len(self.wanted)
        economy = (1.0 if done else fit["recall"]) * min(1.0, steps / max(used, 1))
        completion = {"task_completion": float(done)} if self.exact else {}
        return completion | {"tool_accuracy": fit["f1"], "efficiency": economy} | form

    def says(self) -> bool:
        """Whether the text takes gold's decision: asks for what is missing, declines, or has all of
        the gold answer that the question had not."""
        gold, said = self.gold, words(self.text)
        if self.decision == "ask":
            tool = self.offered.get((gold.get("tools") or [""])[0], ToolSpec(""))
            fields, missing = tool.parameters.get("properties") or {}, gold.get("missing") or ()
            about = [f"{n} {(fields.get(n) or {}).get('description')}" for n in missing]
            named = all(words(text.replace("_", " ")) & said for text in about)
            return named and bool(ASKS.search(self.text))
        if self.decision == "answer" and gold.get("answer"):
            return words(str(gold["answer"])) - words(self.task.instruction) <= said
        refuses = bool(REFUSES.search(self.text))
        return self.decision == "none" or refuses == (self.decision == "decline")

    def counts(self) -> dict[str, int]:
        """How often each penalty is due. Another way to the wanted end has no wrong tool."""
        names = {call.name for call in self.wanted or ()} | set(self.invented)
        strange = [call for call in self.calls if call.name not in names]
        made, due = [
            Counter(call_key(call, self.offered.get(call.name)) for call in calls)
            for calls in (self.calls, self.wanted or ())
        ]
        return {
            "wrong_tool": 0 if self.wanted is None or self.missing == [] else len(strange),
            "redundant_call": sum(n - max(1, due[key]) for key, n in made.items() if n > due[key]),
            "format_error": len(self.broken) + len(self.invalid),
            "timeout": int(self.late),
            "hallucinated_tool": len(self.invented),
            "no_call": int(self.decision == "call" and not self.tried),
        }
