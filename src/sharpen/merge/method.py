"""The registry of merge methods: a method's parameters are its function's signature.

`PerModel` values are one an input, `PerTuned` one an input that is not the base; all others are
shared. A function takes tiles and parameters and returns the function that merges one tile.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sharpen.merge.arrays import Array
from sharpen.merge.tiles import Tile, Tiles
from sharpen.types import SharpenError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PerModel = Annotated[Sequence[T], "model"]
PerTuned = Annotated[Sequence[T], "tuned"]
Kernel = Callable[[Tile], Array]
Scope = Literal["shared", "model", "tuned"]
Base = Literal["required", "optional", "ignored"]


@dataclass(frozen=True)
class Parameter:
    name: str
    scope: Scope
    kind: TypeAdapter[Any]
    default: Any = None
    required: bool = False

    def check(self, value: Any) -> Any:
        try:
            return self.kind.validate_python(value)
        except ValidationError as error:
            raise SharpenError(
                f"parameter {self.name}: {error.errors()[0]['msg']} (found {value!r})"
            ) from None


@dataclass(frozen=True)
class Method:
    name: str
    function: Callable[..., Kernel]
    parameters: dict[str, Parameter]
    base: Base
    least: int  # inputs, the base counted
    most: int | None

    def kernel(self, x: Tiles, values: dict[str, Any]) -> Kernel:
        """What merges one tile, with parameters by their names in configs."""
        return self.function(x, **{python_name(name): value for name, value in values.items()})


def python_name(name: str) -> str:
    return name + "_" if keyword.iskeyword(name) else name


METHODS: dict[str, Method] = {}


def merge_method(
    base: Base = "required", least: int = 1, most: int | None = None
) -> Callable[[F], F]:
    """Registers a function under its name, its parameters taken from its signature."""

    def register(function: F) -> F:
        add(Method(function.__name__, function, parameters_of(function), base, least, most))
        return function

    return register


def add(method: Method) -> None:
    METHODS[method.name] = method


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Every argument after the tiles; a trailing underscore is not part of a name."""
    hints = get_type_hints(function, include_extras=True)
    arguments = list(inspect.signature(function).parameters.values())[1:]
    found = [parameter_of(argument, hints[argument.name]) for argument in arguments]
    return {parameter.name: parameter for parameter in found}


def parameter_of(argument: inspect.Parameter, hint: Any) -> Parameter:
    scope: Scope = "shared"
    if get_origin(hint) is Annotated:
        sequence, scope = get_args(hint)
        hint = get_args(sequence)[0]
    required = argument.default is inspect.Parameter.empty
    default = None if required else argument.default
    return Parameter(argument.name.rstrip("_"), scope, TypeAdapter(hint), default, required)
