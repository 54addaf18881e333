"""The registry of merge methods: functions of tiles and parameters that return the function which
merges one tile. Parameters are read from the signature: of `PerModel` there is one an input, of
`PerTuned` one an input that is not the base; all others are shared."""

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
REQUIRED = inspect.Parameter.empty  # stands for the default of a parameter that has none


@dataclass(frozen=True)
class Parameter:
    name: str
    scope: Literal["shared", "model", "tuned"]
    kind: TypeAdapter[Any]
    default: Any

    def check(self, value: Any) -> Any:
        try:
            return self.kind.validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SharpenError(f"parameter {self.name}: {reason} (found {value!r})") from None


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
        named = {n + "_" if keyword.iskeyword(n) else n: value for n, value in values.items()}
        return self.function(x, **named)


METHODS: dict[str, Method] = {}


def merge_method(
    base: Base = "required", least: int = 1, most: int | None = None
) -> Callable[[F], F]:
    """Registers a function under its name, its parameters taken from its signature."""

    def register(function: F) -> F:
        name = function.__name__
        METHODS[name] = Method(name, function, parameters_of(function), base, least, most)
        return function

    return register


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Every named argument after the tiles; a trailing underscore is not part of a name."""
    hints = get_type_hints(function, include_extras=True)
    found: dict[str, Parameter] = {}
    for argument in list(inspect.signature(function).parameters.values())[1:]:
        if argument.kind is not argument.VAR_KEYWORD:
            hint, scope, name = hints[argument.name], "shared", argument.name.rstrip("_")
            if get_origin(hint) is Annotated:
                sequence, scope = get_args(hint)
                hint = get_args(sequence)[0]
            found[name] = Parameter(name, scope, TypeAdapter(hint), argument.default)
    return found
