"""Checks whether splits leak into each other: same instructions, shared 13-grams, near copies.

Near copies are rows of two splits that share most of their words once values are masked and stop
words are dropped. Texts are held as 8-byte hashes and words as numbers, so a million rows fit in
memory. `sharpen data check --splits` calls it; `generate` uses the same rules while it builds.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sharpen.data.check import ParsedRow, calls_of, parse_record
from sharpen.data.reading import read_records
from sharpen.types import Dialog, Json, Preference, RowError, Task, ToolSpec

_RowId = TypeVar("_RowId")

MAX_OVERLAP = 0.70  # highest share of words that rows of two splits may have in common
_MIN_DISTINCT = 0.90  # lowest share of rows that differ once values are masked
_GRAM = 13  # words
_MASK = "VALUE"
_WORD = re.compile(r"\w+(?:'\w+)?")
# What stands for a value rather than for the task: quotes, addresses, anything with a digit, and
# names (a capital letter inside a sentence).
_VALUE = re.compile(
    r"\"[^\"]*\"|“[^”]*”|'[^'\n]*'(?!\w)|https?://\S+|[\w.+-]+@[\w-]+\.\w+|\S*\d\S*"
    r"|(?<=[a-z,;] )[A-Z][\w-]+(?: [A-Z][\w-]+)*"
)
_STOP_WORD_TEXT = """
a about also am an and any are as at be because been but by can could did do does for from had has
have he her hers him his how i if in into is it its just let like me my need no not of on or our out
please she should so some than that the their them then there these they this to too up us was we
were what when where which who will with would you your want tell get give show make help know
"""
_STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())


# Reading a split ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Split:
    """What of one file is compared: hashes of texts and sets of word numbers."""

    path: str
    rows: int = 0
    verbatim: array[int] = field(default_factory=partial(array, "q"))
    masked: array[int] = field(default_factory=partial(array, "q"))
    grams: array[int] = field(default_factory=partial(array, "q"))
    # the sorted word numbers of a row, as bytes → where the first row with these words is
    where_by_words: dict[bytes, str] = field(default_factory=dict)


def comparable_texts(item: ParsedRow | ToolSpec) -> tuple[str, str, frozenset[str], list[str]]:
    """Return what of a row is compared.

    These are its instruction word by word, the same with values masked, the set of content words
    in that, and every 13 consecutive words of anything that the user says.
    """
    values = _texts_in([call.arguments for call in calls_of(item)])
    user_texts = _user_texts(item) or [""]
    masked_words = _WORD.findall(mask(user_texts[0], values).lower())
    content_words = frozenset(
        word for word in masked_words if word not in _STOP_WORDS and word != _MASK.lower()
    )
    instruction = ""
    grams = []
    for index, text in enumerate(user_texts):
        words = _WORD.findall(text.lower())
        if index == 0:
            instruction = " ".join(words)
        for start in range(len(words) - _GRAM + 1):
            grams.append(" ".join(words[start : start + _GRAM]))
    return instruction, " ".join(masked_words), content_words, grams


def _user_texts(item: ParsedRow | ToolSpec) -> list[str]:
    """The instruction first, then whatever else the user says."""
    if isinstance(item, Task):
        return [item.instruction]
    if isinstance(item, Dialog):
        messages = item.messages
    elif isinstance(item, Preference):
        messages = item.prompt
    else:
        messages = ()
    return [message.content for message in messages if message.role == "user"]


def _texts_in(value: Any) -> set[str]:
    """Return the text of every value inside arguments, however deep, except single characters."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        texts = set()
        for item in value:
            texts |= _texts_in(item)
        return texts
    if isinstance(value, (str, int, float)) and len(str(value)) > 1:
        return {str(value)}
    return set()


