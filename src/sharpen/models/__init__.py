"""Models: find or download one, load it, attach LoRA, estimate what it costs."""

from __future__ import annotations

from types import ModuleType


def quiet_transformers() -> ModuleType:
    """Import transformers without its progress bars for steps that take a second."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
