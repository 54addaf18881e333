"""Do splits leak into each other? Verbatim instructions, shared 13-grams, and near copies: rows of
two splits that share most of their words once values are masked and stop words dropped.
Texts are held as 8-byte hashes and word numbers, so a million rows fit in memory."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.data.check import calls_of, noun_of
from sharpen.data.reading import read_records
from sharpen.types import Dialog, Json, RowError, Task

GRAM = 13
MAX_OVERLAP = 0.70
MIN_DISTINCT = 0.90
WORD = re.compile(r"\w+(?:'\w+)?")
# what stands for a value rather than for the task: quotes, addresses, anything with a digit, and
# names (a capital inside a sentence)
VALUE = re.compile(
    r"\"[^\"]*\"|“[^”]*”|'[^'\n]*'(?!\w)|https?://\S+|[\w.+-]+@[\w-]+\.\w+|\S*\d\S*"
    r"|(?<=[a-z,;] )[A-Z][\w-]+(?: [A-Z][\w-]+)*"
)
STOP_WORDS = """
a about also am an and any are as at be because been but by can could did do does for from had has
have he her hers him his how i if in into is it its just let like me my need no not of on or our out
please she should so some than that the their them then there these they this to too up us was we
were what when where which who will with would you your want tell get give show make help know
"""
STOP = frozenset(STOP_WORDS.split())


@dataclass(slots=True)
class Split:
    """What is kept of one file."""

    path: str
    rows: int = 0
    verbatim: array[int] = field(default_factory=partial(array, "q"))
    masked: array[int] = field(default_factory=partial(array, "q"))
    grams: array[int] = field(default_factory=partial(array, "q"))
    words: dict[bytes, str] = field(default_factory=dict)  # each set of words once, and where


def request_of(noun: Any) -> tuple[str, str, frozenset[str], list[str]]:
    """What of a row is compared: its instruction word by word, the same with values masked, the
    words of that which count, and every 13 words in a row of all that the user says."""
    values = leaves([call.arguments for call in calls_of(noun)])
    said = said_by_user(noun) or [""]
    masked = WORD.findall(mask(said[0], values).lower())
    content = frozenset(w for w in masked if w not in STOP and w != "value")
    spoken = [WORD.findall(text.lower()) for text in said]
    grams = [" ".join(w[at : at + GRAM]) for w in spoken for at in range(len(w) - GRAM + 1)]
    return " ".join(spoken[0]), " ".join(masked), content, grams


def read_split(path: Path, numbers: dict[str, int]) -> Split:
    """A file's instructions as hashes; rows that cannot be read are the checker's business."""
    split = Split(str(path))
    for record in read_records(path):
        try:
            noun = noun_of(record)
            text, masked, content, grams = request_of(noun)
        except (RowError, RecursionError):
            continue
        if not said_by_user(noun):
            continue
        split.rows += 1
        split.verbatim.append(hash(text))
        split.masked.append(hash(masked))
        split.grams.extend(map(hash, grams))
        row = array("I", sorted(numbers.setdefault(w, len(numbers)) for w in content))
        split.words.setdefault(row.tobytes(), record.where)
    return split


def said_by_user(noun: Any) -> list[str]:
    """The instruction first, then whatever else the user says."""
    if isinstance(noun, Task):
        return [noun.instruction]
    messages = noun.messages if isinstance(noun, Dialog) else getattr(noun, "prompt", ())
    return [m.content for m in messages if m.role == "user"]


def leaves(value: Any) -> set[str]:
    """The texts of every argument, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*(leaves(item) for item in value)) if value else set()
    return {str(value)} if isinstance(value, (str, int, float)) and len(str(value)) > 1 else set()


def mask(text: str, values: set[str]) -> str:
    """The instruction with its values taken out: those of the calls, and what looks like one."""
    for value in sorted(values, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "VALUE", text)
    return VALUE.sub("VALUE", text)


def compare(paths: Sequence[Path]) -> Json:
    """Every pair of splits, and how distinct each is in itself."""
    numbers: dict[str, int] = {}
    splits = [read_split(path, numbers) for path in paths]
    pairs = []
    for a, b in combinations(splits, 2):
        share, where, copies = closest(a, b)
        verbatim, grams = np.intersect1d(a.verbatim, b.verbatim), np.intersect1d(a.grams, b.grams)
        pair = {"splits": [a.path, b.path], "verbatim": len(verbatim), "grams": len(grams)}
        pair |= {"word_overlap": round(share, 4), "closest": where, "near_copies": copies}
        pairs.append(pair)
    texts = [np.array(split.masked) for split in splits]
    masked = dict(zip(paths, texts, strict=True)) | {"all": np.concatenate(texts)}
    distinct = {name: len(np.unique(m)) / len(m) if len(m) else 1.0 for name, m in masked.items()}
    return {
        "rows": {split.path: split.rows for split in splits},
        "pairs": pairs,
        "distinct": {str(name): round(ratio, 4) for name, ratio in distinct.items()},
    }


def leaks_in(found: Json) -> list[str]:
    """What of a comparison breaks the rules: nothing verbatim, no 13-gram, no near copy."""
    leaks = []
    for pair in found["pairs"]:
        names = " and ".join(pair["splits"])
        if pair["verbatim"] or pair["grams"]:
            leaks.append(f"{names} share {pair['verbatim']} texts, {pair['grams']} 13-grams")
        if pair["word_overlap"] > MAX_OVERLAP:
            share, copies = f"{pair['word_overlap']:.0%}", pair["near_copies"]
            leaks.append(f"{names} share up to {share} of their words in {copies} rows")
    if found["distinct"]["all"] < MIN_DISTINCT:
        leaks.append(f"only {found['distinct']['all']:.1%} of the rows are distinct")
    return leaks


def perhaps_near(
    words: Collection[Any], rows_with: Mapping[Any, Collection[Any]], bound: float
) -> Iterator[Any]:
    """Without comparing all pairs: rows that share more than `bound` of their words with these must
    have one of the few rarest of them in common."""
    needed = math.floor(bound * len(words)) + 1
    rarest = sorted(words, key=lambda word: len(rows_with.get(word, ())))
    for word in rarest[: max(0, len(words) - needed + 1)]:
        yield from rows_with.get(word, ())


def closest(a: Split, b: Split) -> tuple[float, list[str], int]:
    """The highest share of words (intersection over union) that a row of `b` has with one of `a`,
    the two rows, and how many different rows of `b` are over `MAX_OVERLAP`."""
    rows_with: dict[int, array[int]] = {}
    theirs = list(a.words)
    for number, row in enumerate(theirs):
        for word in array("I", row):
            rows_with.setdefault(word, array("I")).append(number)
    best, where, copies = 0.0, ["", ""], 0
    for row, place in b.words.items():
        words = array("I", row)
        mine, highest = frozenset(words), 0.0
        for other in dict.fromkeys(perhaps_near(words, rows_with, min(best, MAX_OVERLAP))):
            common = len(mine.intersection(array("I", theirs[other])))
            share = common / (len(mine) + len(theirs[other]) // words.itemsize - common)
            highest = max(highest, share)
            if share > best:
                best, where = share, [a.words[theirs[other]], place]
        copies += highest > MAX_OVERLAP
    return best, where, copies
