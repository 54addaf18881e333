"""Made tasks about long texts: one key among many, one sentence in a haystack. The benchmarks
`kv_retrieval:KEYS` and `needle:CHARACTERS` are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sharpen.data.generate.haystack import needle_in_haystack
from sharpen.data.importers.common import FORMATS
from sharpen.types import Task
from sharpen.world.state import seeded_rng

_QUESTION = "What is the pass phrase of today?"
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLACES = 20  # keys that are asked for, from the first to the last


def kv_tasks(keys: int) -> Iterator[Task]:
    """Yields questions for keys at twenty places of a JSON object with `keys` keys."""
    for number in range(_PLACES):
        rng = seeded_rng("kv", keys, number)
        pairs = [[f"{rng.getrandbits(64):016x}" for _ in range(2)] for _ in range(keys)]
        key, value = pairs[number * (keys - 1) // (_PLACES - 1)]
        row = {"ordered_kv_records": pairs, "key": key, "value": value}
        yield replace(FORMATS["kv_retrieval"].convert(row), id=f"kv-{keys}-{number}")


def needle_tasks(longest: int) -> Iterator[Task]:
    """Yields a grid of tasks: four lengths up to `longest` characters, five depths."""
    for quarter in range(1, 5):
        length = longest * quarter // 4
        for depth in _DEPTHS:
            word = f"{seeded_rng('needle', length, depth).getrandbits(32):08x}"
            needle = f"The pass phrase of today is {word}."
            row = needle_in_haystack(length, needle, depth, _QUESTION, word, seed=longest)
            yield Task(
                f"needle-{length}-{depth:g}",
                f"{row['context']}\n\n{_QUESTION}",
                gold={"answers": [word]},
                kind="retrieval",
                metadata={"category": f"{length} at {depth:g}"},
            )
