"""What a training run prints: one live line on a terminal, otherwise a plain line now and then.

`TrainingRun` calls it after every step.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from sharpen.models.estimate import CARDS
from sharpen.types import Json

LINE_EVERY_S = 5.0  # seconds between plain lines


class Display:
    """Loss, tokens/s, share of the card's peak (MFU), memory and time left of a run.

    `done` steps were made before this process started.
    """

    def __init__(self, total: int, done: int, flops_per_token: float, device: str):
        self.total = total
        self._first_step = done
        self._flops_per_token = flops_per_token
        self._device = device
        self._started = time.monotonic()
        self._last_line = self._started
        self._tokens = 0
        self._live: Any = None

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live("", transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: Json, always: bool = False) -> None:
        """Show a step's metrics row; `always` prints a plain line."""
        now = time.monotonic()
        self._tokens += row["tokens"]
        line = self._format_line(row, now - self._started)
        if self._live is not None:
            self._live.update(line)
        line_is_due = self._live is None and now - self._last_line > LINE_EVERY_S
        if always or line_is_due:
            self._last_line = now
            print(line, flush=True)

    def _format_line(self, row: Json, seconds: float) -> str:
        """Return the line of a step, `seconds` after the start."""
        step = row["step"]
        parts = [f"  step {step}/{self.total}: loss {row['loss']:.4f}"]
        for name in ("reward", "dev_loss", "metric"):
            if name in row:
                parts.append(f"{name} {row[name]:.4f}")
        # samples that were dropped, such as by a reward that raises, must not go unseen
        if row.get("dropped"):
            parts.append(f"{row['dropped']} samples dropped ({row['dropped_why']})")
        if row.get("eval_dropped"):
            parts.append(f"{row['eval_dropped']} dev tasks dropped ({row['eval_dropped_why']})")
        tokens_per_s = self._tokens / seconds
        parts.append(f"{tokens_per_s:.0f} tokens/s")
        peak = _peak_flops(self._device)
        if peak:
            parts.append(f"MFU {tokens_per_s * self._flops_per_token / peak:.0%}")
        parts.append(f"{peak_memory(self._device):.1f} GiB")
        seconds_per_step = seconds / max(step - self._first_step, 1)
        parts.append(f"about {seconds_per_step * (self.total - step):.0f} s left")
        return ", ".join(parts)


def flops_per_token(model: Any) -> float:
    """Return the floating-point operations per token: forward and backward through every matrix
    except an embedding that is only looked up, and the gradients of the trained weights."""
    parameters = list(model.parameters())
    all_weights = sum(weight.numel() for weight in parameters)
    trained_weights = sum(weight.numel() for weight in parameters if weight.requires_grad)
    tied = getattr(model.config, "tie_word_embeddings", False)
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    return 4.0 * (all_weights - looked_up) + 2.0 * trained_weights


def _peak_flops(device: str) -> float:
    """Return the card's dense bf16 peak if it is known, otherwise 0."""
    if not device.startswith("cuda"):
        return 0.0
    import torch

    device_name = torch.cuda.get_device_name().replace(" ", "")
    for card_name, card in CARDS.items():
        if card_name.split("-")[0] in device_name:
            return card.peak
    return 0.0


def peak_memory(device: str) -> float:
    """Return the peak memory of this process in GiB: of the card if it has one, otherwise of the
    CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    maxrss_unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * maxrss_unit / 2**30
