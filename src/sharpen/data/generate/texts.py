"""Rows written by a policy: reasoning, of which only what passes the verifier is kept, and long
texts; and long contexts with a needle or many documents in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sharpen.data.generate.scene import frames
from sharpen.types import Dialog, Json, Message, Policy, Sampling, SharpenError, StopReason, Turn
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded

Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?
ODD_ONE = "One sentence above has nothing to do with the others. Which one is it?"


def replies(
    policy: Policy, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Turn]:
    dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
    return policy.respond(dialogs, Sampling(max_tokens, temperature, seed=seed))


class ReasoningDataGenerator:
    """`policy` solves, `verify` decides; a local model, a server or a script will do."""

    def __init__(self, policy: Policy, verify: Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy, self.verify, self.max_tokens, self.seed = policy, verify, max_tokens, seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """`{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(f"{len(questions)} questions, but {len(answers)} answers")
        texts = self.solve(questions, answers, [""] * len(answers), 0.3)
        rows = zip(questions, texts, answers, strict=True)
        return [{"question": q, "reasoning": text, "answer": a} for q, text, a in rows if text]

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Different right solutions, one try for each approach."""
        approaches = frames("reasoning")["approaches"]
        hints = [f"\n{approaches[i % len(approaches)]}" for i in range(n_solutions)]
        texts = self.solve([question] * n_solutions, [answer] * n_solutions, hints, 0.7)
        return list(dict.fromkeys(text for text in texts if text))

    def solve(
        self, questions: Sequence[str], answers: Sequence[str], hints: list[str], temperature: float
    ) -> list[str]:
        """Solutions in order; empty where one is wrong or did not come to an end."""
        prompt, found = frames("reasoning")["prompt"], []
        asked = [prompt.format(question=q) + h for q, h in zip(questions, hints, strict=True)]
        turns = replies(self.policy, asked, self.max_tokens, temperature, self.seed)
        for turn, answer in zip(turns, answers, strict=True):
            text = turn.message.content if turn.stop == StopReason.ANSWERED else ""
            found.append(text if text and self.verify(text, answer) else "")
        return found


class LongContextDataGenerator:
    """Lengths are in characters; `filler` are sentences of one's own to hide needles among."""

    def __init__(self, policy: Policy | None = None, filler: Sequence[str] = (), seed: int = 0):
        self.policy, self.filler, self.seed = policy, tuple(filler), seed

    def generate_needle_in_haystack(
        self,
        context_length: int,
        needle: str,
        needle_position: float = 0.5,
        question: str = ODD_ONE,
        answer: str | None = None,
    ) -> Json:
        """`needle` between two sentences, as near to `needle_position` (0 to 1) as they allow."""
        if not 0 <= needle_position <= 1 or context_length <= len(needle):
            asked = f"a needle of {len(needle)} characters at {needle_position} does not fit into "
            raise SharpenError(f"{asked}{context_length}: the position is between 0 and 1")
        room, passed, before, after = context_length - len(needle) - 1, 0, [], []
        for sentence in self.sentences(needle):
            if passed + len(sentence) + 1 > room:
                break
            early = passed + len(sentence) / 2 < needle_position * context_length
            (before if early else after).append(sentence)
            passed += len(sentence) + 1
        context, answer = " ".join([*before, needle, *after]), needle if answer is None else answer
        row = {"context": context, "question": question, "answer": answer}
        return row | {"needle_position": needle_position}

    def sentences(self, needle: str) -> Iterator[str]:
        rng, pools = seeded("haystack", self.seed, needle), shared_pools()
        while self.filler:
            yield rng.choice(self.filler)
        while True:
            text = rng.choice(frames("haystack"))
            yield text.format(**{name: rng.choice(pool) for name, pool in pools.items()})

    def generate_multi_doc_qa(
        self,
        documents: Sequence[str],
        question: str,
        relevant_doc_indices: Sequence[int],
        answer: str | None = None,
    ) -> Json:
        """All documents under numbered headings; indices count from 0."""
        for index in relevant_doc_indices:
            if not 0 <= index < len(documents):
                raise SharpenError(f"there is no document {index}: {len(documents)} were given")
        parts = [f"=== Document {i} ===\n{text}" for i, text in enumerate(documents, 1)]
        row: Json = {"context": "\n\n".join(parts), "question": question}
        row |= {"relevant_docs": list(relevant_doc_indices), "n_documents": len(documents)}
        return row if answer is None else row | {"answer": answer}

    def generate_long_form_completion(self, prompt: str, target_length: int) -> Json:
        """A long text by the policy, with the length it really has."""
        if self.policy is None:
            raise SharpenError(
                "long texts are written by a policy: LongContextDataGenerator(policy)"
            )
        asked = f"{prompt}\n\nWrite about {target_length} characters."
        turn = replies(self.policy, [asked], max(16, target_length // 3), 0.7, self.seed)[0]
        text, complete = turn.message.content, turn.stop == StopReason.ANSWERED
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turn.stop})")
        row: Json = {"prompt": prompt, "completion": text, "target_length": target_length}
        return row | {"length": len(text), "complete": complete}
