"""Verify answers: find the final one in a response, compare plain numbers and texts at once, leave
other mathematics to math-verify, in processes that can be killed: it hangs on a tower of powers."""

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

MAX_ANSWER, MAX_NUMBER, MAX_TAIL = 2000, 200, 1 << 14  # characters
CUE = re.compile(
    r"(?:答案|结果|(?i:\banswer)\b)[^\n:：=是为]{0,40}?(?:[:：=是为]|等于|(?i:\bis\b))[\s:：=]*([^\n]*)"
)
PUNCTUATION = re.compile(r"[\s.,;:!?\"'`*_()\[\]{}、。，；：！？“”‘’「」《》…]+")
ARTICLE = re.compile(r"\b(?:the|an?)\s+")
SENTENCE_END = re.compile(r"[。；;]|\.(?=\s|$)")
WORDS = re.compile(r"[一-鿿\n]|(?<![\\A-Za-z])[A-Za-z]{2}")
DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,20}(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
NUMBER = re.compile(
    rf"\\[dt]?frac\{{\d+\}}\{{\d+\}}|(?:(?<![\w)])[-+])?(?:{DIGITS})(?:/(?:{DIGITS}))?"
)
LABEL = r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}"
UNIT = r"%|[一-鿿].*|\s(?:[mgshLNJWVAKCF]|[^\W\d_]{2}[^\d\\^_{}=+*/,()]*)"  # `5 x` is no length
FRACTION = rf"(?P<top>{DIGITS})?\s*/\s*(?P<below>{DIGITS})"
PLAIN = re.compile(rf"([-+]?)(?P<whole>{DIGITS})?\s*(?:{FRACTION})?\s*?(?P<unit>{UNIT})?")
SCALES = {"万": 10**4, "亿": 10**8, "million": 10**6, "billion": 10**9}
DRESSING = (  # what does not change a number, and what takes its place
    (r"\\(?:left|right|displaystyle|[$!,;: ()\[\]])|[*$¥€£`°]|\\(?=%)|\^\s*\{?\\circ\}?", " "),
    (LABEL, r" \1"),
    (r"\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?", r" \1/\2"),
    (r"\{,\}", ","),
    (r"^\s*[a-zA-Z]\s*=|\.\s*$", ""),
)
JUDGE = r"""
import json, os, signal
from math_verify import parse, verify
os.write(3, b"\n")
for line in open(3, "rb", closefd=False):
    signal.alarm(60)  # when whoever would kill this process is gone
    pair = [parse("\\boxed{%s}" % text, parsing_timeout=0) for text in json.loads(line)]
    os.write(3, json.dumps(verify(*pair, timeout_seconds=0)).encode() + b"\n")
    signal.alarm(0)
"""


