"""Check domain files: `python tests/support/domain_check.py FILE…`.

Prints every problem at once, or one executed call per tool. A file without problems is fit for the
data builder; docs/world.md explains the rules.
"""

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
from sharpen.world.episode import Episode, Faults, World, outcome_of
from sharpen.world.expressions import Expression
from sharpen.world.fields import FAMILIES, Family, value_schema
from sharpen.world.phrases import SLOT, fill, slots
from sharpen.world.reading import Figure
from sharpen.world.sampling import Sampler
from sharpen.world.state import seeded_rng

TOOLS = 24  # per file
MAX_TOOLS_PER_OP = 8
MIN_OPS = 10
SEEDS = 12  # states in which a phrasing is tried
FAILURE_SEEDS = 40
MAX_KEYWORD_RATE = 0.6
MAX_OVERLAP = 0.5  # of the words of two phrasings
KNOWN_NAMES = {"today", "now", "True", "False", "None", "converted"}
COMMON_WORDS = frozenset(
    """a an and any are as at be but by can could do for from get give had has have how i i'd i'm
    if in is it its just let like me my need of off on one or our out please so some that the their
    them then there they this to up us want was we what when where which who will with would you
    your all about into no not only over more much many make tell show""".split()  # noqa: SIM905
)

Attempt = tuple[Episode, ToolCall, Json]  # a call that succeeded, and its answer


# Words --------------------------------------------------------------------------------------------


def content_words(text: str) -> set[str]:
    """Returns the words of a text without slots and common words, roughly stemmed."""
    plain_text = SLOT.sub(" ", text).lower().replace("_", " ")
    stems = set()
    for word in re.findall(r"[a-z']+", plain_text):
        if word not in COMMON_WORDS:
            stems.add(re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word))
    return stems


def check_texts(domain: Domain) -> Iterator[str]:
    """Check the shape of the whole file, and the quality of its words."""
    tools = list(domain.tools.values())
    if len(tools) != TOOLS:
        yield f"has {len(tools)} tools, {TOOLS} are needed"
    op_counts = Counter(tool.operation.op for tool in tools)
    for op, count in op_counts.items():
        if count > MAX_TOOLS_PER_OP:
            yield f"{count} tools share op {op}, at most {MAX_TOOLS_PER_OP} may"
    if len(op_counts) < MIN_OPS:
        yield f"at least {MIN_OPS} different ops are needed"
    for first, second in combinations(tools, 2):
        if first.operation.about == second.operation.about:
            yield f"tools.{second.name}.about: the same as that of {first.name}"
    for entity in domain.entities.entities.values():
        for name, field in entity.fields.items():
            if not 4 <= len(field.about) <= 70 or field.about.endswith("."):
                yield f"entities.{entity.name}.{name}.about: a noun phrase of 4 to 70 characters"
    for tool in tools:
        for problem in check_tool_texts(tool):
            yield f"tools.{tool.name}.{problem}"


def check_tool_texts(tool: Tool) -> Iterator[str]:
    """Check the name and the texts of one tool."""
    operation = tool.operation
    required = set(tool.required)
    about = operation.about
    if not re.fullmatch(r"[a-z]+(_[a-z]+)+", tool.name) or len(tool.name) > 40:
        yield "name: expected words_with_underscores, without digits"
    if not 40 <= len(about) <= 140 or not about[0].isupper() or about[-1] != ".":
        yield "about: one sentence of 40 to 140 characters, with a capital and a full stop"
    if not 4 <= len(operation.ask) <= 8:
        yield f"ask: 4 to 8 phrasings are needed, found {len(operation.ask)}"
    yield from check_slots(tool)
    if required and (not operation.vague or required <= set(slots(operation.vague))):
        yield "vague: a request that leaves out at least one required parameter"
    if operation.goal[:1].isupper() or operation.goal.endswith("."):
        yield "goal: starts with a lower-case verb and has no full stop, to be joined with others"
    if not operation.say:
        yield "say: at least one answer"
    yield from check_variety(tool)


def check_slots(tool: Tool) -> Iterator[str]:
    """Check that phrases name parameters only, and all that are required."""
    operation = tool.operation
    phrases = [("goal", operation.goal)]
    phrases += [(f"ask.{i}", text) for i, text in enumerate(operation.ask)]
    for place, text in [*phrases, ("vague", operation.vague)]:
        unknown = [slot for slot in slots(text) if slot not in tool.params]
        if unknown:
            yield f"{place}: {{{unknown[0]}}} is not a parameter ({', '.join(tool.params)})"
    for place, text in phrases:
        missing = sorted(set(tool.required) - set(slots(text)))
        if missing:
            yield f"{place}: has no {{{missing[0]}}}, which is required"
        if not 12 <= len(text) <= 220:
            yield f"{place}: expected 12 to 220 characters"


