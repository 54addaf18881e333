"""Merging models: `recipe` reads the YAML, `plan` checks the models and lists the tensors to make,
`stream` makes them, `deltas` and `methods` hold the mathematics on `tiles`."""

from sharpen.types import SharpenError


def require(condition: object, text: str) -> None:
    """Wrong input ends with one line that says what and where."""
    if not condition:
        raise SharpenError(text)
