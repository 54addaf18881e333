"""Preferences: sampled from a policy and scored, and made into training rows.

A pair that was sampled carries its ids in its metadata, and trains on exactly those as long as the
tokenizer is the one that they were sampled with; any other pair is rendered from its messages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sharpen import types
from sharpen.calls import assistant_text
from sharpen.progress import progress
from sharpen.render import Renderer
from sharpen.rewards.learned import turn_ends
from sharpen.rollout import MakeEnvironment, rollout
from sharpen.train.rl_data import Group, GroupScorer, trajectory_to_datums
from sharpen.types import Datum, Dialog, Json, Message, Preference, RowError, SharpenError, Task

AT_ONCE = 256  # tasks whose episodes are under way together
SIDES = ("chosen", "rejected")
NAMED = 5  # rows that are named in a message


class NoPairs(SharpenError):
    """No task's samples differ in their score."""


def generate_preference_pairs(
    policy: Any,
    tasks: Sequence[Task],
    reward: types.Reward,
    make_environment: MakeEnvironment,
    samples: int,
    sampling: types.Sampling,
    max_turns: int = 8,
) -> list[Preference]:
    """The best and the worst of `samples` of each task, by the reward against the task's own gold.
    `policy` gives ids (`LocalPolicy`). Tasks whose samples are all equally good give no pair."""
    words = vocabulary(policy.renderer.tokenizer)
    pairs, lost, reasons, scores = list[Preference](), Counter[str](), Counter[str](), []
    with progress("sampling pairs", len(tasks)) as advance:
        for start in range(0, len(tasks), AT_ONCE):
            some = tasks[start : start + AT_ONCE]
            own = replace(sampling, seed=sampling.seed + start)
            repeated = [task for task in some for _ in range(samples)]
            trajectories = rollout(policy, repeated, make_environment, own, max_turns)
            for group in GroupScorer(reward).groups(some, trajectories):
                reasons.update(group.dropped)
                scores += group.rewards.tolist()
                found = pair_from_group(group, make_environment, words)
                if isinstance(found, str):
                    lost[found] += 1
                else:
                    pairs.append(found)
            advance(len(some))
    told = ", ".join([f"{len(pairs)} pairs", *(f"{n} {why}" for why, n in lost.items())])
    told = f"of {len(tasks)} tasks with {samples} samples each: {told}"
    told += f", mean score {np.mean(scores):.2f}" if scores else ""
    for reason, count in reasons.most_common(1):
        told += f"; {reasons.total()} samples have no score, {count} of them by {reason}"
    if not pairs:
        advice = "raise num_samples or temperature" if scores else "look at the reward"
        raise NoPairs(f"no preference pair {told}; {advice}")
    print(told)
    return pairs


def pair_from_group(group: Group, make: MakeEnvironment, words: str) -> Preference | str:
    """The pair, or why there is none."""
    if len(group.samples) < 2:
        return "without two scored samples"
    if group.flat:
        return "ties"
    ends = [group.samples[int(at)] for at in (group.rewards.argmax(), group.rewards.argmin())]
    rows = [trajectory_to_datums(trajectory) for trajectory in ends]
    if any(len(found) != 1 for found in rows):
        return "with turns that are not one row of ids"
    (chosen,), (rejected,) = rows
    if np.array_equal(chosen.ids, rejected.ids):  # a reward that is not sure of itself
        return "ties"
    ids = {"tokenizer": words, "chosen": ids_to_row(chosen), "rejected": ids_to_row(rejected)}
    opening, (better, worse) = make().reset(group.task), map(messages_of, ends)
    scores = float(group.rewards.max()), float(group.rewards.min())
    task, about = group.task, {"kind": group.task.kind, "sampled": ids}
    return Preference(opening.messages, better, worse, opening.tools, task.id, *scores, about)


def messages_of(trajectory: types.Trajectory) -> tuple[Message, ...]:
    """What was said, up to the last answer; a broken call as it was written."""
    found: list[Message] = []
    turns = [turn for turn in trajectory.turns if turn.ids]
    for turn in turns:
        text = assistant_text(replace(turn.message, tool_calls=()), trajectory.task_id)
        found += [replace(turn.message, content=text, unparsed=()), *turn.results]
    return tuple(found[: len(found) - len(turns[-1].results)])


