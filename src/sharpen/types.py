"""Every noun of the system, and the protocols that the layers above hand to the layers below.

A foreign file becomes `Dialog`s. A `Dialog` is rendered into a `Datum` (ids with a loss mask). A
`Policy` walks `Task`s through an `Environment` and leaves `Trajectory`s, which a `Reward` scores
and which become `Datum`s again, with exactly the ids that were sampled. Rows are frozen; what is
done with them lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Json = dict[str, Any]
SOLVED_FROM = 0.5  # value from which a reward that knows no `solved` counts as solved


class SharpenError(Exception):
    """Wrong input or a missing part. Its text is one line that says what, where and what to do
    about it."""


class RowError(SharpenError):
    """One row of a file is wrong. `where` is `file:line` or the row's id, so that the row can be
    found and kept apart."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}" if where else reason)
        self.where, self.reason = where, reason


class StopReason(StrEnum):
    """Why a turn or an episode ended. A failure is data, not an exception."""

    ANSWERED = (
        "answered"  # the assistant spoke without calling a tool, or the environment was satisfied
    )
    TOKENS = "tokens"  # the turn reached its token limit
    TURNS = "turns"  # the episode reached its turn limit
    CONTEXT = "context"  # the next prompt would not fit the model
    TIMEOUT = "timeout"  # a tool or the episode took too long
    TOOL_ERROR = "tool_error"  # a tool failed in a way that ends the episode
    ENVIRONMENT_ERROR = "environment_error"
    POLICY_ERROR = "policy_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Json = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class UnparsedToolCall:
    """Text between tool-call markers that is not a call: kept, so that a reward can see it and a
    reader can debug it."""

    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    unparsed: tuple[UnparsedToolCall, ...] = ()
    name: str = ""  # on a tool message: which tool answered
    tool_call_id: str = ""
    trained: bool = True  # an assistant's message that is not is there to be read: a mistake, say


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    description: str = ""
    parameters: Json = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True)
class Dialog:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    id: str = ""
    task_type: str = ""
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt, the first better than the second."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    id: str = ""
    chosen_score: float | None = None
    rejected_score: float | None = None
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done and how to tell that it was: `gold` is read by the reward of the task's
    `kind`, by nobody else."""

    id: str
    instruction: str
    tools: tuple[ToolSpec, ...] = ()
    gold: Json = field(default_factory=dict)
    kind: str = ""
    difficulty: str = ""
    context: tuple[Message, ...] = ()  # what was said before the instruction
    metadata: Json = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.context, Message("user", self.instruction))


@dataclass(frozen=True, slots=True)
class Sampling:
    max_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    constrained: bool = False  # calls must parse and fit the schema of a tool on offer


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled behind one prompt: ids, and the log-probability of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: StopReason = StopReason.ANSWERED
    error: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn. `prompt_ids` and `ids` are what the model saw and sampled; text is never
    tokenised again."""

    message: Message
    stop: StopReason = StopReason.ANSWERED
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    results: tuple[Message, ...] = ()  # what the environment answered
    reward: float = 0.0
    error: str = ""  # why, when `stop` is a failure


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's verdict: `value` is what trains and what is reported, `parts` say where it came
    from, and `solved` whether the task is done (None: the reward does not say). `value` may give
    partial credit; training, evaluation and metrics all ask `is_solved`."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    solved: bool | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the task is done; a reward that does not say it means so from 0.5 up."""
        return self.value >= SOLVED_FROM if self.solved is None else self.solved


@dataclass(frozen=True, slots=True)
class Trajectory:
    task_id: str
    turns: tuple[Turn, ...]
    stop: StopReason
    score: Score | None = None
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """Token ids and which of them carry loss. `mask[t]` speaks of `ids[t]` itself, not of the
    position that predicts it."""

    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]
    id: str = ""
    task_type: str = ""
    weight: float | np.ndarray = 1.0  # of its trained tokens: one for all, or one each
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # one value a trained token


class Policy(Protocol):
    """Whatever can take the assistant's next turn: a local model, a server, a scripted stand-in, a
    simulated user."""

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]: ...


@runtime_checkable
class TokenPolicy(Protocol):
    """A policy that goes from ids to ids, with any number of prompts under way. `advance` works on
    until some are answered; the next prompt of the same key may begin with the last one and its
    answer, which are then not computed again. `forget` makes what comes independent of what was, to
    the last bit."""

    renderer: Any
    rows: int  # so many may be under way without getting in each other's way
    idle: bool  # nothing is under way

    def submit(
        self, key: Any, prompt: Sequence[int], sampling: Sampling, tools: Sequence[ToolSpec] = ()
    ) -> None: ...

    def advance(self) -> list[tuple[Any, Sampled]]: ...

    def forget(self) -> None: ...


class Environment(Protocol):
    """A world that a policy acts in, one episode at a time."""

    def reset(self, task: Task) -> Dialog: ...

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]: ...


MakeEnvironment = Callable[[], Environment]


class Reward(Protocol):
    def score(self, task: Task, trajectory: Trajectory) -> Score: ...


class Encoder(Protocol):
    """Texts → one unit-length row each."""

    def encode(self, texts: Sequence[str]) -> np.ndarray: ...


class Scorer(Protocol):
    """Dialogs → one loss each, from a real model."""

    def losses(self, dialogs: Sequence[Dialog]) -> list[float]: ...