def check_variety(tool: Tool) -> Iterator[str]:
    """Check that phrasings differ from each other and from the tool's name."""
    phrasings = [content_words(text) for text in tool.operation.ask]
    for (i, first), (j, second) in combinations(enumerate(phrasings), 2):
        if first and second and len(first & second) / len(first | second) > MAX_OVERLAP:
            yield f"ask.{j}: says nearly the same words as ask.{i}"
    name_words = content_words(tool.name)
    independent = [words for words in phrasings if not name_words & words]
    if len(independent) < min(2, len(phrasings)):
        yield f"ask: at least two phrasings must do without {', '.join(sorted(name_words))}"


def keyword_rate(domain: Domain) -> float:
    """Returns how often plain word overlap finds the right tool among eight of the category."""
    tools = list(domain.tools.values())
    about_words = {t.name: content_words(f"{t.name} {t.operation.about}") for t in tools}
    tools_with_word: Counter[str] = Counter()
    for words in about_words.values():
        tools_with_word.update(words)

    def overlap(words: set[str], tool: Tool) -> float:
        return sum(1 / tools_with_word[word] for word in words & about_words[tool.name])

    right = 0
    total = 0
    for index, tool in enumerate(tools):
        others = [tools[(index + 3 * k) % len(tools)] for k in range(1, 8)]
        for text in tool.operation.ask:
            words = content_words(text)
            best_other = max((overlap(words, other) for other in others), default=0)
            total += 1
            if overlap(words, tool) > best_other:
                right += 1
    return right / max(total, 1)


# Expressions --------------------------------------------------------------------------------------


