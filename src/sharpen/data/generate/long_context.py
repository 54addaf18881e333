"""Long-context rows: a needle in a haystack, questions over many documents, long texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharpen.data.generate.reasoning import replies
from sharpen.data.generate.splits import frames
from sharpen.types import Json, Policy, SharpenError, StopReason
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded

ODD_ONE = "One sentence above has nothing to do with the others. Which one is it?"


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
            raise SharpenError(
                f"a needle of {len(needle)} characters at {needle_position} does not fit into "
                f"{context_length}: the position is between 0 and 1"
            )
        room, passed, before, after = context_length - len(needle) - 1, 0, [], []
        for sentence in self.sentences(needle):
            if passed + len(sentence) + 1 > room:
                break
            early = passed + len(sentence) / 2 < needle_position * context_length
            (before if early else after).append(sentence)
            passed += len(sentence) + 1
        row = {"context": " ".join([*before, needle, *after]), "question": question}
        row["answer"] = needle if answer is None else answer
        return row | {"needle_position": needle_position}

    def sentences(self, needle: str) -> Iterator[str]:
        rng, pools = seeded("haystack", self.seed, needle), shared_pools()
        while True:
            if self.filler:
                yield rng.choice(self.filler)
            else:
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
                "long-form data is written by a policy: LongContextDataGenerator(policy)"
            )
        asked = f"{prompt}\n\nWrite about {target_length} characters."
        turn = replies(self.policy, [asked], max(16, target_length // 3), 0.7, self.seed)[0]
        text, complete = turn.message.content, turn.stop == StopReason.ANSWERED
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turn.stop})")
        row: Json = {"prompt": prompt, "completion": text, "target_length": target_length}
        return row | {"length": len(text), "complete": complete}
