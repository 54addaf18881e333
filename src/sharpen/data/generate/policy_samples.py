"""Data that a policy writes, kept only if a verifier accepts it, and rows with long contexts.

Users call these from their own scripts: `from sharpen import ReasoningDataGenerator`. The needle
benchmark takes its texts from here, `user_tools.py` lets a policy word requests with `ask_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sharpen.data.generate.sets import frames
from sharpen.types import Dialog, Json, Message, Policy, Sampling, SharpenError, StopReason, Turn
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded

_Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?
_REASONING_TEMPERATURE = 0.3
_DIVERSE_TEMPERATURE = 0.7
_LONG_FORM_TEMPERATURE = 0.7
_CHARACTERS_PER_TOKEN = 3
_MIN_LONG_FORM_TOKENS = 16
_DEFAULT_QUESTION = "One sentence above has nothing to do with the others. Which one is it?"


def ask_policy(
    policy: Policy, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Turn]:
    """Returns the policy's turn after each prompt."""
    dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
    return policy.respond(dialogs, Sampling(max_tokens, temperature, seed=seed))


class ReasoningDataGenerator:
    """Lets a policy solve questions and keeps the solutions that `verify` accepts."""

    def __init__(self, policy: Policy, verify: _Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy = policy
        self.verify = verify
        self.max_tokens = max_tokens
        self.seed = seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """Returns `{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(
                f"{len(questions)} questions, but {len(answers)} answers; give one per question"
            )
        hints = [""] * len(answers)
        solutions = self._solve(questions, answers, hints, _REASONING_TEMPERATURE)
        rows = []
        for question, solution, answer in zip(questions, solutions, answers, strict=True):
            if solution:
                rows.append({"question": question, "reasoning": solution, "answer": answer})
        return rows

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Returns different right solutions; each attempt is told another approach."""
        approaches = frames("reasoning")["approaches"]
        hints = []
        for number in range(n_solutions):
            hints.append("\n" + approaches[number % len(approaches)])
        questions = [question] * n_solutions
        answers = [answer] * n_solutions
        solutions = self._solve(questions, answers, hints, _DIVERSE_TEMPERATURE)
        return list(dict.fromkeys(solution for solution in solutions if solution))

    def _solve(
        self,
        questions: Sequence[str],
        answers: Sequence[str],
        hints: Sequence[str],
        temperature: float,
    ) -> list[str]:
        """Returns one solution per question; empty where it is wrong or was cut off."""
        template = frames("reasoning")["prompt"]
        prompts = []
        for question, hint in zip(questions, hints, strict=True):
            prompts.append(template.format(question=question) + hint)
        turns = ask_policy(self.policy, prompts, self.max_tokens, temperature, self.seed)
        solutions = []
        for turn, answer in zip(turns, answers, strict=True):
            text = turn.message.content
            was_cut_off = turn.stop != StopReason.ANSWERED
            if was_cut_off or not text or not self.verify(text, answer):
                text = ""
            solutions.append(text)
        return solutions


class LongContextDataGenerator:
    """Makes rows with long contexts. Lengths are in characters.

    `filler` are sentences to hide needles among, instead of the built-in ones.
    """

    def __init__(self, policy: Policy | None = None, filler: Sequence[str] = (), seed: int = 0):
        self.policy = policy
        self.filler = tuple(filler)
        self.seed = seed

    def generate_needle_in_haystack(
        self,
        context_length: int,
        needle: str,
        needle_position: float = 0.5,
        question: str = _DEFAULT_QUESTION,
        answer: str | None = None,
    ) -> Json:
        """Returns a text with `needle` between two sentences, near `needle_position` (0 to 1).

        The answer is the needle if none is given.
        """
        if not 0 <= needle_position <= 1:
            raise SharpenError(
                f"needle_position: {needle_position} does not fit into the text; use 0 to 1"
            )
        if context_length <= len(needle):
            raise SharpenError(
                f"needle: {len(needle)} characters do not fit into a context_length of "
                f"{context_length}; make the context longer"
            )
        room = context_length - len(needle) - 1
        length = 0
        before = []
        after = []
        for sentence in self._sentences(needle):
            if length + len(sentence) + 1 > room:
                break
            middle = length + len(sentence) / 2
            if middle < needle_position * context_length:
                before.append(sentence)
            else:
                after.append(sentence)
            length += len(sentence) + 1
        return {
            "context": " ".join([*before, needle, *after]),
            "question": question,
            "answer": needle if answer is None else answer,
            "needle_position": needle_position,
        }

    def _sentences(self, needle: str) -> Iterator[str]:
        """Yields sentences to hide the needle among, without end."""
        rng = seeded("haystack", self.seed, needle)
        pools = shared_pools()
        while self.filler:
            yield rng.choice(self.filler)
        while True:
            template = rng.choice(frames("haystack"))
            # a value is drawn from every pool, whether the sentence uses it or not
            values = {name: rng.choice(pool) for name, pool in pools.items()}
            yield template.format(**values)

    def generate_multi_doc_qa(
        self,
        documents: Sequence[str],
        question: str,
        relevant_doc_indices: Sequence[int],
        answer: str | None = None,
    ) -> Json:
        """Returns a question over numbered documents; indices count from 0."""
        for index in relevant_doc_indices:
            if not 0 <= index < len(documents):
                raise SharpenError(
                    f"relevant_doc_indices: there is no document {index} among "
                    f"{len(documents)}; indices count from 0"
                )
        sections = []
        for number, text in enumerate(documents, 1):
            sections.append(f"=== Document {number} ===\n{text}")
        row: Json = {
            "context": "\n\n".join(sections),
            "question": question,
            "relevant_docs": list(relevant_doc_indices),
            "n_documents": len(documents),
        }
        if answer is not None:
            row["answer"] = answer
        return row

    def generate_long_form_completion(self, prompt: str, target_length: int) -> Json:
        """Returns a long text by the policy, with the length it really has."""
        if self.policy is None:
            raise SharpenError(
                "policy: long text is written by a policy; use LongContextDataGenerator(policy)"
            )
        max_tokens = max(_MIN_LONG_FORM_TOKENS, target_length // _CHARACTERS_PER_TOKEN)
        full_prompt = f"{prompt}\n\nWrite about {target_length} characters."
        turns = ask_policy(
            self.policy, [full_prompt], max_tokens, _LONG_FORM_TEMPERATURE, self.seed
        )
        text = turns[0].message.content
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turns[0].stop})")
        return {
            "prompt": prompt,
            "completion": text,
            "target_length": target_length,
            "length": len(text),
            "complete": turns[0].stop == StopReason.ANSWERED,
        }
