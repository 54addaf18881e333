"""Self-play: a proposer writes tasks at the edge of a solver's ability, and both learn.

A proposal is a program whose output is to be foretold, or a request with the calls that fulfil it.
It counts once it was executed: the program in the sandbox, the calls in the tool world. The
proposer's reward is highest where the solver passes half the time; what cannot be verified, and
what was proposed before, gets 0. `SelfPlay` is the reward of both roles and `envs/auto.py` the
environment of both: one loop can train on `propose(…)` and on `learnable()` side by side.
"""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sharpen.calls import compact_json
from sharpen.config import one_line
from sharpen.data.generate.dialog_draft import split_categories
from sharpen.envs.auto import Auto
from sharpen.envs.python import sandbox
from sharpen.rewards.code import fenced
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.rollout import rollout
from sharpen.rows import task_from_row, task_to_row
from sharpen.train.rl_data import UNTRUE
from sharpen.types import Json, Message, Reward, Sampling, Score, SharpenError, Task, Trajectory
from sharpen.world.episode import World, shipped_world
from sharpen.world.gold import CallExecutor, start
from sharpen.world.phrases import spoken
from sharpen.world.state import seeded

PROPOSE = "propose"  # the kind of a proposer's tasks
MAX_PROGRAM, MAX_REQUEST, MAX_ANSWER, MAX_CALLS = 1000, 600, 80, 4
OFFERED = 6  # tools
GUESSES = ("hash", "id", "eval", "exec", "compile", "__import__")  # nobody can work these out
PROGRAM = """Write a short Python program that prints one line. It must not import anything and must
print the same every time. Somebody has to say what it prints without running it: make that neither
easy nor impossible. Give the program in a ```python block."""
REQUEST = """Think of a request that somebody could have and that one or two of your tools fulfil.
Write the request in words, with every value that is needed, and behind it the right calls. Make it
neither easy nor impossible to find the calls."""
ASKED = "What does this program print?\n```python\n{}\n```"
Verified = tuple[str, Task]  # what tells a proposal from others, and the task that it is


class SelfPlay:
    """`solver` is a policy, or a function that gives it, such as `lambda: trainer.practice.policy`
    where the proposer solves too; it answers each proposal `samples` times.
    One proposal is scored at a time: policies need not be safe for threads."""

    def __init__(
        self,
        solver: Any,
        sampling: Sampling,
        samples: int = 4,
        reward: Reward | None = None,
        world: World | None = None,
        seed: int = 0,
    ):
        self.solver, self.sampling, self.samples = solver, sampling, samples
        self.reward = reward or VerifiableRewardCalculator()
        self.world, self.seed, self.lock = world or shipped_world(), seed, threading.Lock()
        places = split_categories(self.world.categories)  # held-out tools are not for training
        self.categories = [name for name, split in places.items() if split == "train"]
        self.asked = 0
        self.found: dict[str, tuple[Task, float]] = {}  # key → proposed task, pass rate

    def propose(self, count: int) -> list[Task]:
        """The next prompts for the proposer, programs and requests in turn. One for a program shows
        a task that was about right, once there is one."""
        self.asked += count
        return [self.prompt(number) for number in range(self.asked - count, self.asked)]

    def prompt(self, number: int) -> Task:
        rng, name = seeded("propose", self.seed, number), f"propose-{self.seed}-{number}"
        if number % 2 == 0:
            liked = [task.instruction for task in self.learnable() if task.kind == "exact"]
            shown = f"\n\nThis one was right:\n{rng.choice(liked)}" if liked else ""
            return Task(name, PROGRAM + shown, kind=PROPOSE)
        category = rng.choice(self.categories)
        tools = rng.sample([*self.world.domain(category).tools.values()], OFFERED)
        gold = {"categories": [category], "seed": rng.randrange(1 << 30), "family": "train"}
        return Task(name, REQUEST, tuple(tool.spec for tool in tools), gold, PROPOSE)

    def learnable(self) -> list[Task]:
        """Verified proposals that the solver sometimes passes: its own tasks."""
        return [task for task, rate in self.found.values() if 0 < rate < 1]

    def make(self) -> Auto:
        return Auto(self.world)

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        if task.kind != PROPOSE:
            return self.reward.score(task, trajectory)
        said = trajectory.turns[-1].message if trajectory.turns else Message("assistant")
        with self.lock:
            acts = "categories" in task.gold
            found = request(task, said, self.world) if acts else program(said.content)
            if isinstance(found, str):
                return Score(0.0, {"valid": 0.0}, found)
            key, made = found
            if key in self.found:
                return Score(0.0, {"valid": 1.0, "new": 0.0}, "proposed before")
            rate = self.pass_rate(made)
            self.found[key] = made, rate
        parts = {"valid": 1.0, "new": 1.0, "pass_rate": rate}
        return Score(1 - abs(2 * rate - 1), parts, made.instruction[:200])

    def pass_rate(self, task: Task) -> float:
        """The share of the solver's answers that are right; a server's failure says nothing."""
        solver: Any = self.solver() if callable(self.solver) else self.solver
        answers = rollout(solver, [task] * self.samples, self.make, self.sampling)
        fair = [answer for answer in answers if answer.stop not in UNTRUE]
        if not fair:
            raise SharpenError(f"task {task.id}: the solver never answered: {answers[0].stop}")
        scores = [self.reward.score(task, answer) for answer in fair]
        return sum(s.parts.get("correctness", s.value) >= 1 for s in scores) / len(fair)

    def state(self) -> Json:
        rows = {key: [task_to_row(task), rate] for key, (task, rate) in self.found.items()}
        return {"asked": self.asked, "found": rows}

    def load_state(self, state: Json) -> None:
        self.asked = state["asked"]
        self.found = {k: (task_from_row(row), rate) for k, (row, rate) in state["found"].items()}


