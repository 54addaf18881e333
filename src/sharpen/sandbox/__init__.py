"""Run untrusted code in a bubblewrap container with resource limits and a wall clock.

Rewards and environments use `Sandbox`, a pool of workers. `pool.py` holds the pool, `worker.py` one
worker seen from outside, `container.py` what the container allows, and `sandbox_worker.py` the
program that runs inside.
"""

from sharpen.sandbox.pool import Sandbox
from sharpen.sandbox.worker import (
    FLOOD_FACTOR,
    Limits,
    SandboxResult,
    Worker,
    descendants,
    plain_worker,
)

__all__ = [
    "FLOOD_FACTOR",
    "Limits",
    "Sandbox",
    "SandboxResult",
    "Worker",
    "descendants",
    "plain_worker",
]
