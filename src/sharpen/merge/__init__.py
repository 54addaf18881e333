"""Merging models: averages, spherical means and task-vector methods on safetensors folders.

`recipe` reads the YAML, `plan` checks the models and lists the tensors to make, `stream` makes
them. `methods` and `task_vector_methods` hold the mathematics, which works on `tiles`.
"""

from sharpen.types import SharpenError


def require(condition: object, message: str) -> None:
    """Raise a `SharpenError` with the message unless the condition holds."""
    if not condition:
        raise SharpenError(message)
