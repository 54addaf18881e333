"""The registry of merge methods.

A method is a function from tiles and parameters to the kernel that merges one tile. Its parameters
are read from its signature: a `PerModel` parameter has one value per input, a `PerTuned` parameter
one per input that is not the base, and all others are shared. `methods` and `task_vector_methods`
register methods here; `plan` and `merger` look them up.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sharpen.merge.tiles import Array, Tile, Tiles
from sharpen.types import SharpenError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PerModel = Annotated[Sequence[T], "model"]
PerTuned = Annotated[Sequence[T], "tuned"]
Kernel = Callable[[Tile], Array]
Base = Literal["required", "optional", "ignored"]
REQUIRED = inspect.Parameter.empty  # the default of a parameter that must be given


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method, under the name that it has in recipes."""

    name: str
    scope: Literal["shared", "model", "tuned"]
    type_adapter: TypeAdapter[Any]
    default: Any

    def check(self, value: Any) -> Any:
        """Returns the value converted to the parameter's type; raises if it does not fit."""
        try:
            return self.type_adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SharpenError(f"parameter {self.name}: {reason} (found {value!r})") from None


@dataclass(frozen=True)
class Method:
    """A registered method, its parameters, and how many models it merges."""

    name: str
    function: Callable[..., Kernel]
    parameters: dict[str, Parameter]
    base: Base
    least: int  # fewest inputs, the base included
    most: int | None  # most inputs, the base included; None: any number

    def kernel(self, tiles: Tiles, values: dict[str, Any]) -> Kernel:
        """Returns the function that merges one tile, for parameters by their names in recipes."""
        arguments = {}
        for name, value in values.items():
            argument = f"{name}_" if keyword.iskeyword(name) else name
            arguments[argument] = value
        return self.function(tiles, **arguments)


METHODS: dict[str, Method] = {}


def merge_method(
    base: Base = "required", least: int = 1, most: int | None = None
) -> Callable[[F], F]:
    """Register a function as a method under its own name.

    `least` and `most` bound the number of inputs, the base included.
    """

    def register(function: F) -> F:
        name = function.__name__
        METHODS[name] = Method(name, function, read_parameters(function), base, least, most)
        return function

    return register


def read_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Read the parameters of a method from its signature.

    Every named argument after the tiles is one. A trailing underscore is not part of the name: it
    is there because names such as `lambda` are keywords of Python.
    """
    hints = get_type_hints(function, include_extras=True)
    arguments = list(inspect.signature(function).parameters.values())[1:]
    parameters: dict[str, Parameter] = {}
    for argument in arguments:
        if argument.kind is argument.VAR_KEYWORD:
            continue
        hint = hints[argument.name]
        scope = "shared"
        if get_origin(hint) is Annotated:
            sequence_type, scope = get_args(hint)
            hint = get_args(sequence_type)[0]
        name = argument.name.rstrip("_")
        parameters[name] = Parameter(name, scope, TypeAdapter(hint), argument.default)
    return parameters