def ids_to_row(datum: Datum) -> Json:
    starts = np.flatnonzero(datum.mask & ~np.append(False, datum.mask[:-1]))
    spans = np.stack([starts, turn_ends(datum) + 1], 1)
    return {"ids": datum.ids.tolist(), "turns": spans.tolist()}


def ids_from_row(row: Any, where: str) -> Datum:
    try:
        ids = np.array(row["ids"], np.int32)
        mask = np.zeros(len(ids), bool)
        for start, end in row["turns"]:
            if not 0 < start < end <= len(ids):
                raise ValueError
            mask[start:end] = True
        if not mask.any() or ids.min() < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RowError(where, "metadata.sampled: expected ids and the spans of turns") from None
    return Datum(ids, mask, where)


def vocabulary(tokenizer: Any) -> str:
    """Names what ids mean."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def pair_rows(pairs: Sequence[Preference], renderer: Renderer) -> list[list[Datum]]:
    """Chosen and rejected of each pair; only what the assistant says in the answer carries loss.
    A pair's id says where it stands."""
    own = vocabulary(renderer.tokenizer)
    sampled = [pair.metadata.get("sampled") for pair in pairs]
    kept = [isinstance(ids, dict) and ids.get("tokenizer") == own for ids in sampled]
    others = [pair for pair, keep in zip(pairs, kept, strict=True) if not keep]
    if strange := sum(map(bool, sampled)) - sum(kept):
        print(f"{strange} pairs were sampled with another tokenizer: their messages are rendered")
    both = [(pair, side) for pair in others for side in (pair.chosen, pair.rejected)]
    rendered = renderer.render(Dialog(p.prompt + side, p.tools, p.id) for p, side in both)
    rows = []
    for pair, keep, ids in zip(pairs, kept, sampled, strict=True):
        if keep:
            row = [ids_from_row(ids.get(side), pair.id) for side in SIDES]  # type: ignore[union-attr]
        else:
            row = [answer_only(next(rendered), pair, side) for side in SIDES]
        if np.array_equal(row[0].ids, row[1].ids):
            raise RowError(pair.id, "chosen and rejected are the same")
        rows.append(row)
    return rows


def answer_only(datum: Datum, pair: Preference, side: str) -> Datum:
    """Without what the assistant said in the prompt."""
    before = sum(message.role == "assistant" for message in pair.prompt)
    ends, mask = turn_ends(datum), datum.mask.copy()
    if len(ends) <= before:
        raise RowError(pair.id, f"{side}: expected a turn of the assistant")
    if before:
        mask[: ends[before - 1] + 1] = False
    return replace(datum, mask=mask)


def fitting(rows: Sequence[list[Datum]], limit: int, source: str) -> list[list[Datum]]:
    """Pairs within `limit` tokens; longer ones are named and left out, never cut."""
    kept = [row for row in rows if max(len(side.ids) for side in row) <= limit]
    long = [row for row in rows if max(len(side.ids) for side in row) > limit]
    for row in long[:NAMED]:
        lengths = " and ".join(str(len(side.ids)) for side in row)
        print(f"{row[0].id}: {lengths} tokens, over max_length ({limit}): left out")
    if not kept:
        over = f", {len(long)} over max_length {limit}" if long else ""
        raise SharpenError(f"{source}: no pair to train on (of {len(rows)}{over})")
    if len(long) > NAMED:
        print(f"{source}: {len(long)} of {len(rows)} pairs left out, over max_length ({limit})")
    return kept


def with_strangers(rows: Sequence[list[Datum]], source: str) -> list[list[Datum]]:
    """Each pair with the answers of the pair before it behind its own prompt, for KTO."""
    if len(rows) < 2:
        raise SharpenError(f"{source}: kto compares each pair with another; there is only one")
    pairs = zip(rows, [rows[-1], *rows[:-1]], strict=True)
    return [[*row, *(behind(row[0], answer) for answer in before)] for row, before in pairs]


def behind(datum: Datum, other: Datum) -> Datum:
    here, there = int(datum.mask.argmax()), int(other.mask.argmax())
    ids = np.concatenate([datum.ids[:here], other.ids[there:]])
    return Datum(ids, np.concatenate([datum.mask[:here], other.mask[there:]]), datum.id)
