"""Self-play: a proposer writes tasks at the edge of a solver's ability, and both learn.

A proposal is a program whose output has to be predicted, or a request with the calls that fulfil
it. It counts once it was executed: the program in the sandbox, the calls in the tool world
(`proposals.py`). The proposer's reward is highest where the solver passes half the time; what
cannot be verified, and what was proposed before, gets 0.

`SelfPlay` is the reward of both roles, and a task's kind decides its environment, so that one loop
trains on `propose(…)` and on `learnable()` side by side. `SelfPlayOrder` in `task_order.py` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sharpen.data.generate.tool_pool import split_categories
from sharpen.kinds import KindEnvironment, KindReward
from sharpen.rows import task_from_row, task_to_row
from sharpen.scored_rollout import NOT_THE_MODELS_FAULT, PlaySettings, play, score_trajectories
from sharpen.train.proposals import task_of_program, task_of_request
from sharpen.types import (
    Json,
    Message,
    Policy,
    Reward,
    Sampling,
    Score,
    SharpenError,
    Task,
    TokenPolicy,
    Trajectory,
)
from sharpen.world.episode import World, shipped_world
from sharpen.world.state import seeded_rng

PROPOSE = "propose"  # the kind of a proposer's tasks
_OFFERED_TOOLS = 6
_PROGRAM_PROMPT = """\
Write a short Python program that prints one line. It must not import anything and must
print the same every time. Somebody has to say what it prints without running it: make that neither
easy nor impossible. Give the program in a ```python block."""
_REQUEST_PROMPT = """\
Think of a request that somebody could have and that one or two of your tools fulfil.
Write the request in words, with every value that is needed, and behind it the right calls. Make it
neither easy nor impossible to find the calls."""

Solver = Policy | TokenPolicy


class SelfPlay:
    """Proposes tasks, verifies proposals and measures how often the solver passes them.

    `solver` is a policy, or a function that returns it: where the proposer solves too, the policy
    exists only once the run has started. It answers each proposal `samples` times. Proposals are
    scored one at a time: policies need not be safe for threads.
    """

    def __init__(
        self,
        solver: Solver | Callable[[], Solver],
        sampling: Sampling,
        samples: int = 4,
        reward: Reward | None = None,
        world: World | None = None,
        seed: int = 0,
    ):
        self.solver = solver
        self.sampling = sampling
        self.samples = samples
        self.reward = reward or KindReward()
        self.world = world or shipped_world()
        self.seed = seed
        self.lock = threading.Lock()
        splits = split_categories(self.world.categories)
        # held-out tools are not for training
        self.categories = [name for name, split in splits.items() if split == "train"]
        self.proposed = 0  # prompts given to the proposer
        self.verified: dict[str, tuple[Task, float]] = {}  # key → proposed task, pass rate

    def propose(self, count: int) -> list[Task]:
        """Returns the next prompts for the proposer: for programs and for requests in turn. A
        prompt for a program shows a task of the right difficulty, once there is one."""
        first = self.proposed
        self.proposed += count
        return [self._prompt(number) for number in range(first, self.proposed)]

    def learnable(self) -> list[Task]:
        """Returns the verified proposals that the solver sometimes passes, the oldest first."""
        return [task for task, pass_rate in self.verified.values() if 0 < pass_rate < 1]

    def make_environment(self) -> KindEnvironment:
        """Returns an environment of both roles."""
        return KindEnvironment(self.world)

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score a proposal by the solver's pass rate, any other task by its own reward."""
        if task.kind != PROPOSE:
            return self.reward.score(task, trajectory)
        with self.lock:
            return self._score_proposal(task, trajectory)

    def state(self) -> Json:
        rows = {}
        for key, (task, pass_rate) in self.verified.items():
            rows[key] = [task_to_row(task), pass_rate]
        return {"proposed": self.proposed, "verified": rows}

    def load_state(self, state: Json) -> None:
        self.proposed = state["proposed"]
        self.verified = {}
        for key, (row, pass_rate) in state["verified"].items():
            self.verified[key] = (task_from_row(row), pass_rate)

    def _prompt(self, number: int) -> Task:
        """The proposer's task of this number; it follows from the seed."""
        rng = seeded_rng("propose", self.seed, number)
        name = f"propose-{self.seed}-{number}"
        if number % 2 == 0:
            prompt = _PROGRAM_PROMPT
            examples = [task.instruction for task in self.learnable() if task.kind == "exact"]
            if examples:
                prompt += f"\n\nThis one was right:\n{rng.choice(examples)}"
            return Task(name, prompt, kind=PROPOSE)
        category = rng.choice(self.categories)
        tools = rng.sample([*self.world.domain(category).tools.values()], _OFFERED_TOOLS)
        gold = {"categories": [category], "seed": rng.randrange(1 << 30), "family": "train"}
        return Task(name, _REQUEST_PROMPT, tuple(tool.spec for tool in tools), gold, PROPOSE)

    def _score_proposal(self, task: Task, trajectory: Trajectory) -> Score:
        """1 where the solver passes half the time, 0 where it always or never does."""
        message = trajectory.turns[-1].message if trajectory.turns else Message("assistant")
        if "categories" in task.gold:
            proposal = task_of_request(task, message, self.world)
        else:
            proposal = task_of_program(message.content)
        if isinstance(proposal, str):
            return Score(0.0, {"valid": 0.0}, proposal)
        if proposal.key in self.verified:
            return Score(0.0, {"valid": 1.0, "new": 0.0}, "proposed before")
        pass_rate = self._measure_pass_rate(proposal.task)
        self.verified[proposal.key] = (proposal.task, pass_rate)
        parts = {"valid": 1.0, "new": 1.0, "pass_rate": pass_rate}
        return Score(1 - abs(2 * pass_rate - 1), parts, proposal.task.instruction[:200])

    def _measure_pass_rate(self, task: Task) -> float:
        """The share of the solver's answers that solve the task. An answer that a server or an
        environment broke does not count."""
        how = PlaySettings(self.reward, self.sampling, self.make_environment, samples=self.samples)
        answers = play(self._find_solver(), [task], how)
        counted = [answer for answer in answers if answer.stop not in NOT_THE_MODELS_FAULT]
        if not counted:
            stop = answers[0].stop
            raise SharpenError(f"task {task.id}: the solver never answered: {stop}")
        scores = score_trajectories([task] * len(counted), counted, self.reward)
        return sum(score.is_solved for score in scores) / len(scores)

    def _find_solver(self) -> Solver:
        if callable(self.solver):
            return self.solver()
        return self.solver
