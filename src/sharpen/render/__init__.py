"""Chat templates: dialogs → token ids with a loss mask, and sampled ids → messages.

Every part of the project that trains or samples uses `Renderer`. No other package knows chat
templates. `renderer.py` holds the renderer, `templates.py` the choice of a template and our own
one, and `special_text.py` keeps special-token text in messages from acting as special tokens.
"""

from sharpen.calls import assistant_text
from sharpen.render.renderer import Renderer, batched
from sharpen.render.templates import hermes_template, tools_block

__all__ = ["Renderer", "assistant_text", "batched", "hermes_template", "tools_block"]