def spoken(text: str) -> str:
    """A response without its thoughts; one that never left them says nothing."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def final_answer(text: str) -> str | None:
    """What a response gives as its result: the last box, `<answer>`, `####`, "the answer is"."""
    text = spoken(text)
    marked = boxed(text)
    for opening, closing in (("<answer>", "</answer>"), ("####", "\n")):
        if marked is None and opening in text:
            marked = text.rpartition(opening)[2].partition(closing)[0]
    if marked is None:
        cues = [match[1] for match in CUE.finditer(text[-MAX_TAIL:]) if match[1].strip(" *")]
        marked = SENTENCE_END.split(cues[-1])[0] if cues else ""
    return marked.strip(" \n\t*`")[:MAX_ANSWER] or None


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` that closes, braces within it included."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))[-8:]):
        depth, start = 1, match.end()
        for at in range(start, min(len(text), start + MAX_ANSWER)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def math_answer(text: str) -> str | None:
    """The final answer, or the text itself where it is a formula; of sentences the last number."""
    found = final_answer(text) or spoken(text).strip()
    wordy = len(found) > MAX_NUMBER or WORDS.search(re.sub(LABEL, "", found))
    if plain_number(found) or not wordy:
        return found or None
    if "\\" in found and final_answer(text):
        return found
    numbers = NUMBER.findall(found)
    return numbers[-1] if numbers else final_answer(text)


@functools.lru_cache(1 << 14)
def plain_number(text: str) -> tuple[Fraction, str] | None:
    """A number with its unit, however it is dressed: `$1,234.50`, `\\frac{1}{2}`, `-3/4`, `1 1/2`,
    `50\\%`, `3万`, `x = 5 \\text{ km}`. None when it is more than that."""
    if len(text) > MAX_NUMBER:
        return None
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    for pattern, replacement in DRESSING:
        text = re.sub(pattern, replacement, text)
    match = PLAIN.fullmatch(text.strip())
    if not match or not (match["whole"] or match["top"]) or match["below"] == "0":
        return None
    numbers = ((match[group] or "0").replace(",", "") for group in ("whole", "top", "below"))
    value, top, below = map(Fraction, numbers)
    if below:
        value = value + top / below if match["top"] else value / below
    unit = (match["unit"] or "").strip().casefold()
    for scale, factor in SCALES.items():
        if unit.startswith(scale):
            value, unit = value * factor, unit.removeprefix(scale).strip()
    return -value if match[1] == "-" else value, unit


def same_number(gold: tuple[Fraction, str], answer: tuple[Fraction, str]) -> bool:
    """Integers exactly, others to six places; a percentage may be written as a fraction. Units
    count when both are given in full or both in short."""
    (a, unit), (b, other) = gold, answer
    one, two = unit.rstrip("s."), other.rstrip("s.")
    if one and two and one != two and (len(one) < 4) == (len(two) < 4):
        return False
    values = [(a, b), (a / 100, b)] if unit == "%" != other else [(a, b)]
    values += [(a, b / 100)] if other == "%" != unit else []
    near = 0 if a.denominator == b.denominator == 1 else Fraction(1, 10**6)
    return any(abs(x - y) <= near * max(1, abs(x)) for x, y in values)


def folded(text: str) -> str:
    """Text without case, punctuation, articles and blanks; full-width letters as plain ones."""
    plain = ARTICLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    return PUNCTUATION.sub("", plain).strip("-•")


def same_text(wanted: str, found: str) -> bool:
    first, second = plain_number(wanted), plain_number(found)
    if first and second:
        return same_number(first, second)
    return folded(wanted) == folded(found) != ""


class MathJudge:
    """math-verify in `workers` processes, started when needed, killed after `limit_s` a pair."""

    def __init__(self, workers: int = 2, limit_s: float = 5.0):
        self.limits, self.workers = Limits(wall_s=limit_s, memory_mb=1024), workers
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self.idle.put(None)

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two answers are the same; None when that could not be told in time."""
        first, second = plain_number(gold), plain_number(answer)
        if first and second:
            return same_number(first, second)
        if gold == answer or not answer:
            return bool(answer)
        worker, verdict = self.idle.get(), None
        try:
            worker = worker or self.start()
            worker.start_clock(self.limits)
            worker.send(json.dumps([gold[:MAX_ANSWER], answer[:MAX_ANSWER]]).encode())
            verdict = {b"true": True, b"false": False}.get(worker.receive() or b"")
        finally:
            if worker and verdict is None:
                worker.end()
            self.idle.put(worker if verdict is not None else None)
        return verdict

    def start(self) -> Worker:
        worker = plain_worker([path for path in sys.path if path])
        worker.begin(Limits(wall_s=3600, memory_mb=2048), JUDGE, True)
        if worker.receive() != b"":
            worker.end()
            raise SharpenError("math-verify does not start: pip install math-verify")
        return worker

    def close(self) -> None:
        for _ in range(self.workers):
            if worker := self.idle.get():
                worker.end()
            self.idle.put(None)
