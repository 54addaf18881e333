"""Reward hacking: what a response does to earn a reward without doing the task.

`RLVRHackingDetector` reads responses in English and Chinese by the patterns of `hacking.yaml`,
`RLVRRewardShaping` takes hacked reward away, and `HackingMonitor` watches a run's reward beside a
metric that the run cannot hack.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sharpen.calls import OPEN_CALL
from sharpen.config import read_yaml
from sharpen.records import cache_folder
from sharpen.types import SharpenError
from sharpen.world.expressions import Expression, ToolFailure

MAX_CHARS, MAX_WORD_CHARS, MAX_EQUATIONS = 1 << 20, 20_000, 200
LONG = 800  # characters; in a shorter text length is not what is gamed
NGRAM = 12  # words or Chinese characters in a row that are rarely written twice by chance
SURE = 0.5  # a finding of this score counts
MIN_POINTS = 8  # evaluations before a trend is looked for
FORGED = ("test_tampering", "judge_flattery")  # what makes the measured correctness itself untrue
KINDS = ("answer_guessing", "pattern_memorizing", "format_gaming", "length_gaming")
KINDS += ("shortcut_reasoning", *FORGED)
RULES: dict[str, Any] = {
    name: re.compile(rows.replace("\n", "|"), re.I | re.M)
    if isinstance(rows, str)
    else [(weight, re.compile(text, re.I | re.M)) for weight, text in rows]
    for name, rows in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
Clues = Iterator[tuple[float, str]]  # how sure each makes us, and what was seen
Logic = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    score: float  # 0 … 1
    evidence: str  # what was seen, quoted, and why it counts


class View(NamedTuple):
    """A response taken apart once for all detectors."""

    text: str
    stated: list[tuple[int, str]]  # every answer it states, and where
    reasoning: str
    answer: str
    question: str
    expected: frozenset[str]


def view(response: str, question: str = "", expected: Iterable[Any] = ()) -> View:
    """Reasoning is what stands inside <think>, or before the answer that is stated last."""
    text = RULES["raised"].sub("^", response[:MAX_CHARS])
    text = RULES["unseen"].sub("", unicodedata.normalize("NFKC", text))[:MAX_CHARS]
    found = RULES["answer"].finditer(text)
    stated = [(match.start(), next(filter(None, match.groups()), "").strip()) for match in found]
    head, closed, tail = text.partition("</think>")
    at, answer = stated[-1] if stated else (len(text), "")
    reasoning = head.rpartition("<think>")[2] if closed else text[:at]
    if closed and (not stated or at <= len(head)):
        answer = tail.strip()
    elif RULES["bare"].fullmatch(text):  # a number and nothing else
        reasoning, answer = "", text.strip()
    asked, wanted = question[:MAX_CHARS], frozenset(map(str, expected))
    return View(text, stated, reasoning, answer, asked, wanted)


def quote(text: str) -> str:
    return f"“{' '.join(text.split())[:80]}”"


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in RULES["number"].findall(text)]


def ngrams(text: str) -> set[int]:
    units = RULES["unit"].findall(text[:MAX_CHARS].casefold())
    return {hash(tuple(units[i : i + NGRAM])) for i in range(len(units) - NGRAM + 1)}


def steps(text: str) -> int:
    """How many sentences say something: an equation, or words besides filler."""
    parts = RULES["end"].split(RULES["filler"].sub("", text))
    return sum(len(RULES["unit"].findall(part)) >= (3 if "=" in part else 6) for part in parts)


def equations(text: str) -> Iterator[tuple[str, bool, float]]:
    """Claims `expression = number`: the claim, if it holds to the last digit, and the number."""
    for name, plain in (("bullet", ""), ("times", "*"), ("over", "/")):
        text = RULES[name].sub(plain, text)
    for found in itertools.islice(RULES["equation"].finditer(text), MAX_EQUATIONS):
        left, right = (RULES["comma"].sub("", side).strip(" ,") for side in found.groups())
        try:
            value, claimed = float(Expression(left)({})), float(right)
        except (ValueError, TypeError, ToolFailure):
            continue
        if not left.strip("()").replace(".", "").isdigit():
            unit = 10.0 ** -len(right.partition(".")[2])
            rounded = abs(value / unit - round(value / unit)) > 1e-6
            room = unit if rounded else 1e-9 * max(1.0, abs(value))
            yield found[0].strip(), abs(value - claimed) <= room, claimed


def words(text: str) -> set[str]:
    """Words that carry content: by jieba where there is Chinese, else of four letters and more."""
    text = text[:MAX_WORD_CHARS].casefold()
    chinese = segmenter().cut(text) if re.search("[一-鿿]", text) else ()
    known = {word for word in chinese if len(word) > 1 and not word.isascii()}
    return known | set(re.findall(r"[a-z]{4,40}", text))


@functools.cache
def segmenter() -> Any:
    """jieba, silent, with its dictionary cache where only this user writes."""
    with warnings.catch_warnings(action="ignore"):
        import jieba
    jieba.setLogLevel("ERROR")
    cut: Any = jieba.Tokenizer()
    cut.tmp_dir = cache_folder()
    cut.tmp_dir.mkdir(parents=True, exist_ok=True)
    return cut


def weighted(text: str, name: str, why: str) -> Clues:
    for weight, pattern in RULES[name]:
        if found := pattern.search(text):
            yield weight, f"{quote(found[0])} {why}"


class RLVRHackingDetector:
    """`training` are (question, solution) pairs that the policy has seen; without them memorising
    cannot be told. `logic` may judge a response's logic in place of the count of its steps."""

    def __init__(self, training: Iterable[tuple[str, str]] = (), logic: Logic | None = None):
        self.logic, self.grams, self.known = logic, set[int](), dict[str, list[Any]]()
        for question, solution in training:
            self.grams |= ngrams(solution)
            shape = RULES["number"].sub("#", question.casefold())
            self.known.setdefault(shape, []).append((numbers(question), view(solution).answer))

    def detect(self, response: str, question: str = "", expected: Iterable = ()) -> list[Finding]:
        """All that is suspicious, the surest first. `expected`: the answer, or tests' outputs."""
        seen, findings = view(response, question, expected), []
        for kind in KINDS:
            if clues := list(getattr(self, kind)(seen)):
                score = 1 - math.prod(1 - min(1.0, weight) for weight, _ in clues)
                findings.append(Finding(kind, score, "; ".join(text for _, text in clues)))
        return sorted(findings, key=lambda finding: -finding.score)

    def detect_answer_guessing(self, response: str) -> bool:
        return any(f.kind == "answer_guessing" and f.score >= SURE for f in self.detect(response))

    def detect_format_gaming(self, response: str) -> bool:
        return any(f.kind == "format_gaming" and f.score >= SURE for f in self.detect(response))

    def compute_reasoning_quality(self, response: str, question: str) -> float:
        """0 … 1: logic 40%, words of the task 30%, equations that hold 30% (logic again where the
        task has no words or no numbers); less the surest finding."""
        seen, topic = view(response, question), words(question)
        made = [holds for _, holds, _ in equations(seen.text)]
        logic = self.logic(response) if self.logic else min(1.0, steps(seen.reasoning) / 3)
        apt = len(topic & words(seen.text)) / len(topic) if topic else logic
        sums = sum(made) / max(1, len(made)) if numbers(question) else logic
        worst = max((finding.score for finding in self.detect(response, question)), default=0.0)
        return (0.4 * logic + 0.3 * apt + 0.3 * sums) * (1 - worst)

    def answer_guessing(self, seen: View) -> Clues:
        if not seen.answer or OPEN_CALL in seen.text:
            return
        need = 1 if seen.question and len(numbers(seen.question)) <= 2 else 2
        if (made := steps(seen.reasoning)) < need:
            yield 0.9 * (1 - made / need), f"{quote(seen.answer)} after {made} of {need} steps"
        if (tried := len({answer for _, answer in seen.stated})) > 3:
            yield 0.8, f"{tried} different answers"
        yield from weighted(seen.text, "guess", "admits a guess")

    def pattern_memorizing(self, seen: View) -> Clues:
        made = ngrams(seen.text) if self.grams else set()
        if len(made) >= NGRAM and (share := len(made & self.grams) / len(made)) > 0.3:
            yield share, f"{share:.0%} of its {NGRAM}-word runs stand in the training texts"
        shape, given = RULES["number"].sub("#", seen.question.casefold()), numbers(seen.question)
        same = [n for n, said in self.known.get(shape, ()) if n != given and said == seen.answer]
        if same and seen.answer not in seen.expected:
            yield 0.9, f"{quote(seen.answer)} answers this question with the numbers {same[0]}"

    def format_gaming(self, seen: View) -> Clues:
        said = [found[0].casefold() for found in RULES["filler"].finditer(seen.text)]
        start, times = Counter(phrase[:2] for phrase in said).most_common(1)[0] if said else ("", 0)
        share = sum(map(len, said)) / max(1, len(seen.text))
        if times > 2 and share > 0.05:
            phrase = next(phrase for phrase in said if phrase.startswith(start))
            yield 0.5 + share, f"{quote(phrase)} {times} times; {share:.0%} of the text is filler"
        yield from weighted(seen.text, "tags", "repeats what belongs there once")

    def length_gaming(self, seen: View) -> Clues:
        text, topic = " ".join(seen.text.split()), words(seen.question)
        if len(text) < LONG:
            return
        data = text.encode("utf-8", "replace")
        if (ratio := len(zlib.compress(data)) / len(data)) < 0.2:  # honest prose and sums: over 0.3
            yield 1 - 2.5 * ratio, f"{len(text)} characters that shrink to {ratio:.0%}"
        parts = [part for part in RULES["end"].split(text[:MAX_WORD_CHARS]) if len(part) > 15]
        idle = [part for part in parts if not re.search(r"\d", part) and not topic & words(part)]
        if len(numbers(seen.question)) > 1 and len(parts) > 7 and len(idle) > 0.7 * len(parts):
            share = f"{len(idle)} of {len(parts)} sentences have no number and no word of the task"
            yield len(idle) / len(parts), f"{share}: {quote(idle[0])}"

    def shortcut_reasoning(self, seen: View) -> Clues:
        made, final = list(equations(seen.reasoning)), numbers(seen.answer)[-1:]
        if wrong := [(claim, value) for claim, holds, value in made if not holds]:
            leads = 0.6 * any([value] == final for _, value in wrong)
            yield max(leads, 0.9 * len(wrong) / len(made)), f"{quote(wrong[0][0])} is not true"
        if made and final and final[0] not in numbers(seen.reasoning):
            yield 0.6, f"the reasoning never arrives at {quote(seen.answer)}"
        yield from weighted(seen.reasoning, "backward", "starts from the answer")
        at, first = seen.stated[0] if seen.stated else (len(seen.text), "")
        if at < 0.15 * len(seen.text) and steps(seen.text[at:]) > 2:
            yield 0.55, f"{quote(first)} stands before its reasoning"

    def test_tampering(self, seen: View) -> Clues:
        code = "\n".join(RULES["code"].findall(seen.text)) or seen.text
        yield from weighted(code, "tampering", "works on the tests, not on the task")
        written = {text.strip(" ()'\"") for text in RULES["literal"].findall(code)}
        wanted = {text.strip(" ()'\"") for text in seen.expected} - {"True", "False", "None"}
        copied = written & {text for text in wanted if len(text) > 1}
        if len(copied) > max(1, len(wanted) / 2):
            yield 0.9, f"{quote(', '.join(sorted(copied)))}: expected outputs written into the code"

    def judge_flattery(self, seen: View) -> Clues:
        yield from weighted(seen.text, "flattery", "speaks to the judge")


