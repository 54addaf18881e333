"""Models: find or pull one, load it, attach LoRA, estimate what it costs."""
