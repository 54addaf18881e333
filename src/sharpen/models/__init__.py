"""Models: find or pull one, load it, attach LoRA, estimate what it costs."""

from __future__ import annotations

from typing import Any


def quiet_transformers() -> Any:
    """transformers without its progress bars for steps that take a second; ours show what takes
    long."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
