"""Verify answers: find the final one in a response and compare it with gold.

Plain numbers and texts are compared here. Other mathematics is left to math-verify, in processes
that can be killed: it hangs on a tower of powers. `rewards/verifiers.py` calls it.
"""

from __future__ import annotations

import functools
import json
import queue
import re
import sys
import unicodedata
from fractions import Fraction

from sharpen.sandbox import Limits, Worker, plain_worker
from sharpen.types import SharpenError

_MAX_ANSWER = 2000  # characters
_MAX_NUMBER = 200
_MAX_TAIL = 1 << 14  # of a response, in which "the answer is" is looked for
_MAX_BOXES = 8  # the last ones of a response, tried from the end

_ANSWER_CUE = re.compile(
    r"(?:答案|结果|(?i:\banswer)\b)[^\n:：=是为]{0,40}?(?:[:：=是为]|等于|(?i:\bis\b))[\s:：=]*([^\n]*)"
)
_PUNCTUATION = re.compile(r"[\s.,;:!?\"'`*_()\[\]{}、。，；：！？“”‘’「」《》…]+")
_ARTICLE = re.compile(r"\b(?:the|an?)\s+")
_SENTENCE_END = re.compile(r"[。；;]|\.(?=\s|$)")
_SENTENCE = re.compile(r"[一-鿿\n]|(?<![\\A-Za-z])[A-Za-z]{2}")  # what formulas do not have
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,20}(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"\\[dt]?frac\{{\d+\}}\{{\d+\}}|(?:(?<![\w)])[-+])?(?:{_DIGITS})(?:/(?:{_DIGITS}))?"
)
_LATEX_TEXT = r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}"
_UNIT = r"%|[一-鿿].*|\s(?:[mgshLNJWVAKCF]|[^\W\d_]{2}[^\d\\^_{}=+*/,()]*)"  # `5 x` is no length
_FRACTION = rf"(?P<top>{_DIGITS})?\s*/\s*(?P<below>{_DIGITS})"
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>{_DIGITS})?\s*(?:{_FRACTION})?\s*?(?P<unit>{_UNIT})?"
)
_SCALES = {"万": 10**4, "亿": 10**8, "million": 10**6, "billion": 10**9}
_DRESSING = (  # what does not change a number, and what replaces it
    (r"\\(?:left|right|displaystyle|[$!,;: ()\[\]])|[*$¥€£`°]|\\(?=%)|\^\s*\{?\\circ\}?", " "),
    (_LATEX_TEXT, r" \1"),
    (r"\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?", r" \1/\2"),
    (r"\{,\}", ","),
    (r"^\s*[a-zA-Z]\s*=|\.\s*$", ""),
)
_JUDGE_SOURCE = r"""
import json, os, signal
from math_verify import parse, verify
os.write(3, b"\n")
for line in open(3, "rb", closefd=False):
    signal.alarm(60)  # when whoever would kill this process is gone
    pair = [parse("\\boxed{%s}" % text, parsing_timeout=0) for text in json.loads(line)]
    os.write(3, json.dumps(verify(*pair, timeout_seconds=0)).encode() + b"\n")
    signal.alarm(0)
"""
Number = tuple[Fraction, str]  # value and unit


# The final answer of a response -------------------------------------------------------------------


def spoken(text: str) -> str:
    """Returns a response without its thoughts; one that never left them says nothing."""
    after_thoughts = text.rpartition("</think>")[2]
    return "" if "<think>" in after_thoughts else after_thoughts


def final_answer(text: str) -> str | None:
    """Returns what a response marks as its result, None where it marks nothing.

    Marks are, in this order: the last box, `<answer>`, `####`, "the answer is"."""
    text = spoken(text)
    marked = _last_box(text)
    if marked is None and "<answer>" in text:
        marked = text.rpartition("<answer>")[2].partition("</answer>")[0]
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].partition("\n")[0]
    if marked is None:
        marked = _announced_answer(text)
    return marked.strip(" \n\t*`")[:_MAX_ANSWER] or None


