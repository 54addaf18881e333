"""Turns dialogs into vectors without a model: the text that tells them apart, as hashed features.

`coreset` calls it where no other encoder is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharpen.calls import assistant_text
from sharpen.types import Dialog

# Marks around every text, so that even an empty one has a 3-gram.
_TEXT_START = "\x02\x02"
_TEXT_END = "\x03"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # makes a hash depend on the order of characters
_PAIR_OFFSET = np.uint64(1 << 40)  # keeps pairs apart from words of two characters
# Whether a character is part of a word, by its code; the last entry stands for all beyond ASCII.
_BEYOND_ASCII = 128
_IS_LETTER = np.array([chr(code).isalnum() for code in range(_BEYOND_ASCII)] + [True])
_FIRST_CJK_CODE = 0x3040
_LAST_CJK_CODE = 0x9FFF


def dialog_text(dialog: Dialog) -> str:
    """Return what the user and the assistant say and call.

    System prompts and tool results are left out: they tell rows apart badly.
    """
    parts = []
    for message in dialog.messages:
        if message.role == "assistant":
            parts.append(assistant_text(message, dialog.id))
        elif message.role == "user":
            parts.append(message.content)
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class HashedEncoder:
    """An `Encoder` that counts words, pairs of Chinese characters and 3-grams of characters.

    A Chinese character is a word of its own. Each feature adds +1 or -1, by its hash, to one of
    `dims` buckets, so that dot products count what two texts share. The square root of each bucket
    keeps a frequent word from hiding the others.
    """

    dims: int = 256

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector of unit length per text; C is the number of characters of them all."""
        marked_texts = [f"{_TEXT_START}{text.lower()}{_TEXT_END}" for text in texts]
        joined_text = "".join(marked_texts).encode("utf-32-le", "surrogatepass")
        codes_C = np.frombuffer(joined_text, np.uint32)
        text_index_C = np.repeat(np.arange(len(texts)), [len(text) for text in marked_texts])
        is_cjk_C = (codes_C >= _FIRST_CJK_CODE) & (codes_C <= _LAST_CJK_CODE)
        wide_C = codes_C.astype(np.uint64)

        word_starts, word_numbers = _number_words(wide_C, is_cjk_C)
        same_text = text_index_C[:-1] == text_index_C[1:]
        pair_starts = np.flatnonzero(is_cjk_C[:-1] & is_cjk_C[1:] & same_text)
        pair_numbers = wide_C[pair_starts] * _MULTIPLIER + wide_C[pair_starts + 1] + _PAIR_OFFSET
        gram_starts = np.flatnonzero(text_index_C[:-2] == text_index_C[2:])
        gram_numbers = wide_C[gram_starts] * _MULTIPLIER + wide_C[gram_starts + 1]
        gram_numbers = gram_numbers * _MULTIPLIER + wide_C[gram_starts + 2]

        hashes = _mix_bits(np.concatenate([word_numbers, pair_numbers, gram_numbers]))
        starts = np.concatenate([word_starts, pair_starts, gram_starts])
        buckets = (hashes % np.uint64(self.dims)).astype(np.int64)
        signs = 1.0 - 2.0 * (hashes >> np.uint64(63))
        cells = text_index_C[starts] * self.dims + buckets
        sums = np.bincount(cells, signs, len(texts) * self.dims)
        sums_N_D = sums.reshape(len(texts), self.dims)
        return normalize_rows(np.sign(sums_N_D) * np.sqrt(np.abs(sums_N_D)))


def _number_words(codes_C: np.ndarray, is_cjk_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where words start, and a number per word made of its characters and their order."""
    is_letter_C = _IS_LETTER[np.minimum(codes_C, _BEYOND_ASCII)]
    goes_on = is_letter_C[1:] & is_letter_C[:-1] & ~is_cjk_C[1:] & ~is_cjk_C[:-1]
    starts_word_C = is_letter_C & ~np.concatenate([[False], goes_on])
    starts = np.flatnonzero(starts_word_C)
    if not len(starts):
        return starts, np.zeros(0, np.uint64)
    letters = np.flatnonzero(is_letter_C)
    letter_starts_word = starts_word_C[letters]
    start_of_word = np.maximum.accumulate(np.where(letter_starts_word, letters, 0))
    place_in_word = letters - start_of_word
    powers = _MULTIPLIER ** np.arange(place_in_word.max() + 1, dtype=np.uint64)
    terms = codes_C[letters] * powers[place_in_word]
    return starts, np.add.reduceat(terms, np.flatnonzero(letter_starts_word))


def _mix_bits(numbers: np.ndarray) -> np.ndarray:
    """Hash numbers so that every bit of the result depends on every bit (splitmix64 finaliser)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to unit length; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
