"""The registry of task kinds: how a kind of task is played, scored and measured.

A kind names its environment, reward, gold answer, limits and metrics. Training, evaluation,
`reward try`, self-play and the baselines ask this registry, so that a task is judged by one
function everywhere. Tasks that are scored differently have different kinds.

A user's own kind is an object in a file: `kind: my_kinds.py:spelling` in the rows, where
`spelling = TaskKind(...)`.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from sharpen.envs.code import Programming
from sharpen.envs.find import find_environment
from sharpen.envs.math import Mathematics
from sharpen.envs.one_turn import OneTurn
from sharpen.envs.python import PythonTools
from sharpen.envs.sql import SQL
from sharpen.envs.toolworld import ToolWorld
from sharpen.rewards import gold_answers
from sharpen.rewards.agent import AgentRewardModel
from sharpen.rewards.calls import CallReward
from sharpen.rewards.decisions import AnyCallReward, DecisionReward, NoCallReward
from sharpen.rewards.graphs import ActionsReward, PlanGraphReward
from sharpen.rewards.metrics import (
    CALL_METRICS,
    DECISION_METRICS,
    END_TO_END_METRICS,
    GENERAL_METRICS,
    PLAN_GRAPH_METRICS,
    PLANNING_METRICS,
    SELECTION_METRICS,
    SERVICE_METRICS,
    TOOL_CHOICE_METRICS,
    Item,
    MetricValue,
    measure,
)
from sharpen.rewards.text_retrieval import TextRetrievalReward
from sharpen.rewards.tool_choice import ToolChoiceReward
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.tools import load_object
from sharpen.types import (
    Dialog,
    Environment,
    MakeEnvironment,
    Message,
    Reward,
    RowError,
    Score,
    SharpenError,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from sharpen.world.episode import World

_WORLD_TURNS = 10  # of an episode in the tool world
_SERVICE_TURNS = 30  # of a conversation with a simulated customer


class _NeedsBenchmark:
    """Stands where an environment needs files that only a benchmark brings."""

    def reset(self, task: Task) -> Dialog:
        raise SharpenError(
            f"task {task.id}: kind {task.kind!r} is played with a simulated user; "
            "evaluate it as a benchmark: --benchmark tau:PATH --user MODEL"
        )

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return (), StopReason.ENVIRONMENT_ERROR


class _NoReward:
    """The reward of kinds without gold: asking it is an error that says what to do."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        raise RowError(task.id, f"kind {task.kind!r} has no reward of its own; name one: reward=…")


@dataclass(frozen=True, slots=True)
class TaskKind:
    """One kind of task."""

    name: str
    about: str
    make_reward: Callable[[], Reward]
    make_environment: MakeEnvironment = OneTurn
    gold_messages: Callable[[Task], list[Message]] = gold_answers.world_turns
    max_turns: int = _WORLD_TURNS  # an environment may end the episode earlier
    max_tokens: int = 256  # of a turn
    metrics: tuple[str, ...] = ("accuracy",)


def _verified(
    name: str,
    about: str,
    make_environment: MakeEnvironment = OneTurn,
    gold_messages: Callable[[Task], list[Message]] = gold_answers.answer_text,
    max_turns: int = _WORLD_TURNS,
    max_tokens: int = 512,
) -> TaskKind:
    """A kind whose last message is checked by a verifier."""
    return TaskKind(
        name,
        about,
        VerifiableRewardCalculator,
        make_environment,
        gold_messages,
        max_turns,
        max_tokens,
    )


