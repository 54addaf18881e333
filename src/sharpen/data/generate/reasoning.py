"""Reasoning data through any policy. A solution is kept only if its answer passes the verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sharpen.data.generate.splits import frames
from sharpen.types import Dialog, Json, Message, Policy, Sampling, SharpenError, StopReason, Turn

Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?


def prompt(question: str) -> str:
    return frames("reasoning")["prompt"].format(question=question)


def replies(
    policy: Policy, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Turn]:
    dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
    return policy.respond(dialogs, Sampling(max_tokens, temperature, seed=seed))


class ReasoningDataGenerator:
    """`policy` solves, `verify` decides; a local model, a server or a script will do."""

    def __init__(self, policy: Policy, verify: Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy, self.verify = policy, verify
        self.max_tokens, self.seed = max_tokens, seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """`{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(f"{len(questions)} questions, but {len(answers)} answers")
        texts = self.solve([prompt(question) for question in questions], answers, 0.3)
        rows = zip(questions, texts, answers, strict=True)
        return [{"question": q, "reasoning": text, "answer": a} for q, text, a in rows if text]

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Different right solutions, one try for each approach."""
        approaches = frames("reasoning")["approaches"]
        hints = [approaches[i % len(approaches)] for i in range(n_solutions)]
        prompts = [f"{prompt(question)}\n{hint}" for hint in hints]
        texts = self.solve(prompts, [answer] * n_solutions, 0.7)
        return list(dict.fromkeys(text for text in texts if text))

    def solve(self, prompts: list[str], answers: Sequence[str], temperature: float) -> list[str]:
        """Solutions in order; empty where one is wrong or did not come to an end."""
        turns, found = replies(self.policy, prompts, self.max_tokens, temperature, self.seed), []
        for turn, answer in zip(turns, answers, strict=True):
            text = turn.message.content if turn.stop == StopReason.ANSWERED else ""
            found.append(text if text and self.verify(text, answer) else "")
        return found
