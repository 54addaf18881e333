"""What a dialog is about, as a vector: the text that tells it from others, and hashed features of
that text, which need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharpen.calls import assistant_text
from sharpen.types import Dialog

BEFORE, BEHIND = "\x02\x02", "\x03"  # edges of a text; even an empty one has a gram of its own
ORDER = np.uint64(0x9E3779B97F4A7C15)
LETTERS = np.array([chr(code).isalnum() for code in range(128)] + [True])


def dialog_text(dialog: Dialog) -> str:
    """What is asked, said and called; results of tools and system prompts tell rows apart badly."""
    parts = []
    for message in dialog.messages:
        if message.role == "assistant":
            parts.append(assistant_text(message, dialog.id))
        elif message.role == "user":
            parts.append(message.content)
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class HashedEncoder:
    """Words (a Chinese character is one), pairs of Chinese characters, and grams of three, each of
    which falls with a random sign into one of `dims` buckets: dot products then count what two
    texts share. The root of each bucket's sum keeps a frequent word from drowning the rest."""

    dims: int = 256

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        edged = [f"{BEFORE}{text.lower()}{BEHIND}" for text in texts]
        codes = np.frombuffer("".join(edged).encode("utf-32-le", "surrogatepass"), np.uint32)
        rows = np.repeat(np.arange(len(texts)), [len(text) for text in edged])
        han = (codes >= 0x3040) & (codes <= 0x9FFF)
        wide = codes.astype(np.uint64)
        pairs = np.flatnonzero(han[:-1] & han[1:] & (rows[:-1] == rows[1:]))
        grams = np.flatnonzero(rows[:-2] == rows[2:])
        starts, words = word_sums(wide, han)
        two = wide[pairs] * ORDER + wide[pairs + 1] + np.uint64(1 << 40)
        three = (wide[grams] * ORDER + wide[grams + 1]) * ORDER + wide[grams + 2]
        hashed = mixed(np.concatenate([words, two, three]))
        owner = np.concatenate([rows[starts], rows[pairs], rows[grams]])
        bucket = (hashed % np.uint64(self.dims)).astype(np.int64)
        sign = 1.0 - 2.0 * (hashed >> np.uint64(63))
        size = len(texts) * self.dims
        sums = np.bincount(owner * self.dims + bucket, sign, size).reshape(len(texts), self.dims)
        return normalised(np.sign(sums) * np.sqrt(np.abs(sums)))


def word_sums(codes: np.ndarray, han: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where words start, and a number for each that follows from its characters and their order."""
    letter = LETTERS[np.minimum(codes, 128)]
    joined = letter[1:] & letter[:-1] & ~han[1:] & ~han[:-1]
    first = letter & ~np.concatenate([[False], joined])
    starts, inside = np.flatnonzero(first), np.flatnonzero(letter)
    if not len(starts):
        return starts, np.zeros(0, np.uint64)
    place = inside - np.maximum.accumulate(np.where(first[inside], inside, 0))
    powers = ORDER ** np.arange(place.max() + 1, dtype=np.uint64)
    return starts, np.add.reduceat(codes[inside] * powers[place], np.flatnonzero(first[inside]))


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Every bit of the number decides about every bit of the hash (the splitmix64 finaliser)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Rows of unit length; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
