"""Draw single rows: a training dialog or a benchmark task of one kind.

`build.py` hands out `RowJob`s, to worker processes or in its own. A row depends on its part, kind,
split, seed and number alone, so it does not matter who draws it and when.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

# imported so that the scenarios in them are registered
from sharpen.data.generate import dialog_scenarios, task_scenarios  # noqa: F401
from sharpen.data.generate.dialog_draft import NO_MISTAKE, DialogDraft, DrawFailed
from sharpen.data.generate.follow_ups import continue_dialog
from sharpen.data.generate.scenarios import find_scenario
from sharpen.data.generate.sets import RowKind, parts
from sharpen.data.generate.tool_pool import ToolPool
from sharpen.data.generate.verify import run_gold, verify_gold
from sharpen.types import Dialog, Json, Task, ToolSpec
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, Faults, World, shipped_world
from sharpen.world.fields import Family
from sharpen.world.state import seeded_rng

_DIFFICULTIES = ("easy", "medium", "hard")  # by level

Row = Dialog | Task


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """One file to build, and how many rows of each kind of its part it takes."""

    path: str
    split: Family
    quotas: dict[str, int]
    part: str
    extended: bool = False  # fresh tasks beside those of the split


@dataclass(frozen=True, slots=True)
class RowJob:
    """Rows of one kind to be drawn for a file, by their numbers."""

    file: BuiltFile
    kind: str
    seed: int
    numbers: range


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """Everything about a row that is decided before its scenario runs."""

    part: str
    kind_name: str
    kind: RowKind
    tool: Tool  # what the user asks for
    phrasing: str
    level: int
    episode_seed: int
    mistake_at: int
    faults: dict[int, str] = field(default_factory=dict)  # number of a call → its fault


def draw_rows(job: RowJob, world: World | None = None) -> list[Row | None]:
    """Draw the rows of a job, None for draws that fail, and verify every gold answer."""
    file = job.file
    world = world or shipped_world()
    pool = _tool_pool(world, file.split, job.seed)
    row_seed = f"{job.seed}:extended" if file.extended else job.seed
    rows = []
    for number in job.numbers:
        row = _draw_row(pool, file.part, job.kind, row_seed, number)
        if isinstance(row, Task):
            verify_gold(world, row.gold, f"{file.path}: {job.kind} ({row.instruction!r})")
        rows.append(row)
    return rows


@cache
def _tool_pool(world: World, split: Family, seed: int) -> ToolPool:
    """The pool of a split, made once per process."""
    return ToolPool(world, split, seed)


def _draw_row(
    pool: ToolPool, part: str, kind_name: str, seed: int | str, number: int
) -> Row | None:
    """Draw the row of this kind and number, or None if its scenario leads nowhere."""
    rng = seeded_rng(part, seed, pool.split, kind_name, number)
    plan = _plan_row(pool, part, kind_name, number, rng)
    draft = _start_draft(pool, plan, rng)
    try:
        find_scenario(plan.kind.scenario)(draft)
        if plan.kind.is_dialog:
            continue_dialog(draft)
    except DrawFailed:
        return None
    offered_tools = _offer_tools(plan, draft)
    if plan.kind.is_dialog:
        return _finish_dialog(plan, draft, offered_tools)
    return _finish_task(plan, draft, offered_tools)


def _plan_row(
    pool: ToolPool, part: str, kind_name: str, number: int, rng: random.Random
) -> _RowPlan:
    """Decide which request the row is about, at which level, and what goes wrong."""
    kind = parts()[part].kinds[kind_name]
    # every kind starts at another request; tasks also differ by part
    start = (
        seeded_rng("start", kind_name) if kind.is_dialog else seeded_rng("start", part, kind_name)
    )
    request_number = start.randrange(1 << 20) + number
    tool, phrasing = pool.pick_request(request_number, kind.must_write)
    faults = {}
    if kind.fault_at:
        call_number = rng.choice(kind.fault_at)
        faults[call_number] = rng.choice(list(FAULTS))
    episode_seed = rng.randrange(1 << 30)
    mistake_at = rng.choice(kind.mistake_at) if kind.mistake_at else NO_MISTAKE
    return _RowPlan(
        part=part,
        kind_name=kind_name,
        kind=kind,
        tool=tool,
        phrasing=phrasing,
        level=number % len(kind.tools_offered),
        episode_seed=episode_seed,
        mistake_at=mistake_at,
        faults=faults,
    )


def _start_draft(pool: ToolPool, plan: _RowPlan, rng: random.Random) -> DialogDraft:
    """Returns the empty draft of a row, in a fresh episode."""
    episode = pool.world.episode(
        [plan.tool.category], plan.episode_seed, pool.split, Faults(at=plan.faults)
    )
    return DialogDraft(
        pool, episode, rng, plan.kind, plan.tool, plan.phrasing, plan.level, plan.mistake_at
    )


def _offer_tools(plan: _RowPlan, draft: DialogDraft) -> list[Tool]:
    """Draw the tools on offer: those that the row needs, and distractors."""
    kind = plan.kind
    needed = list(draft.used_tools.values())
    if not needed and not draft.withheld_tools:
        needed = [plan.tool]
    count = kind.tools_offered[plan.level]
    if not isinstance(count, int):
        least, most = count
        count = draft.rng.randint(least, most)
    count = max(count, len(needed) + 1)  # at least one distractor
    return draft.pool.draw_candidates(
        needed, count, draft.rng, draft.withheld_tools, kind.same_category[plan.level]
    )


def _specs(tools: list[Tool]) -> tuple[ToolSpec, ...]:
    """Returns what a model is shown of the tools."""
    return tuple(tool.spec for tool in tools)


def _finish_dialog(plan: _RowPlan, draft: DialogDraft, offered_tools: list[Tool]) -> Dialog:
    """Returns the draft as a dialog whose metadata is enough to replay it."""
    target_tools: list[str] = []
    for message in draft.messages:
        for call in message.tool_calls:
            if message.trained and call.name not in target_tools:
                target_tools.append(call.name)
    faults = {str(call_number): fault for call_number, fault in plan.faults.items()}
    metadata: Json = {
        "kind": plan.kind_name,
        "category": plan.tool.category,
        "target_tools": target_tools,
        "seed": plan.episode_seed,
        "faults": {"at": faults},
    }
    return Dialog(
        tuple(draft.messages),
        _specs(offered_tools),
        task_type=plan.kind.task_type,
        metadata=metadata,
    )


def _finish_task(plan: _RowPlan, draft: DialogDraft, offered_tools: list[Tool]) -> Task | None:
    """Returns the draft as a task, or None if doing nothing would solve it."""
    *context, instruction = draft.messages
    episode_settings: Json = {
        "categories": sorted({tool.category for tool in offered_tools}),
        "seed": plan.episode_seed,
        "family": draft.pool.split,
    }
    gold = dict(draft.gold)
    if "calls" in gold:
        end, _ = run_gold(draft.pool.world, gold | episode_settings, instruction.content)
        if plan.kind.must_write and not end.changes():
            return None
        gold["state"] = end.digest()
    return Task(
        id="",
        instruction=instruction.content,
        tools=_specs(offered_tools),
        gold=gold | episode_settings,
        kind=plan.part,
        difficulty=_DIFFICULTIES[plan.level],
        context=tuple(context),
        metadata={"category": plan.tool.category, "variant": plan.kind_name},
    )
