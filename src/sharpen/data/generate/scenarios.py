"""The registry of scenarios: what happens in a row, by the names that `sets.yaml` uses.

A scenario is a function that adds messages to a `DialogDraft`. It registers itself with
`@scenario("name")`: in `dialog_scenarios.py` the main requests of training dialogs, in
`task_scenarios.py` the tasks of the benchmark with their gold answers. `draw.py` looks them up.
"""

from __future__ import annotations

from collections.abc import Callable

from sharpen.data.generate.dialog_draft import DialogDraft
from sharpen.types import SharpenError

Scenario = Callable[[DialogDraft], object]
_SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str) -> Callable[[Scenario], Scenario]:
    """Register the decorated function under this name."""

    def register(function: Scenario) -> Scenario:
        if name in _SCENARIOS:
            raise ValueError(f"two scenarios are called {name!r}; rename one of them")
        _SCENARIOS[name] = function
        return function

    return register


def find_scenario(name: str) -> Scenario:
    """Returns the scenario of this name."""
    if name not in _SCENARIOS:
        known = ", ".join(sorted(_SCENARIOS))
        raise SharpenError(f"sets.yaml: scenario: {name!r} is not registered; use one of {known}")
    return _SCENARIOS[name]
