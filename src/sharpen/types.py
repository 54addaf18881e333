"""The data types that all modules share, and the protocols that connect them.

A foreign file becomes `Dialog`s. A `Dialog` is rendered into a `Datum`: token ids with a loss mask.
A `Policy` walks `Task`s through an `Environment` and produces `Trajectory`s. A `Reward` scores
them, and they become `Datum`s again, with exactly the ids that were sampled.

All rows are frozen dataclasses without behaviour. The functions that work on them live in the
modules above.
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
_SOLVED_FROM = 0.5  # value from which a reward that knows no `solved` counts as solved


class SharpenError(Exception):
    """Wrong input or a missing part.

    The text is one line: where the problem is, what is wrong, and what to do about it.
    """


class RowError(SharpenError):
    """One row of a file is wrong. `where` is `file:line` or the id of the row."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}" if where else reason)
        self.where = where
        self.reason = reason


class StopReason(StrEnum):
    """Why a turn or an episode ended. A failure is data, not an exception."""

    # the assistant answered without calling a tool, or the environment was satisfied
    ANSWERED = "answered"
    TOKENS = "tokens"  # the turn reached its token limit
    TURNS = "turns"  # the episode reached its turn limit
    CONTEXT = "context"  # the next prompt would not fit the model's context
    TIMEOUT = "timeout"  # a tool or the episode took too long
    TOOL_ERROR = "tool_error"  # a tool failed in a way that ends the episode
    ENVIRONMENT_ERROR = "environment_error"
    POLICY_ERROR = "policy_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made. `id` is set only where a server or a file gave one."""

    name: str
    arguments: Json = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class UnparsedToolCall:
    """Text between tool-call markers that is not a valid call.

    It is kept so that a reward can penalise it and a reader can debug it.
    """

    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialog, as in the OpenAI chat format."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    unparsed: tuple[UnparsedToolCall, ...] = ()
    name: str = ""  # of a tool message: the tool that answered
    tool_call_id: str = ""
    trained: bool = True  # False: an assistant message that carries no loss, such as a mistake


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Json = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True)
class Dialog:
    """A conversation and the tools on offer in it."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    id: str = ""
    task_type: str = ""
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt: `chosen` is better than `rejected`."""

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
    """An instruction, and in `gold` how to check the result.

    Only the reward of the task's `kind` reads `gold`.
    """

    id: str
    instruction: str
    tools: tuple[ToolSpec, ...] = ()
    gold: Json = field(default_factory=dict)
    kind: str = ""
    difficulty: str = ""
    context: tuple[Message, ...] = ()  # messages before the instruction
    metadata: Json = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the first prompt: the context, then the instruction from the user."""
        return (*self.context, Message("user", self.instruction))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn is sampled."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # a turn also ends when its text contains one of these
    constrained: bool = False  # tool calls must parse and fit the schema of a tool on offer


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token ids sampled after one prompt, with the log-probability of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: StopReason = StopReason.ANSWERED
    error: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn and the environment's answer to it.

    `prompt_ids` and `ids` are exactly what the model saw and sampled. Their text is never tokenised
    again.
    """

    message: Message
    stop: StopReason = StopReason.ANSWERED
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    results: tuple[Message, ...] = ()  # the messages that the environment answered with
    reward: float = 0.0
    error: str = ""  # the reason, when `stop` is a failure


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict of a reward.

    `value` is trained on and reported; it may give partial credit. `parts` holds the components
    that it was computed from. `solved` says whether the task is done; None: the reward does not
    say. Training, evaluation and metrics all ask `is_solved`.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    solved: bool | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the task is done; a reward that does not say it means so from 0.5 up."""
        return self.value >= _SOLVED_FROM if self.solved is None else self.solved


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: the turns that a policy took on a task, and why it ended."""

    task_id: str
    turns: tuple[Turn, ...]
    stop: StopReason
    score: Score | None = None
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """Token ids and which of them carry loss.

    `mask[t]` is about `ids[t]` itself, not about the position that predicts it.
    """

    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]
    id: str = ""
    task_type: str = ""
    weight: float | np.ndarray = 1.0  # loss weight: one for all trained tokens, or one per token
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # one value per trained token


class Policy(Protocol):
    """Anything that can take the assistant's next turn.

    A local model, a server, a scripted stand-in or a simulated user.
    """

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]: ...


@runtime_checkable
class TokenPolicy(Protocol):
    """A policy that works on token ids and has many prompts under way at once.

    `submit` queues a prompt under a key. `advance` samples until at least one prompt is answered.
    The next prompt of the same key may begin with the previous prompt and its answer; these tokens
    are then not computed again. `forget` makes later answers independent of earlier ones, to the
    last bit.
    """

    renderer: Any
    rows: int  # prompts that can be under way at once without slowing each other down
    idle: bool  # nothing is under way

    def submit(
        self, key: Any, prompt: Sequence[int], sampling: Sampling, tools: Sequence[ToolSpec] = ()
    ) -> None: ...

    def advance(self) -> list[tuple[Any, Sampled]]: ...

    def forget(self) -> None: ...


class Environment(Protocol):
    """A world that a policy acts in, one episode at a time.

    `step` returns the answer to an assistant message, and a stop reason when the episode ends.
    """

    def reset(self, task: Task) -> Dialog: ...

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]: ...


MakeEnvironment = Callable[[], Environment]


class Reward(Protocol):
    """Scores a trajectory by the gold of its task."""

    def score(self, task: Task, trajectory: Trajectory) -> Score: ...


class Encoder(Protocol):
    """Embeds texts: one unit-length row per text."""

    def encode(self, texts: Sequence[str]) -> np.ndarray: ...


class Scorer(Protocol):
    """Computes one loss per dialog with a real model."""

    def losses(self, dialogs: Sequence[Dialog]) -> list[float]: ...
