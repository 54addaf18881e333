"""Take a response apart for the hacking detector: its answers, reasoning, numbers and equations.

The patterns are those of `hacking.yaml`. `rewards/hacking.py` draws the conclusions.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sharpen.config import read_yaml
from sharpen.records import cache_folder
from sharpen.world.expressions import Expression, ToolFailure

_MAX_CHARS = 1 << 20  # of a response or question that are read
MAX_WORD_CHARS = 20_000  # of a text whose words are looked at
NGRAM = 12  # words or Chinese characters in a row that are rarely written twice by chance
_MAX_EQUATIONS = 200
_WeightedPatterns = list[tuple[float, re.Pattern[str]]]  # how sure a match makes us, and of what


def _read_patterns() -> tuple[dict[str, re.Pattern[str]], dict[str, _WeightedPatterns]]:
    """The patterns of `hacking.yaml`: single ones, and lists with weights."""
    flags = re.I | re.M
    single: dict[str, re.Pattern[str]] = {}
    weighted: dict[str, _WeightedPatterns] = {}
    for name, rows in read_yaml(Path(__file__).with_name("hacking.yaml")).items():
        if isinstance(rows, str):  # the lines of a block are alternatives
            single[name] = re.compile(rows.replace("\n", "|"), flags)
        else:
            weighted[name] = [(weight, re.compile(text, flags)) for weight, text in rows]
    return single, weighted


PATTERNS, WEIGHTED_PATTERNS = _read_patterns()


class View(NamedTuple):
    """A response taken apart once for all detectors."""

    text: str
    stated: list[tuple[int, str]]  # the position and text of every answer it states
    reasoning: str
    answer: str
    question: str
    expected: frozenset[str]


def view(response: str, question: str = "", expected: Iterable[Any] = ()) -> View:
    """Take a response apart. Its reasoning is inside <think>, or before the answer stated last."""
    text = PATTERNS["raised"].sub("^", response[:_MAX_CHARS])
    text = PATTERNS["unseen"].sub("", unicodedata.normalize("NFKC", text))[:_MAX_CHARS]
    stated = _stated_answers(text)
    position, answer = stated[-1] if stated else (len(text), "")
    head, closing_tag, tail = text.partition("</think>")
    reasoning = head.rpartition("<think>")[2] if closing_tag else text[:position]
    if closing_tag and (not stated or position <= len(head)):
        answer = tail.strip()
    elif PATTERNS["bare"].fullmatch(text):  # a number and nothing else
        reasoning = ""
        answer = text.strip()
    expected_texts = frozenset(str(value) for value in expected)
    return View(text, stated, reasoning, answer, question[:_MAX_CHARS], expected_texts)


def _stated_answers(text: str) -> list[tuple[int, str]]:
    """The position and text of every answer that a text states."""
    stated = []
    for match in PATTERNS["answer"].finditer(text):
        answer = next((group for group in match.groups() if group), "")
        stated.append((match.start(), answer.strip()))
    return stated


def quote(text: str) -> str:
    """The beginning of a text in quotation marks, on one line."""
    return f"“{' '.join(text.split())[:80]}”"


def numbers(text: str) -> list[float]:
    """Returns all numbers of a text, in order."""
    return [float(digits.replace(",", "")) for digits in PATTERNS["number"].findall(text)]


def mask_numbers(text: str) -> str:
    """Returns a question without its numbers, to find others that differ in their numbers alone."""
    return PATTERNS["number"].sub("#", text.casefold())


def ngrams(text: str) -> set[int]:
    """Returns the hashes of all runs of `NGRAM` words or Chinese characters."""
    units = PATTERNS["unit"].findall(text[:_MAX_CHARS].casefold())
    return {hash(tuple(units[i : i + NGRAM])) for i in range(len(units) - NGRAM + 1)}


def steps(text: str) -> int:
    """Counts the sentences that say something: an equation, or words besides filler."""
    count = 0
    for part in PATTERNS["end"].split(PATTERNS["filler"].sub("", text)):
        min_units = 3 if "=" in part else 6
        if len(PATTERNS["unit"].findall(part)) >= min_units:
            count += 1
    return count


def equations(text: str) -> Iterator[tuple[str, bool, float]]:
    """Yields each claim `expression = number`: the claim, if it holds to the last digit given, and
    the number. What cannot be read with certainty is left out."""
    for name, plain in (("bullet", ""), ("times", "*"), ("over", "/")):
        text = PATTERNS[name].sub(plain, text)
    matches = PATTERNS["equation"].finditer(text)
    for match in itertools.islice(matches, _MAX_EQUATIONS):
        left, right = (PATTERNS["comma"].sub("", side).strip(" ,") for side in match.groups())
        try:
            value = float(Expression(left)({}))
            claimed = float(right)
        except (ValueError, TypeError, ToolFailure):
            continue
        is_plain_number = left.strip("()").replace(".", "").isdigit()
        if not is_plain_number:
            holds = abs(value - claimed) <= _tolerance(value, right)
            yield match[0].strip(), holds, claimed


def _tolerance(value: float, written: str) -> float:
    """How far a written number may be from the value: its last digit, where it is rounded."""
    decimals = len(written.partition(".")[2])
    last_digit = 10.0**-decimals
    is_rounded = abs(value / last_digit - round(value / last_digit)) > 1e-6
    return last_digit if is_rounded else 1e-9 * max(1.0, abs(value))


def words(text: str) -> set[str]:
    """Returns the words that carry content: Chinese words, by jieba, and long Latin ones."""
    text = text[:MAX_WORD_CHARS].casefold()
    chinese_words = _segmenter().cut(text) if re.search("[一-鿿]", text) else ()
    content_words = {word for word in chinese_words if len(word) > 1 and not word.isascii()}
    return content_words | set(re.findall(r"[a-z]{4,40}", text))


@functools.cache
def _segmenter() -> Any:
    """jieba, silent, with its dictionary cache where only this user writes."""
    with warnings.catch_warnings(action="ignore"):
        import jieba
    jieba.setLogLevel("ERROR")
    segmenter: Any = jieba.Tokenizer()
    segmenter.tmp_dir = cache_folder()
    segmenter.tmp_dir.mkdir(parents=True, exist_ok=True)
    return segmenter