_KINDS = (
    # The agent benchmark: tasks of the tool world
    TaskKind(
        "selection", "the right call among the tools on offer", AgentRewardModel,
        metrics=SELECTION_METRICS,
    ),
    TaskKind(
        "timing", "whether to call, ask, answer or decline", AgentRewardModel,
        metrics=DECISION_METRICS,
    ),
    TaskKind(
        "planning", "several dependent calls in the tool world", AgentRewardModel, ToolWorld,
        max_turns=_WORLD_TURNS, metrics=PLANNING_METRICS,
    ),
    TaskKind(
        "end_to_end", "a whole request in the tool world", AgentRewardModel, ToolWorld,
        max_turns=_WORLD_TURNS, metrics=END_TO_END_METRICS,
    ),
    TaskKind(
        "tool_state", "any way to gold's end state in the tool world",
        VerifiableRewardCalculator, ToolWorld, max_turns=_WORLD_TURNS,
    ),
    TaskKind(
        "own_tools", "a user's own Python tools, really executed", AgentRewardModel, PythonTools,
        max_turns=_WORLD_TURNS, metrics=SELECTION_METRICS,
    ),
    TaskKind(
        "agent", "gold calls, tools or a decision of a task without a kind", AgentRewardModel,
        metrics=SELECTION_METRICS,
    ),
    # Function calls in one answer
    TaskKind(
        "calls", "exactly gold's calls", CallReward,
        gold_messages=gold_answers.exact_calls, metrics=CALL_METRICS,
    ),
    TaskKind(
        "no_call", "no tool on offer fits", NoCallReward,
        gold_messages=gold_answers.world_turns, metrics=CALL_METRICS,
    ),
    TaskKind(
        "any_call", "some tool on offer fits, gold does not say which", AnyCallReward,
        gold_messages=gold_answers.named_tools, metrics=CALL_METRICS,
    ),
    TaskKind(
        "tool_choice", "exactly gold's tools among those on offer", ToolChoiceReward,
        gold_messages=gold_answers.named_tools, metrics=TOOL_CHOICE_METRICS,
    ),
    TaskKind(
        "decision", "gold's decision: call, ask, answer or decline", DecisionReward,
        gold_messages=gold_answers.decision_turn, metrics=DECISION_METRICS,
    ),
    TaskKind(
        "plan_graph", "a plan written as a graph of text", PlanGraphReward,
        gold_messages=gold_answers.plan_text, max_tokens=512, metrics=PLAN_GRAPH_METRICS,
    ),
    TaskKind(
        "tau", "a customer's request, with a simulated user", ActionsReward, _NeedsBenchmark,
        gold_answers.service_actions, _SERVICE_TURNS, metrics=SERVICE_METRICS,
    ),
    # Answers that can be verified
    _verified("math", "a number or an expression", Mathematics, max_turns=_WORLD_TURNS),
    _verified("choice", "the letter of an option"),
    _verified("exact", "one of gold's answers"),
    _verified("qa", "one of gold's answers to a question"),
    _verified("set", "all of gold's answers in one list", gold_messages=gold_answers.set_text),
    _verified("json", "a JSON value", gold_messages=gold_answers.json_text),
    _verified("code", "a program that passes tests", gold_messages=gold_answers.program_text),
    _verified(
        "code_session", "a program, after running it and the visible tests", Programming,
        gold_answers.program_text, _WORLD_TURNS,
    ),
    _verified("sql", "a query with gold's rows"),
    _verified(
        "sql_session", "a query or values, after statements run in a database", SQL,
        max_turns=_WORLD_TURNS,
    ),
    _verified(
        "database_state", "statements that leave gold's end state", SQL, max_turns=_WORLD_TURNS
    ),
    TaskKind(
        "retrieval", "a value out of a long text", TextRetrievalReward,
        gold_messages=gold_answers.answer_text, max_tokens=96,
    ),
    # Without gold of their own
    TaskKind("open", "an open request, scored by a judge", _NoReward, max_tokens=400),
    TaskKind("propose", "a proposer's turn in self-play", _NoReward),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _KINDS}
# kinds of imported rows that nothing here can play
_UNPLAYABLE = {
    "rest": "the service that it calls is not here",
    "multi_turn": "the services that it calls are not here",
    "api_call": "its answer is source code of another library",
    "mcp": "its servers are not here",
    "tool_retrieval": "finding one tool among all is scored by a selector, not by a policy",
}


