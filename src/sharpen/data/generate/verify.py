"""Execute the gold answers of tasks, and refuse those that do not do what they say.

`draw.py` calls `run_gold` to record the end state of a task and `verify_gold` on what will be
written.
"""

from __future__ import annotations

from typing import Any

from sharpen.data.generate.plans import calls_to_json, value_at
from sharpen.types import Json, SharpenError, ToolCall
from sharpen.world.episode import Episode, World, outcome_of


def verify_gold(world: World, gold: Json, where: str) -> None:
    """Raise unless the gold steps make the gold calls and reach the recorded end state."""
    if "calls" not in gold:
        return
    episode, calls = run_gold(world, gold, where)
    if calls != gold["calls"] or episode.digest() != gold["state"]:
        raise SharpenError(f"{where}: the gold calls do not reach the recorded end state")


def run_gold(world: World, gold: Json, where: str) -> tuple[Episode, list[Json]]:
    """Execute the gold steps of a task, or its gold calls if it has no steps.

    Returns the episode afterwards and the calls with all references resolved. Every call has to
    succeed.
    """
    episode = world.episode(gold["categories"], gold["seed"], gold["family"])
    results: dict[str, Json] = {}  # step id → result
    calls = []
    for step in gold.get("steps") or gold["calls"]:
        arguments = {}
        for name, value in step["arguments"].items():
            arguments[name] = resolve_reference(value, results, where)
        tool_name = step["tool"] if "id" in step else step["name"]
        call = ToolCall(tool_name, arguments)
        result = episode.call(call)
        if outcome_of(result) != "ok":
            raise SharpenError(f"{where}: the gold call of {call.name} fails: {result}")
        results[step.get("id", "")] = result
        calls.append(call)
    return episode, calls_to_json(*calls)


def resolve_reference(value: Any, results: dict[str, Json], where: str) -> Any:
    """Returns what `{"$from": "s1.path"}` points to; any other value as it is."""
    if not isinstance(value, dict) or "$from" not in value:
        return value
    step, *path = value["$from"].split(".")
    resolved = value_at(results.get(step, {}), path)
    if resolved is None:
        raise SharpenError(f"{where}: {value['$from']} is not in the results of earlier steps")
    return resolved
