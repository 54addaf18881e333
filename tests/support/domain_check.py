"""Check domain files: `python tests/support/domain_check.py FILE…` prints every problem at once, and one
executed call per tool. A file without problems is fit for the data builder."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema_rs
from pydantic import BaseModel

from sharpen.types import Json, SharpenError, ToolCall
from sharpen.world.domain import Domain, DomainError, Tool, load_domain
from sharpen.world.episode import Episode, Faults, Sampler, World, outcome_of
from sharpen.world.expressions import Expression
from sharpen.world.fields import FAMILIES, Family, value_schema
from sharpen.world.phrases import SLOT, fill, slots
from sharpen.world.reading import Figure
from sharpen.world.state import seeded

TOOLS, SHARED, OPS, SEEDS = 24, 8, 10, 12
KEYWORD_LIMIT = 0.6
KNOWN = {"today", "now", "True", "False", "None", "converted"}
COMMON = frozenset(
    """a an and any are as at be but by can could do for from get give had has have how i i'd i'm
    if in is it its just let like me my need of off on one or our out please so some that the their
    them then there they this to up us want was we what when where which who will with would you
    your all about into no not only over more much many make tell show""".split()  # noqa: SIM905
)


def words(text: str) -> set[str]:
    """Content words without slots, roughly stemmed."""
    found = re.findall(r"[a-z']+", SLOT.sub(" ", text).lower().replace("_", " "))
    return {re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", w) for w in found if w not in COMMON}


def check_texts(domain: Domain) -> Iterator[str]:
    """Shape of the whole file, and the quality of its words."""
    tools = list(domain.tools.values())
    if len(tools) != TOOLS:
        yield f"has {len(tools)} tools, {TOOLS} are needed"
    for op, count in Counter(t.operation.op for t in tools).items():
        if count > SHARED:
            yield f"{count} tools share op {op}, at most {SHARED} may"
    if len({t.operation.op for t in tools}) < OPS:
        yield f"at least {OPS} different ops are needed"
    for first, second in combinations(tools, 2):
        if first.operation.about == second.operation.about:
            yield f"tools.{second.name}.about: the same as that of {first.name}"
    for entity in domain.entities.entities.values():
        for name, field in entity.fields.items():
            if not 4 <= len(field.about) <= 70 or field.about.endswith("."):
                yield f"entities.{entity.name}.{name}.about: a noun phrase of 4 to 70 characters"
    for tool in tools:
        yield from (f"tools.{tool.name}.{text}" for text in check_tool_texts(tool))


def check_tool_texts(tool: Tool) -> Iterator[str]:
    said, required = tool.operation, set(tool.required)
    if not re.fullmatch(r"[a-z]+(_[a-z]+)+", tool.name) or len(tool.name) > 40:
        yield "name: expected words_with_underscores, without digits"
    if not 40 <= len(said.about) <= 140 or not said.about[0].isupper() or said.about[-1] != ".":
        yield "about: one sentence of 40 to 140 characters, with a capital and a full stop"
    if not 4 <= len(said.ask) <= 8:
        yield f"ask: 4 to 8 phrasings are needed, found {len(said.ask)}"
    phrases = [("goal", said.goal), *((f"ask.{i}", text) for i, text in enumerate(said.ask))]
    for place, text in [*phrases, ("vague", said.vague)]:
        unknown = [s for s in slots(text) if s not in tool.params]
        if unknown:
            yield f"{place}: {{{unknown[0]}}} is not a parameter ({', '.join(tool.params)})"
    for place, text in phrases:
        missing = sorted(required - set(slots(text)))
        if missing:
            yield f"{place}: has no {{{missing[0]}}}, which is required"
        if not 12 <= len(text) <= 220:
            yield f"{place}: expected 12 to 220 characters"
    if required and (not said.vague or required <= set(slots(said.vague))):
        yield "vague: a request that leaves out at least one required parameter"
    if said.goal[:1].isupper() or said.goal.endswith("."):
        yield "goal: starts with a lower-case verb and has no full stop, to be joined with others"
    if not said.say:
        yield "say: at least one answer"
    for (i, one), (j, two) in combinations(enumerate(map(words, said.ask)), 2):
        if one and two and len(one & two) / len(one | two) > 0.5:
            yield f"ask.{j}: says nearly the same words as ask.{i}"
    own = words(tool.name)
    if sum(not own & words(text) for text in said.ask) < min(2, len(said.ask)):
        yield f"ask: at least two phrasings must do without {', '.join(sorted(own))}"


def expressions(value: Any, path: str = "") -> Iterator[tuple[str, Expression]]:
    """Every expression among a template's settings, with its place."""
    if isinstance(value, Expression):
        yield path, value
    elif isinstance(value, Figure):
        yield path, value.value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from expressions(getattr(value, name), f"{path}.{name.rstrip('_')}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from expressions(key, path)
            yield from expressions(inner, f"{path}.{key}" if isinstance(key, str) else path)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from expressions(inner, path)


def check_names(domain: Domain, tool: Tool) -> Iterator[str]:
    """Names in expressions that nothing will answer to."""
    entities, said = domain.entities.entities, tool.operation
    near = [said.entity, *(getattr(said, n, "") for n in ("into", "of"))]
    near += [new.entity for new in getattr(said, "also", [])]
    names = KNOWN | set(tool.params) | set(said.returns) | set(getattr(said, "figures", ()))
    names |= {n for e in near if e in entities for n in entities[e].fields}
    rows = {p.removesuffix("_id"): e for p, e in tool.takes.items()} | {e: e for e in entities}
    for place, expression in expressions(said):
        for name in sorted(expression.names - names):
            yield f"tools.{tool.name}{place}: {expression.source!r} has no {name!r} to read"
        for owner, field in sorted(expression.attributes):
            if owner not in rows or field not in entities[rows[owner]].fields:
                yield f"tools.{tool.name}{place}: there is no {owner}.{field}"


def check_runs(domain: Domain, tool: Tool) -> Iterator[str]:
    """Executes the tool for every phrasing in every family, and looks at what comes of it."""
    outputs = jsonschema_rs.validator_for(tool.outputs())
    for family in FAMILIES:
        first = [s for s in slots(tool.operation.ask[0]) if s in tool.params]
        states = sum(attempt(domain, tool, family, s, first) is not None for s in range(SEEDS))
        if states < SEEDS / 2:
            why = common_failure(domain, tool, family)
            yield f"succeeds from {states} of {SEEDS} {family} states only, mostly {why}"
            continue
        for number, text in enumerate(tool.operation.ask):
            using = [s for s in slots(text) if s in tool.params]
            tries = (attempt(domain, tool, family, seed, using) for seed in range(SEEDS))
            found = next((t for t in tries if t is not None), None)
            if found is None:
                yield f"ask.{number}: no call with {', '.join(using)} succeeds ({family})"
                continue
            episode, call, result = found
            for error in outputs.iter_errors(result):
                yield f"answer is not of its shape: {error.message}"
            yield from check_rows(domain, episode)
            for place, phrase in [("ask", text), *(("say", t) for t in tool.operation.say)]:
                try:
                    fill(phrase, result, call.arguments)
                except SharpenError as error:
                    yield f"{place}: {error}; the answer has {', '.join(result)}"


def attempt(
    domain: Domain, tool: Tool, family: Family, seed: int, using: Iterable[str]
) -> tuple[Episode, ToolCall, Json] | None:
    episode = Episode([domain], seed, family, Faults())
    call = episode.sample(tool, seeded(tool.name, seed), using)
    return None if call is None else (episode, call, episode.call(call))


def common_failure(domain: Domain, tool: Tool, family: Family) -> str:
    seen: Counter[str] = Counter()
    for seed in range(40):
        episode = Episode([domain], seed, family, Faults())
        names = {*tool.required, *slots(tool.operation.ask[0])}
        arguments = Sampler(episode, tool, seeded(seed)).arguments(names)
        result = episode.call(ToolCall(tool.name, arguments))
        seen[f"{outcome_of(result)} ({result.get('message', 'nothing found')})"] += 1
    return seen.most_common(1)[0][0]


def check_rows(domain: Domain, episode: Episode) -> Iterator[str]:
    """Rows that were written must look as their entity says."""
    for table, edits in episode.snapshot().items():
        entity = domain.entities[table.split(".")[1]]
        for row in (r for r in edits.values() if r is not None):
            for name, value in row.items():
                field = entity.fields[name]
                schema = value_schema(field.model_copy(update={"bounds": None}))
                if value is None and field.none:
                    continue
                if not jsonschema_rs.is_valid(schema, value):
                    yield f"writes {value!r} to {entity.name}.{name}, a {field.kind}"


def keyword_rate(domain: Domain) -> float:
    """How often plain word overlap finds the right tool among eight of the category."""
    tools, right, asked = list(domain.tools.values()), 0, 0
    about = {t.name: words(f"{t.name} {t.operation.about}") for t in tools}
    spread = Counter(w for found in about.values() for w in found)
    for index, tool in enumerate(tools):
        others = [tools[(index + 3 * k) % len(tools)] for k in range(1, 8)]
        for text in tool.operation.ask:
            said = words(text)
            scores = {t.name: sum(1 / spread[w] for w in said & about[t.name]) for t in others}
            mine = sum(1 / spread[w] for w in said & about[tool.name])
            right += mine > max(scores.values(), default=0)
            asked += 1
    return right / max(asked, 1)


def check_domain(path: str | Path) -> list[str]:
    """Every problem of a domain file; none means that it is fit for use."""
    path = Path(path)
    try:
        domain = load_domain(path)
    except DomainError as error:
        return error.problems
    except SharpenError as error:
        return [str(error)]
    problems = [*check_texts(domain)]
    if path.stem != domain.category.replace("/", "_"):
        problems.append(
            f"the file of {domain.category} is named {domain.category.replace('/', '_')}.yaml"
        )
    for tool in domain.tools.values():
        unnamed = list(check_names(domain, tool))
        problems += unnamed
        try:
            found = [] if unnamed else list(check_runs(domain, tool))
        except Exception as error:  # whatever a file provokes is a problem of that file
            found = [f"{type(error).__name__}: {error}"]
        problems += dict.fromkeys(f"tools.{tool.name}.{text}" for text in found)
    rate = keyword_rate(domain)
    if rate > KEYWORD_LIMIT:
        problems.append(
            f"plain word overlap finds {rate:.0%} of the asks, at most 60% may be so easy"
        )
    return [f"{path.name}: {text}" for text in problems]


def clashes(paths: Iterable[Path]) -> list[str]:
    """Tool names and descriptions that stand in two files, shipped ones included."""
    files = {p.name: p for p in [*World().files.values(), *paths]}
    seen: dict[str, str] = {}
    found = []
    for path in files.values():
        try:
            tools = load_domain(path).tools.values()
        except SharpenError:
            continue  # said where that file is checked
        for text, name in [
            (t, tool.name) for tool in tools for t in (tool.name, tool.operation.about)
        ]:
            if text in seen:
                found.append(f"{path.name}: tools.{name}: {text!r} stands in {seen[text]} too")
            seen[text] = path.name
    return found


def show(path: Path) -> None:
    """One executed call per tool."""
    domain = load_domain(path)
    for tool in domain.tools.values():
        text = tool.operation.ask[0]
        using = [s for s in slots(text) if s in tool.params]
        tries = (attempt(domain, tool, "train", seed, using) for seed in range(SEEDS))
        found = next((t for t in tries if t is not None), None)
        print(f"\n{tool.name} ({tool.operation.op}): {tool.operation.about}")
        if found:
            _, call, result = found
            print(f"  user    {fill(text, call.arguments)}")
            print(f"  call    {json.dumps(call.arguments, ensure_ascii=False)}")
            print(f"  result  {json.dumps(result, ensure_ascii=False)[:300]}")
            print(f"  answer  {fill(tool.operation.say[0], result, call.arguments)}")


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python tests/support/domain_check.py FILE…", file=sys.stderr)
        return 2
    problems = 0
    paths = [Path(a) for a in arguments]
    for path in paths:
        found = check_domain(path)
        problems += len(found)
        if found:
            print("\n".join(found))
        else:
            show(path)
            rate = keyword_rate(load_domain(path))
            print(f"\n{path.name}: no problems; word overlap finds {rate:.0%} of the asks")
    twice = clashes(paths)
    print("\n".join(twice)) if twice else None
    return 1 if problems or twice else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
