"""Reasoning data through any policy. A solution is kept only if its answer passes the verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sharpen.types import Dialog, Json, Message, Policy, Sampling, SharpenError, StopReason

Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?
PROMPT = (
    "Solve the following problem and show your reasoning.\n\nProblem: {question}\n\n"
    "Reason step by step inside <think></think>, then give the answer in \\boxed{{}}."
)
APPROACHES = (
    "Solve it with algebra.",
    "Solve it by picturing it.",
    "Work backwards from what is wanted.",
    "Distinguish cases.",
    "Try special values first, then solve it in general.",
)


class ReasoningDataGenerator:
    """`policy` solves, `verify` decides; a local model, a server or a script will do."""

    def __init__(self, policy: Policy, verify: Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy, self.verify = policy, verify
        self.max_tokens, self.seed = max_tokens, seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """`{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(f"{len(questions)} questions, but {len(answers)} answers")
        texts = self.respond([PROMPT.format(question=q) for q in questions], temperature=0.3)
        return [
            {"question": question, "reasoning": text, "answer": answer}
            for question, answer, text in zip(questions, answers, texts, strict=True)
            if text and self.verify(text, answer)
        ]

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Different right solutions, one try for each approach."""
        asked = [APPROACHES[i % len(APPROACHES)] for i in range(n_solutions)]
        prompts = [f"{PROMPT.format(question=question)}\n{approach}" for approach in asked]
        texts = self.respond(prompts, temperature=0.7)
        return list(dict.fromkeys(text for text in texts if text and self.verify(text, answer)))

    def respond(self, prompts: Sequence[str], temperature: float) -> list[str]:
        """Answers in order; empty where the policy did not come to an end."""
        dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
        sampling = Sampling(self.max_tokens, temperature, seed=self.seed)
        turns = self.policy.respond(dialogs, sampling)
        return [t.message.content if t.stop == StopReason.ANSWERED else "" for t in turns]