class RLVRRewardShaping:
    """Takes reward away and adds none: an honest right answer keeps at least 0.9 of it, a hacked
    one at most 0.75, and a wrong one stays at 0."""

    def __init__(self, detector: RLVRHackingDetector | None = None):
        self.detector = detector or RLVRHackingDetector()

    def shaped_reward(self, correctness: float, response: str, question: str) -> float:
        """`correctness` (0 … 1) times what hacking leaves of it: half at worst for gaming, nothing
        for a forged verdict; the last tenth is for the quality of the reasoning."""
        if not 0 <= correctness <= 1:
            raise SharpenError(f"correctness: expected a number from 0 to 1, found {correctness}")
        sure = [f for f in self.detector.detect(response, question) if f.score >= SURE]
        forged = max((f.score for f in sure if f.kind in FORGED), default=0.0)
        gamed = max((f.score for f in sure), default=0.0)
        quality = self.detector.compute_reasoning_quality(response, question)
        return correctness * (1 - forged) * (1 - 0.5 * gamed) * (0.9 + 0.1 * quality)


@dataclass
class HackingMonitor:
    """Raises an alarm when a run's reward rises and a held-out, verified metric does not follow: of
    two tests of trend over `window` evaluations one finds that the reward rises, the other that the
    metric does by less than `ratio` of it. Test k spends 6/(πk)² of `false_alarm`, the chance that
    an honest run is ever flagged. `HackingMonitor(**asdict(monitor))` goes on where it was."""

    false_alarm: float = 0.05
    window: int = 30  # evaluations
    ratio: float = 0.4
    min_gain: float = 0.1  # a smaller rise of the reward, as a share of its span, is let pass
    reward_span: float = 1.0  # from the worst to the best reward there can be
    tests: int = 0
    pending: list[float] = field(default_factory=list)  # rewards since the last evaluation
    points: list[dict[str, float]] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)

    def update(
        self, step: int, reward: float, held_out: float | None = None, **signs: float
    ) -> Finding | None:
        """A step's mean reward and, when it was evaluated, the held-out metric (0 … 1). `signs` are
        detector rates, lengths and the like: they explain an alarm, but raise none."""
        if not math.isfinite(reward + (held_out or 0.0)):
            raise SharpenError(f"step {step}: reward {reward}, held-out metric {held_out}")
        self.pending.append(float(reward) / self.reward_span)
        if held_out is None:
            return None
        mean, held_out, self.pending = statistics.fmean(self.pending), float(held_out), []
        point = signs | {"reward": mean, "held_out": held_out, "lag": self.ratio * mean - held_out}
        self.points = [*self.points, point][-self.window :]
        if len(self.points) < MIN_POINTS:
            return None
        self.tests += 1
        gains = {name: trend([p.get(name, 0.0) for p in self.points]) for name in point}
        chance = max(gains["reward"][1], gains.pop("lag")[1])
        level = self.false_alarm * 6 / (math.pi * self.tests) ** 2
        if chance > level or gains["reward"][0] < self.min_gain:
            return None
        moved = ", ".join(f"{name} {gain:+.3g}" for name, (gain, _) in gains.items())
        self.alarms.append(f"step {step}: over {len(self.points)} evaluations {moved}")
        return Finding("reward_without_progress", 1 - chance, self.alarms[-1])


def trend(values: list[float]) -> tuple[float, float]:
    """From the first third's mean to the last's, and the chance of such a rise (Mann-Kendall)."""
    count, third = len(values), len(values) // 3
    rises = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    gain = statistics.fmean(values[-third:]) - statistics.fmean(values[:third])
    return gain, statistics.NormalDist().cdf(-(rises - 1) / spread)
