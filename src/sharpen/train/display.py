"""What a training run shows: one live line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from sharpen.models.estimate import CARDS
from sharpen.types import Json

LINE_EVERY_S = 5.0


class Display:
    """Loss, tokens/s, share of the card's peak (MFU), memory and time left of a run."""

    def __init__(self, total: int, done: int, flops_per_token: float, device: str):
        self.total, self.first, self.flops, self.device = total, done, flops_per_token, device
        self.started = self.shown = time.monotonic()
        self.tokens = 0
        self.live: Any = None

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live("", transient=True, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, row: Json, always: bool = False) -> None:
        now = time.monotonic()
        self.tokens += row["tokens"]
        line = self.line(row, now - self.started)
        if self.live is not None:
            self.live.update(line)
        if always or (self.live is None and now - self.shown > LINE_EVERY_S):
            self.shown = now
            print(line, flush=True)

    def line(self, row: Json, seconds: float) -> str:
        step = row["step"]
        rate = self.tokens / seconds
        left = seconds / max(step - self.first, 1) * (self.total - step)
        parts = [f"  step {step}/{self.total}: loss {row['loss']:.4f}"]
        measured = [name for name in ("reward", "dev_loss", "metric") if name in row]
        parts += [f"{name} {row[name]:.4f}" for name in measured]
        for kind in ("", "eval_"):  # by a reward that raises, say: it must not go unseen
            if count := row.get(f"{kind}dropped"):
                what = "dev tasks" if kind else "samples"
                parts += [f"{count} {what} dropped ({row[f'{kind}dropped_why']})"]
        parts += [f"{rate:.0f} tokens/s"]
        if peak := peak_flops(self.device):
            parts += [f"MFU {rate * self.flops / peak:.0%}"]
        parts += [f"{peak_memory(self.device):.1f} GiB", f"about {left:.0f} s left"]
        return ", ".join(parts)


def flops_per_token(model: Any) -> float:
    """Forward and backward through every matrix but the embedding's look-up, and the gradients of
    what is trained."""
    parameters = list(model.parameters())
    whole = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    tied = getattr(model.config, "tie_word_embeddings", False)
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    return 4.0 * (whole - looked_up) + 2.0 * trained


def peak_flops(device: str) -> float:
    """The card's dense bf16 peak where it is known, else 0."""
    if not device.startswith("cuda"):
        return 0.0
    import torch

    name = torch.cuda.get_device_name().replace(" ", "")
    return next((c.peak for key, c in CARDS.items() if key.split("-")[0] in name), 0.0)


def peak_memory(device: str) -> float:
    """GiB that this process needed at once, on the card where it has one."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
