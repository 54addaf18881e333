"""Long-context rows: a needle in a haystack, questions over many documents, long texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharpen.types import Dialog, Json, Message, Policy, Sampling, SharpenError, StopReason
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded

ODD_ONE = "One sentence above has nothing to do with the others. Which one is it?"
FILLER = (
    "{person} of {company} spent the morning in {city} with the {team} team.",
    "A parcel from {city} reached {company} at {street} in good order.",
    "In {country}, {person} spoke for an hour about the plans of {company}.",
    "The {team} team moved to {street}, which {person} had wanted for years.",
    "{company} opened a second office in {city} and put {person} in charge.",
)


class LongContextDataGenerator:
    """Lengths are in characters. `filler` are sentences of one's own to hide needles among; only
    long-form data needs a policy."""

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
        """A text of about `context_length` characters with `needle` between two of its sentences,
        as near to `needle_position` (0 to 1) as sentences allow."""
        if not 0 <= needle_position <= 1 or context_length <= len(needle):
            raise SharpenError(
                f"a needle of {len(needle)} characters at {needle_position} does not fit into "
                f"{context_length}: the position is between 0 and 1"
            )
        room, sentences = context_length - len(needle) - 1, []
        for sentence in self.sentences(needle):
            if room < len(sentence) + 1:
                break
            sentences.append(sentence)
            room -= len(sentence) + 1
        target, at, passed = needle_position * context_length, 0, 0
        while at < len(sentences) and passed + len(sentences[at]) / 2 < target:
            passed += len(sentences[at]) + 1
            at += 1
        return {
            "context": " ".join([*sentences[:at], needle, *sentences[at:]]),
            "question": question,
            "answer": needle if answer is None else answer,
            "needle_position": needle_position,
        }

    def sentences(self, needle: str) -> Iterator[str]:
        rng, pools = seeded("haystack", self.seed, needle), shared_pools()
        while True:
            if self.filler:
                yield rng.choice(self.filler)
            else:
                yield rng.choice(FILLER).format(**{n: rng.choice(v) for n, v in pools.items()})

    def generate_multi_doc_qa(
        self,
        documents: Sequence[str],
        question: str,
        relevant_doc_indices: Sequence[int],
        answer: str | None = None,
    ) -> Json:
        """All documents under numbered headings; indices count from 0."""
        wrong = [i for i in relevant_doc_indices if not 0 <= i < len(documents)]
        if wrong:
            raise SharpenError(f"there is no document {wrong[0]}: {len(documents)} were given")
        parts = [f"=== Document {i} ===\n{text}" for i, text in enumerate(documents, 1)]
        row: Json = {
            "context": "\n\n".join(parts),
            "question": question,
            "relevant_docs": list(relevant_doc_indices),
            "n_documents": len(documents),
        }
        return row if answer is None else row | {"answer": answer}

    def generate_long_form_completion(self, prompt: str, target_length: int) -> Json:
        """A long text by the policy, with the length it really has."""
        if self.policy is None:
            raise SharpenError(
                "long-form data is written by a policy: LongContextDataGenerator(policy)"
            )
        asked = f"{prompt}\n\nWrite about {target_length} characters."
        sampling = Sampling(max(16, target_length // 3), 0.7, seed=self.seed)
        turn = self.policy.respond([Dialog((Message("user", asked),))], sampling)[0]
        text = turn.message.content
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turn.stop})")
        return {
            "prompt": prompt,
            "completion": text,
            "target_length": target_length,
            "length": len(text),
            "complete": turn.stop == StopReason.ANSWERED,
        }
