"""Continuous batching on one device: prompts of ids in, sampled ids with log-probabilities out.

A prompt that begins with what its key's row of the cache already holds (the next turn of a dialog)
computes only what is new; equal prompts (a group of samples) are computed once and copied. Which
token is drawn depends on the request's seed and the token's place, not on its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

from sharpen.policy.slots import STRIDE, New, Slots
from sharpen.types import Sampled, Sampling, SharpenError, StopReason


@dataclass(slots=True)
class Request:
    """A prompt to be answered, and what has been sampled for it so far."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    matcher: Any = None  # of a grammar: what may come next
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The most tokens that prompt and answer can take together."""
        return len(self.prompt) + self.sampling.max_tokens


class Engine:
    """`submit` any number of prompts, then `advance` until all are answered; `rows` of them are
    under way at once."""

    def __init__(self, model: Any, tokenizer: Any, stop_ids: frozenset[int], rows: int = 0):
        self.slots = Slots(model)
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.wanted_rows = rows or (256 if self.slots.kernel else 32)
        self.most_rows = self.wanted_rows  # as far as memory goes
        self.waiting: deque[Request] = deque()
        self.refused: list[tuple[Any, Sampled]] = []
        self.live: dict[int, Request] = {}  # by row
        self.held: list[tuple[int, ...]] = []  # ids whose keys and values a row holds
        self.asked: list[tuple[int, ...]] = []  # which of them were a prompt
        self.row_of: dict[Hashable, int] = {}  # the row that a request's key had last
        self.version = -1
        self.computed = 0  # prompt tokens that were not found in the cache

    def submit(
        self, key: Hashable, prompt: Sequence[int], sampling: Sampling, matcher: Any = None
    ) -> None:
        """Queue a prompt; one that cannot fit the context is answered with the reason."""
        request = Request(key, tuple(prompt), sampling, matcher)
        if not request.prompt:
            raise SharpenError("an empty prompt")
        if request.length > self.slots.context:
            limit = self.slots.context
            why = f"{len(prompt)} tokens and {sampling.max_tokens} for the answer: over {limit}"
            self.refused.append((key, Sampled((), (), StopReason.CONTEXT, why)))
            return
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.live or self.refused)

    def forget(self) -> None:
        """What rows hold is not used again, so that what comes does not depend on what was."""
        self.most_rows = self.wanted_rows
        self.row_of = {}
        self.held = [()] * len(self.held)
        self.asked = [()] * len(self.held)

    @torch.no_grad()
    def advance(self) -> list[tuple[Any, Sampled]]:
        """Sample on until something is answered; nothing is when nothing is under way."""
        done = self.refused
        self.refused = []
        if self.slots.model.training:  # asking costs less than going through all modules
            self.slots.model.eval()
        while not done and (self.waiting or self.live):
            # on a GPU taking in one prompt costs as much as many, and as many steps of all rows:
            # that is worth a wait
            share = 2 if self.slots.kernel else len(self.live)
            if len(self.waiting) * share >= len(self.live):
                self.make_room()
                self.admit()
            self.close_ranks()
            done = self.harvest(*self.decode())
        return done

    def make_room(self) -> None:
        """The cache as large as the requests need; what it holds is void once weights changed."""
        slots = self.slots
        version = self.slots.version()
        if version != self.version:
            if self.live:
                raise SharpenError("the weights changed while answers were under way")
            self.version = version
            self.forget()
        places = max((r.length for r in self.waiting), default=0) + STRIDE + 1
        rows = min(len(self.waiting) + len(self.live), self.most_rows)
        if places <= slots.places and rows <= slots.rows:
            return
        rows = max(rows, slots.rows)
        possible = slots.fitting(rows, places)[0]
        if self.live and possible < len(self.live):
            return  # not beside what is under way: when that is done
        if places <= slots.places and possible < min(rows, 2 * slots.rows):
            self.most_rows = slots.rows  # a few rows more are not worth another cache
            return
        self.close_ranks(int)  # the first rows are kept
        slots.resize(rows, places, kept=len(self.live))
        if slots.rows < rows:
            self.most_rows = slots.rows  # all that memory has room for
        self.held = (self.held[: len(self.live)] + [()] * slots.rows)[: slots.rows]
        self.asked = (self.asked[: len(self.live)] + [()] * slots.rows)[: slots.rows]
        self.row_of = {k: row for k, row in self.row_of.items() if row < len(self.live)}

    def admit(self) -> None:
        """Rows for waiting requests. The best is the one that holds the beginning of the prompt;
        a row of another key, which may come back, is taken last. Any row may copy the whole prompt
        from one in use."""
        holders = {asked: row for row, asked in enumerate(self.asked)}
        own = {r.key: row for r in self.waiting if (row := self.own_row(r)) is not None}
        taken = {*self.live, *own.values()}
        keyed = set(self.row_of.values())
        free = [row for row in range(len(self.held)) if row not in taken]
        free = dict.fromkeys(sorted(free, key=lambda row: row in keyed))
        work = list[New]()
        left = deque[Request]()
        early = list[tuple[int, int]]()
        late = list[tuple[int, int]]()
        made = set[int]()
        for request in self.waiting:
            before = request.prompt[:-1]  # the last token is the first step's input
            source = holders.get(before)
            if source is not None and self.asked[source] != before:
                source = None  # overwritten since
            last = self.row_of.get(request.key)
            if request.length + STRIDE >= self.slots.places:  # waits for a larger cache
                left.append(request)
                continue
            if request.key in own:
                row = own[request.key]
            elif source in free and source not in keyed:
                row = source
            elif last in free:
                row = last
            elif free:
                row = next(iter(free))
            else:
                left.append(request)
                continue
            free.pop(row, None)
            reused = request.key in own or row == source
            start = min(len(self.held[row]), len(before)) if reused else 0
            if source is not None and start < len(before):
                (late if source in made else early).append((source, row))
            elif start < len(before):
                work.append((row, start, before))
                made.add(row)
                holders[before] = row
            if row in keyed and row != last:  # whose it was loses it
                self.row_of = {key: at for key, at in self.row_of.items() if at != row}
            self.held[row] = self.asked[row] = before
            self.live[row] = request
            self.row_of[request.key] = row
        self.waiting = left
        self.computed += sum(len(ids) - start for _, start, ids in work)
        self.copy(early)  # before it is overwritten
        self.slots.prefill(work)
        self.copy(late)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Prompts from row to row, in order: a row may be a source first and a target later."""
        for source, group in groupby(pairs, key=lambda pair: pair[0]):
            targets = [target for _, target in group]
            self.slots.copy(source, targets, len(self.asked[targets[0]]))

    def own_row(self, request: Request) -> int | None:
        """The row of its key, if one of the two, what it holds and what is asked, begins with the
        other."""
        row = self.row_of.get(request.key)
        if row is None or row in self.live:
            return None
        held = self.held[row]
        before = request.prompt[:-1]
        return row if held[: len(before)] == before[: len(held)] else None

    def close_ranks(self, size: Callable[[int], int] | None = None) -> None:
        """Live rows side by side from the first, where that makes a step smaller; an idle row and a
        live one change places."""
        size = size or self.slots.size
        moved = dict[int, int]()
        while self.live and size(len(self.live)) < size(max(self.live) + 1):
            last = max(self.live)
            hole = next(row for row in range(last) if row not in self.live)
            request = self.live.pop(last)
            self.slots.swap(
                last, hole, len(request.prompt) + len(request.ids), len(self.held[hole])
            )
            moved |= {last: hole, hole: last}  # each row at most once
            self.live[hole] = request
            for kept in (self.held, self.asked):
                kept[hole], kept[last] = kept[last], kept[hole]
        if moved:
            self.row_of = {key: moved.get(row, row) for key, row in self.row_of.items()}

    def decode(self) -> Any:
        """The next step or steps of all live rows."""
        size = self.slots.size(max(self.live) + 1)
        state = np.zeros((4, size), np.int64)
        state[1] = self.slots.places - STRIDE  # an idle row writes where nobody reads
        state[2] = 1
        chances = np.zeros((2, size), np.float32)
        chances[1] = 1
        looking = False
        rows = []
        for row, request in self.live.items():
            length = len(request.prompt) + len(request.ids)
            sampling = request.sampling
            token = request.ids[-1] if request.ids else request.prompt[-1]
            state[:, row] = token, length - 1, length, sampling.seed % (1 << 62)
            chances[:, row] = sampling.temperature, sampling.top_p
            rows += [(row, request.matcher)] if request.matcher else []
            looking = looking or bool(sampling.stop)
        allowed = self.allowed(size, rows) if rows or looking else None
        return self.slots.decode(state, chances, allowed)

    def allowed(self, size: int, matched: list[tuple[int, Any]]) -> torch.Tensor:
        """Which tokens may come next; rows without a grammar are free."""
        vocabulary = self.slots.head.weight.shape[0]
        mask = torch.ones(size, vocabulary, dtype=torch.bool)
        for row, matcher in matched:
            found = torch.as_tensor(matcher.mask(), dtype=torch.bool)
            mask[row] = False
            mask[row, : len(found)] = found
        return mask.to(self.slots.device)

    def harvest(self, tokens: Any, logprobs: Any) -> list[tuple[Any, Sampled]]:
        """Hand out what was sampled; who is done leaves its row, and what that holds stays."""
        ends = np.isin(tokens, list(self.stop_ids))
        first = np.where(ends.any(0), ends.argmax(0), len(tokens)).tolist()  # that ends an answer
        done = []
        columns = (tokens.T.tolist(), logprobs.T.tolist())
        for row, request in list(self.live.items()):
            room = request.sampling.max_tokens - len(request.ids)
            taken = min(first[row] + 1, room, len(tokens))
            stop = None
            request.ids += columns[0][row][:taken]
            request.logprobs += columns[1][row][:taken]
            if first[row] < taken or taken == room or request.matcher or request.sampling.stop:
                stop = self.stopped(request, request.ids[-1])
            if stop is not None:
                del self.live[row]
                # the last sampled token was never an input
                self.held[row] = (*request.prompt, *request.ids[:-1])
                sampled = Sampled(tuple(request.ids), tuple(request.logprobs), stop)
                done.append((request.key, sampled))
        return done

    def stopped(self, request: Request, token: int) -> StopReason | None:
        """Why the answer ends with this token; None if it goes on."""
        if request.matcher:
            request.matcher.accept(token)
        if token in self.stop_ids:
            return StopReason.ANSWERED
        if request.sampling.stop:
            text = self.tokenizer.decode(request.ids, skip_special_tokens=False)
            if any(word in text for word in request.sampling.stop):
                return StopReason.ANSWERED
        return StopReason.TOKENS if len(request.ids) >= request.sampling.max_tokens else None