def find_expressions(value: Any, path: str = "") -> Iterator[tuple[str, Expression]]:
    """Yields every expression among a tool's settings, with its place."""
    if isinstance(value, Expression):
        yield path, value
    elif isinstance(value, Figure):
        yield path, value.value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from find_expressions(getattr(value, name), f"{path}.{name.rstrip('_')}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from find_expressions(key, path)
            yield from find_expressions(inner, f"{path}.{key}" if isinstance(key, str) else path)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from find_expressions(inner, path)


def known_names(domain: Domain, tool: Tool) -> set[str]:
    """Returns the names that the tool's expressions can read."""
    operation = tool.operation
    names = KNOWN_NAMES | set(tool.params) | set(operation.returns)
    names |= set(getattr(operation, "figures", ()))
    near_entities = [operation.entity, getattr(operation, "into", ""), getattr(operation, "of", "")]
    near_entities += [new_row.entity for new_row in getattr(operation, "also", [])]
    for entity in near_entities:
        if entity in domain.entities.entities:
            names |= set(domain.entities.entities[entity].fields)
    return names


def check_names(domain: Domain, tool: Tool) -> Iterator[str]:
    """Check that every name in an expression can be read."""
    entities = domain.entities.entities
    names = known_names(domain, tool)
    row_entities = {param.removesuffix("_id"): entity for param, entity in tool.takes.items()}
    row_entities |= {entity: entity for entity in entities}
    for place, expression in find_expressions(tool.operation):
        for name in sorted(expression.names - names):
            yield f"tools.{tool.name}{place}: {expression.source!r} has no {name!r} to read"
        for owner, field in sorted(expression.attributes):
            if owner not in row_entities or field not in entities[row_entities[owner]].fields:
                yield f"tools.{tool.name}{place}: there is no {owner}.{field}"


# Executions ---------------------------------------------------------------------------------------


def check_runs(domain: Domain, tool: Tool) -> Iterator[str]:
    """Execute the tool for every phrasing in every family, and check the answers."""
    for family in FAMILIES:
        first_slots = param_slots(tool, tool.operation.ask[0])
        attempts = [attempt(domain, tool, family, seed, first_slots) for seed in range(SEEDS)]
        successes = SEEDS - attempts.count(None)
        if successes < SEEDS / 2:
            why = common_failure(domain, tool, family)
            yield f"succeeds from {successes} of {SEEDS} {family} states only, mostly {why}"
            continue
        for number, text in enumerate(tool.operation.ask):
            using = param_slots(tool, text)
            success = first_success(domain, tool, family, using)
            if success is None:
                yield f"ask.{number}: no call with {', '.join(using)} succeeds ({family})"
            else:
                yield from check_success(domain, tool, text, success)


def check_success(domain: Domain, tool: Tool, phrasing: str, success: Attempt) -> Iterator[str]:
    """Check the answer of one call, the rows it wrote, and the phrases that speak of it."""
    episode, call, result = success
    for error in jsonschema_rs.validator_for(tool.outputs()).iter_errors(result):
        yield f"answer is not of its shape: {error.message}"
    yield from check_rows(domain, episode)
    for place, phrase in [("ask", phrasing), *(("say", text) for text in tool.operation.say)]:
        try:
            fill(phrase, result, call.arguments)
        except SharpenError as error:
            yield f"{place}: {error}; the answer has {', '.join(result)}"


def check_rows(domain: Domain, episode: Episode) -> Iterator[str]:
    """Check that rows which were written look as their entity says."""
    for table, edits in episode.snapshot().items():
        entity = domain.entities[table.split(".")[1]]
        for row in edits.values():
            if row is None:
                continue
            for name, value in row.items():
                field = entity.fields[name]
                if value is None and field.none:
                    continue
                schema = value_schema(field.model_copy(update={"bounds": None}))
                if not jsonschema_rs.is_valid(schema, value):
                    yield f"writes {value!r} to {entity.name}.{name}, a {field.kind}"


def param_slots(tool: Tool, text: str) -> list[str]:
    """Returns the parameters that a phrase uses."""
    return [slot for slot in slots(text) if slot in tool.params]


def attempt(
    domain: Domain, tool: Tool, family: Family, seed: int, using: Iterable[str]
) -> Attempt | None:
    """Execute a call that succeeds in one state; None if no such call is found."""
    episode = Episode([domain], seed, family, Faults())
    call = episode.sample(tool, seeded_rng(tool.name, seed), using)
    if call is None:
        return None
    return episode, call, episode.call(call)


def first_success(
    domain: Domain, tool: Tool, family: Family, using: Iterable[str]
) -> Attempt | None:
    """Execute a call in the first state in which one succeeds."""
    for seed in range(SEEDS):
        success = attempt(domain, tool, family, seed, using)
        if success is not None:
            return success
    return None


def common_failure(domain: Domain, tool: Tool, family: Family) -> str:
    """Returns the outcome that random calls have most often."""
    outcomes: Counter[str] = Counter()
    for seed in range(FAILURE_SEEDS):
        episode = Episode([domain], seed, family, Faults())
        names = {*tool.required, *slots(tool.operation.ask[0])}
        arguments = Sampler(episode, tool, seeded_rng(seed)).arguments(names)
        result = episode.call(ToolCall(tool.name, arguments))
        outcomes[f"{outcome_of(result)} ({result.get('message', 'nothing found')})"] += 1
    return outcomes.most_common(1)[0][0]


# Files --------------------------------------------------------------------------------------------


def check_domain(path: str | Path) -> list[str]:
    """Returns every problem of a domain file; an empty list means that it is fit for use."""
    path = Path(path)
    try:
        domain = load_domain(path)
    except DomainError as error:
        return error.problems
    except SharpenError as error:
        return [str(error)]
    problems = list(check_texts(domain))
    expected_stem = domain.category.replace("/", "_")
    if path.stem != expected_stem:
        problems.append(f"the file of {domain.category} is named {expected_stem}.yaml")
    for tool in domain.tools.values():
        problems += check_execution(domain, tool)
    rate = keyword_rate(domain)
    if rate > MAX_KEYWORD_RATE:
        problems.append(
            f"plain word overlap finds {rate:.0%} of the asks, at most 60% may be so easy"
        )
    return [f"{path.name}: {text}" for text in problems]


def check_execution(domain: Domain, tool: Tool) -> list[str]:
    """Returns the problems of a tool's expressions; if there are none, those of its executions."""
    problems = list(check_names(domain, tool))
    if problems:
        return problems
    try:
        problems = list(check_runs(domain, tool))
    except Exception as error:  # whatever a file provokes is a problem of that file
        problems = [f"{type(error).__name__}: {error}"]
    return list(dict.fromkeys(f"tools.{tool.name}.{text}" for text in problems))


def clashes(paths: Iterable[Path]) -> list[str]:
    """Returns tool names and descriptions that stand in two files, shipped ones included."""
    files = {path.name: path for path in [*World().files.values(), *paths]}
    file_of_text: dict[str, str] = {}
    problems = []
    for path in files.values():
        try:
            tools = load_domain(path).tools.values()
        except SharpenError:
            continue  # reported where that file is checked
        for tool in tools:
            for text in (tool.name, tool.operation.about):
                if text in file_of_text:
                    where = f"{path.name}: tools.{tool.name}"
                    problems.append(f"{where}: {text!r} stands in {file_of_text[text]} too")
                file_of_text[text] = path.name
    return problems


def show(path: Path) -> None:
    """Print one executed call per tool."""
    domain = load_domain(path)
    for tool in domain.tools.values():
        text = tool.operation.ask[0]
        success = first_success(domain, tool, "train", param_slots(tool, text))
        print(f"\n{tool.name} ({tool.operation.op}): {tool.operation.about}")
        if success:
            _, call, result = success
            print(f"  user    {fill(text, call.arguments)}")
            print(f"  call    {json.dumps(call.arguments, ensure_ascii=False)}")
            print(f"  result  {json.dumps(result, ensure_ascii=False)[:300]}")
            print(f"  answer  {fill(tool.operation.say[0], result, call.arguments)}")


def main(arguments: list[str]) -> int:
    """Check the files; return 1 if there are problems, and 2 without files."""
    if not arguments:
        print("usage: python tests/support/domain_check.py FILE…", file=sys.stderr)
        return 2
    paths = [Path(argument) for argument in arguments]
    all_problems = []
    for path in paths:
        problems = check_domain(path)
        all_problems += problems
        if problems:
            print("\n".join(problems))
        else:
            show(path)
            rate = keyword_rate(load_domain(path))
            print(f"\n{path.name}: no problems; word overlap finds {rate:.0%} of the asks")
    repeated = clashes(paths)
    if repeated:
        print("\n".join(repeated))
    return 1 if all_problems or repeated else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