def kind_of(task: Task) -> TaskKind:
    """Returns the kind of a task; an unknown one is an error that names the nearest."""
    name = kind_name(task)
    if name in KINDS:
        return KINDS[name]
    if ".py:" in name:
        return _own_kind(name)
    if name in _UNPLAYABLE:
        raise RowError(task.id, f"kind {name!r} cannot be played: {_UNPLAYABLE[name]}")
    nearest = difflib.get_close_matches(name, KINDS, 1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"kinds: {', '.join(KINDS)}"
    raise RowError(task.id, f"kind {name!r} is unknown; {advice}")


def kind_name(task: Task) -> str:
    """Returns the name of a task's kind. Rows that were written before kinds were told apart get
    the name by which they are known now."""
    name = task.kind
    gold = task.gold
    if name in ("", "selection", "timing") and "python_tools" in task.metadata:
        return "own_tools"
    if not name:
        return "agent"
    if name == "call":
        return "calls"
    if name == "code" and "visible_tests" in task.metadata:
        return "code_session"
    if name == "selection" and "calls" not in gold and gold.get("tools"):
        return "tool_choice"
    if name == "timing" and "categories" not in gold and set(gold) <= {"decision", "missing"}:
        return "decision"
    if name == "planning" and "nodes" in gold:
        return "plan_graph"
    if name == "calls" and gold.get("calls") == []:
        return "no_call"
    if name == "tool_state" and "schema" in gold:
        return "database_state"
    if name == "sql" and "answers" in gold and "schema" not in gold:
        return "set"
    if name == "sql" and "schema" in gold and "result" not in gold:
        return "sql_session"
    return name


def turn_limit(task: Task) -> int:
    """Returns how many turns an episode of the task may take. A kind that is unknown here can still
    be played in an environment that the caller names."""
    try:
        return kind_of(task).max_turns
    except RowError:
        return _WORLD_TURNS


@cache
def _own_kind(name: str) -> TaskKind:
    found: Any = load_object(name)
    if not isinstance(found, TaskKind):
        raise SharpenError(f"kind {name!r}: expected a TaskKind, found {type(found).__name__}")
    return found


class KindEnvironment:
    """Plays each task in the environment of its kind. `world` replaces the shipped tool world."""

    inline = False

    def __init__(self, world: World | None = None):
        self.world = world
        self.environment: Environment = OneTurn()

    def reset(self, task: Task) -> Dialog:
        make_environment = kind_of(task).make_environment
        if make_environment is ToolWorld:
            self.environment = ToolWorld(self.world)
        else:
            self.environment = make_environment()
        self.inline = getattr(self.environment, "inline", False)
        return self.environment.reset(task)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return self.environment.step(message)


def environment_by_name(name: str) -> MakeEnvironment:
    """Returns the environment that a config names; without a name the task's kind decides."""
    return find_environment(name) if name else KindEnvironment


class KindReward:
    """Scores each task by the reward of its kind. Use it as a context manager, or call `close`:
    verifiers may run a sandbox."""

    def __init__(self, workers: int = 1):
        self.workers = workers
        self._rewards: dict[Callable[[], Reward], Reward] = {}
        self._lock = threading.Lock()

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self._reward_of(kind_of(task)).score(task, trajectory)

    def score_many(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Score]:
        """Returns the scores of many trajectories, computed in `workers` threads."""
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(self.score, tasks, trajectories))

    def close(self) -> None:
        for reward in self._rewards.values():
            close = getattr(reward, "close", None)
            if close:
                close()
        self._rewards.clear()

    def __enter__(self) -> KindReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reward_of(self, kind: TaskKind) -> Reward:
        """One reward object serves all kinds that are made the same way."""
        with self._lock:
            if kind.make_reward not in self._rewards:
                self._rewards[kind.make_reward] = kind.make_reward()
            return self._rewards[kind.make_reward]


def gold_messages(task: Task) -> list[Message]:
    """Returns what a right answer to the task says, turn by turn."""
    return kind_of(task).gold_messages(task)


def gold_trajectory(task: Task) -> Trajectory:
    """Returns gold's messages as a trajectory, without an environment's answers."""
    turns = tuple(Turn(message) for message in gold_messages(task))
    return Trajectory(task.id, turns, StopReason.ANSWERED)


def metric_names(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Returns the metrics of all kinds among the tasks, the first kind's first."""
    names: dict[str, None] = {}
    for task in tasks:
        names |= dict.fromkeys(kind_of(task).metrics)
    return tuple(names)


def measure_item(item: Item) -> dict[str, MetricValue]:
    """Returns every metric of the task's kind that has something to say about the item."""
    return measure(item, (*GENERAL_METRICS, *kind_of(item.task).metrics))