def mask(text: str, values: set[str]) -> str:
    """Replace values in an instruction: those of the calls, and whatever looks like one."""
    for value in sorted(values, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", _MASK, text)
    return _VALUE.sub(_MASK, text)


def _read_split(path: Path, word_numbers: dict[str, int]) -> _Split:
    """Read a file's instructions as hashes. Rows that cannot be read are left to `check_rows`."""
    split = _Split(str(path))
    for record in read_records(path):
        try:
            item = parse_record(record)
            instruction, masked, content_words, grams = comparable_texts(item)
        except (RowError, RecursionError):
            continue
        if not _user_texts(item):
            continue
        split.rows += 1
        split.verbatim.append(hash(instruction))
        split.masked.append(hash(masked))
        split.grams.extend(map(hash, grams))
        numbers = [word_numbers.setdefault(word, len(word_numbers)) for word in content_words]
        packed_words = array("I", sorted(numbers)).tobytes()
        split.where_by_words.setdefault(packed_words, record.where)
    return split


# Comparing splits --------------------------------------------------------------------------------


def compare_splits(paths: Sequence[Path]) -> Json:
    """Compare every pair of splits, and measure how distinct the rows of each split are."""
    word_numbers: dict[str, int] = {}
    splits = [_read_split(path, word_numbers) for path in paths]
    pairs = [_compare_pair(first, second) for first, second in combinations(splits, 2)]
    masked_by_name: dict[str, np.ndarray] = {}
    for split in splits:
        masked_by_name[split.path] = np.array(split.masked)
    masked_by_name["all"] = np.concatenate([np.array(split.masked) for split in splits])
    return {
        "rows": {split.path: split.rows for split in splits},
        "pairs": pairs,
        "distinct": {
            name: round(_distinct_share(hashes), 4) for name, hashes in masked_by_name.items()
        },
    }


def _compare_pair(first: _Split, second: _Split) -> Json:
    overlap, where, near_copies = _closest_rows(first, second)
    return {
        "splits": [first.path, second.path],
        "verbatim": len(np.intersect1d(first.verbatim, second.verbatim)),
        "grams": len(np.intersect1d(first.grams, second.grams)),
        "word_overlap": round(overlap, 4),
        "closest": where,
        "near_copies": near_copies,
    }


def _distinct_share(hashes: np.ndarray) -> float:
    if not len(hashes):
        return 1.0
    return len(np.unique(hashes)) / len(hashes)


def find_leaks(comparison: Json) -> list[str]:
    """Return what breaks the rules: shared texts or 13-grams, near copies, or repeated rows."""
    leaks = []
    for pair in comparison["pairs"]:
        names = " and ".join(pair["splits"])
        if pair["verbatim"] or pair["grams"]:
            leaks.append(f"{names} share {pair['verbatim']} texts, {pair['grams']} 13-grams")
        if pair["word_overlap"] > MAX_OVERLAP:
            share = f"{pair['word_overlap']:.0%}"
            leaks.append(
                f"{names} share up to {share} of their words in {pair['near_copies']} rows"
            )
    distinct = comparison["distinct"]["all"]
    if distinct < _MIN_DISTINCT:
        leaks.append(f"only {distinct:.1%} of the rows are distinct")
    return leaks


def overlap_candidates(
    words: Collection[Any], rows_with: Mapping[Any, Collection[_RowId]], bound: float
) -> Iterator[_RowId]:
    """Yield the rows that may share more than `bound` of their words with these words.

    A row that shares that many words has at least one of the few rarest words, so only the rows
    with one of those need to be compared. A row can come more than once.
    """
    needed = math.floor(bound * len(words)) + 1
    rarest_first = sorted(words, key=lambda word: len(rows_with.get(word, ())))
    for word in rarest_first[: max(0, len(words) - needed + 1)]:
        yield from rows_with.get(word, ())


def _closest_rows(first: _Split, second: _Split) -> tuple[float, list[str], int]:
    """Return the highest word overlap of two rows, where they are, and the count of near copies.

    The overlap is intersection over union. Near copies are the different rows of `second` whose
    overlap with any row of `first` is over `MAX_OVERLAP`.
    """
    first_rows = list(first.where_by_words)
    rows_with: dict[int, array[int]] = {}
    for row_number, packed_words in enumerate(first_rows):
        for word in array("I", packed_words):
            rows_with.setdefault(word, array("I")).append(row_number)
    best_overlap = 0.0
    best_where = ["", ""]
    near_copies = 0
    for packed_words, where in second.where_by_words.items():
        words = array("I", packed_words)
        word_set = frozenset(words)
        row_overlap = 0.0
        bound = min(best_overlap, MAX_OVERLAP)
        for row_number in dict.fromkeys(overlap_candidates(words, rows_with, bound)):
            other_words = array("I", first_rows[row_number])
            common = len(word_set.intersection(other_words))
            overlap = common / (len(word_set) + len(other_words) - common)
            row_overlap = max(row_overlap, overlap)
            if overlap > best_overlap:
                best_overlap = overlap
                best_where = [first.where_by_words[first_rows[row_number]], where]
        if row_overlap > MAX_OVERLAP:
            near_copies += 1
    return best_overlap, best_where, near_copies
