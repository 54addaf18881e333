"""Long texts with one sentence that does not belong there: the needle in the haystack.

The needle benchmark and `LongContextDataGenerator` make their texts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharpen.data.generate.sets import frames
from sharpen.types import Json, SharpenError
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded_rng

DEFAULT_QUESTION = "One sentence above has nothing to do with the others. Which one is it?"


def needle_in_haystack(
    context_length: int,
    needle: str,
    needle_position: float = 0.5,
    question: str = DEFAULT_QUESTION,
    answer: str | None = None,
    *,
    filler: Sequence[str] = (),
    seed: int = 0,
) -> Json:
    """Return a text with `needle` between two sentences, near `needle_position` (0 to 1).

    Lengths are in characters. `filler` are sentences to hide the needle among, instead of the
    built-in ones. The answer is the needle if none is given.
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
    for sentence in _sentences(needle, tuple(filler), seed):
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


def _sentences(needle: str, filler: Sequence[str], seed: int) -> Iterator[str]:
    """Yield sentences to hide the needle among, without end."""
    rng = seeded_rng("haystack", seed, needle)
    pools = shared_pools()
    while filler:
        yield rng.choice(filler)
    while True:
        template = rng.choice(frames("haystack"))
        # a value is drawn from every pool, whether the sentence uses it or not
        values = {name: rng.choice(pool) for name, pool in pools.items()}
        yield template.format(**values)