def _last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}` that closes, braces within it included."""
    openings = list(re.finditer(r"\\f?boxed\s*\{", text))
    for opening in reversed(openings[-_MAX_BOXES:]):
        start = opening.end()
        depth = 1
        for position in range(start, min(len(text), start + _MAX_ANSWER)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
            if depth == 0:
                return text[start:position]
    return None


def _announced_answer(text: str) -> str:
    """What follows the last "the answer is" or "答案是", up to the end of its sentence."""
    cues = _ANSWER_CUE.finditer(text[-_MAX_TAIL:])
    announced = [cue[1] for cue in cues if cue[1].strip(" *")]
    return _SENTENCE_END.split(announced[-1])[0] if announced else ""


def math_answer(text: str) -> str | None:
    """Returns the final answer, or the text itself where it is a formula.

    Of an answer in sentences only the last number is returned."""
    marked = final_answer(text)
    answer = marked or spoken(text).strip()
    if plain_number(answer) or not _is_wordy(answer):
        return answer or None
    if "\\" in answer and marked:
        return answer
    numbers = _NUMBER.findall(answer)
    return numbers[-1] if numbers else marked


def _is_wordy(answer: str) -> bool:
    if len(answer) > _MAX_NUMBER:
        return True
    return _SENTENCE.search(re.sub(_LATEX_TEXT, "", answer)) is not None


# Numbers and texts --------------------------------------------------------------------------------


@functools.lru_cache(1 << 14)
def plain_number(text: str) -> Number | None:
    """Read a number with its unit; None where the text is more than that.

    It may be dressed as `$1,234.50`, `\\frac{1}{2}`, `-3/4`, `1 1/2`, `50\\%`, `3万` or
    `x = 5 \\text{ km}`."""
    if len(text) > _MAX_NUMBER:
        return None
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    for pattern, replacement in _DRESSING:
        text = re.sub(pattern, replacement, text)
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    if not match or not (match["whole"] or match["top"]) or match["below"] == "0":
        return None
    value = _read_digits(match["whole"])
    top = _read_digits(match["top"])
    below = _read_digits(match["below"])
    if below:
        value = value + top / below if match["top"] else value / below
    unit = (match["unit"] or "").strip().casefold()
    for scale, factor in _SCALES.items():
        if unit.startswith(scale):
            value = value * factor
            unit = unit.removeprefix(scale).strip()
    if match["sign"] == "-":
        value = -value
    return value, unit


def _read_digits(digits: str | None) -> Fraction:
    return Fraction((digits or "0").replace(",", ""))


def _same_number(gold: Number, answer: Number) -> bool:
    """Compare integers exactly and others to six places; a percentage may be a fraction.

    Units count when both are given in full or both in short."""
    gold_value, gold_unit = gold
    answer_value, answer_unit = answer
    if _units_differ(gold_unit, answer_unit):
        return False
    pairs = [(gold_value, answer_value)]
    if gold_unit == "%" and answer_unit != "%":
        pairs.append((gold_value / 100, answer_value))
    if answer_unit == "%" and gold_unit != "%":
        pairs.append((gold_value, answer_value / 100))
    are_integers = gold_value.denominator == 1 and answer_value.denominator == 1
    tolerance = 0 if are_integers else Fraction(1, 10**6)
    return any(abs(a - b) <= tolerance * max(1, abs(a)) for a, b in pairs)


def _units_differ(gold_unit: str, answer_unit: str) -> bool:
    """Whether two units of the same kind of spelling ("km" or "kilometers") are not the same."""
    first = gold_unit.rstrip("s.")
    second = answer_unit.rstrip("s.")
    if not first or not second or first == second:
        return False
    return (len(first) < 4) == (len(second) < 4)


def folded(text: str) -> str:
    """Normalize a text: no case, punctuation, articles, blanks or full-width letters."""
    plain_letters = unicodedata.normalize("NFKC", text).casefold()
    return _PUNCTUATION.sub("", _ARTICLE.sub("", plain_letters)).strip("-•")


def same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same, as numbers where both are numbers."""
    gold_number = plain_number(gold)
    answer_number = plain_number(answer)
    if gold_number and answer_number:
        return _same_number(gold_number, answer_number)
    return folded(gold) == folded(answer) != ""


# Formulas -----------------------------------------------------------------------------------------


class MathJudge:
    """math-verify in `workers` processes, started when first needed, killed after `limit_s` on one
    pair."""

    def __init__(self, workers: int = 2, limit_s: float = 5.0):
        self.limits = Limits(wall_s=limit_s, memory_mb=1024)
        self.workers = workers
        # None stands for a process that is not started yet
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two answers are the same; None when that could not be decided in time."""
        gold_number = plain_number(gold)
        answer_number = plain_number(answer)
        if gold_number and answer_number:
            return _same_number(gold_number, answer_number)
        if gold == answer or not answer:
            return bool(answer)
        worker = self._idle.get()
        verdict = None
        try:
            worker = worker or self._start_worker()
            worker.start_clock(self.limits)
            worker.send(json.dumps([gold[:_MAX_ANSWER], answer[:_MAX_ANSWER]]).encode())
            reply = worker.receive() or b""
            verdict = {b"true": True, b"false": False}.get(reply)
        finally:
            if worker and verdict is None:
                worker.end()
            self._idle.put(worker if verdict is not None else None)
        return verdict

    def _start_worker(self) -> Worker:
        worker = plain_worker([path for path in sys.path if path])
        worker.begin(Limits(wall_s=3600, memory_mb=2048), _JUDGE_SOURCE, True)
        if worker.receive() != b"":
            worker.end()
            raise SharpenError("math-verify does not start: pip install math-verify")
        return worker

    def close(self) -> None:
        for _ in range(self.workers):
            worker = self._idle.get()
            if worker:
                worker.end()
            self._idle.put(None)