def program(text: str) -> Verified | str:
    """A program that prints one line, the same twice; else why it is no task."""
    code = (fenced(text, "python", "py") or [""])[-1].strip()
    if not code or len(code) > MAX_PROGRAM:
        return f"no program of at most {MAX_PROGRAM} characters in a block"
    try:
        tree = ast.parse(code)
        key = ast.unparse(tree)  # without comments and blanks
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"not a program: {one_line(error)[:200]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            return "it imports something"
        if isinstance(node, ast.Name) and node.id in GUESSES:
            return f"it uses {node.id}"
    first, second = sandbox().run_many([code, code])
    answer = first.stdout.strip()
    if not (first.ok and second.ok):
        return f"it fails: {one_line(first.stopped or first.stderr)[-200:]}"
    if first.stdout != second.stdout:
        return "it prints something else each time"
    if not answer or "\n" in answer or len(answer) > MAX_ANSWER:
        return f"it does not print one line of at most {MAX_ANSWER} characters"
    return key, named(key, ASKED.format(code), {"answer": answer}, "exact")


def request(task: Task, said: Message, world: World) -> Verified | str:
    """A request that names every value, with calls that succeed; else why it is no task."""
    asked, calls = said.content.strip(), said.tool_calls
    if said.unparsed or not 1 <= len(calls) <= MAX_CALLS or not 0 < len(asked) <= MAX_REQUEST:
        return f"not a request with 1 to {MAX_CALLS} calls"
    run = CallExecutor(start(world, task.id, task.gold), {spec.name for spec in task.tools})
    run.step(said)
    failed = [done.result["message"] for done in run.executed if not done.ok]
    if failed:
        return f"a call fails: {one_line(failed[0])[:200]}"
    heard = asked.casefold()
    for value in values([call.arguments for call in calls]):
        if spoken(value).casefold() not in heard:
            return f"the request does not say {value!r}"
    made = [{"name": call.name, "arguments": call.arguments} for call in calls]
    key, gold = compact_json(made), {**task.gold, "calls": made}
    return key, replace(named(key, asked, gold, "tool_state"), tools=task.tools)


def values(value: Any) -> Iterator[Any]:
    """Everything that arguments say; yes and no have no words of their own."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from values(inner)
    elif value is not None and not isinstance(value, bool):
        yield value


def named(key: str, asked: str, gold: Json, kind: str) -> Task:
    name = f"play-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return Task(name, asked, gold=gold, kind=kind, difficulty=f"play {kind}")
