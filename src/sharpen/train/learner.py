"""The only training step: datums in, one optimiser step out, with the same result however the step
is split into micro-batches.

Every trainer holds a `Learner`. `step` cuts the datums into micro-batches by token budget, adds up
the gradients of one loss that is normalised by the whole step's trained tokens, clips, and steps
AdamW on fp32 master weights. `logprobs` scores. Every step seeds its randomness from (seed, step),
so that a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sharpen.models.attention import use_our_attention
from sharpen.models.lora import fuse_lora
from sharpen.models.shared_prompt import shares_prompts
from sharpen.train.batching import plan_micro_batches, trained_tokens
from sharpen.train.collate import Batch
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.decoder import Decoder, LogprobModel
from sharpen.train.losses import learning_rate
from sharpen.train.processes import join_processes
from sharpen.types import Datum, SharpenError

# (logprobs_N, batch, trained tokens of the step) → the micro-batch's part of the step's loss
Loss = Callable[[torch.Tensor, Batch, float], torch.Tensor]
_MAX_BAD_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did."""

    loss: float
    norm: float  # of the gradients, before clipping
    lr: float
    tokens: int  # real tokens of the step, padding not counted
    trained: int  # those of them that carry loss
    skipped: bool = False  # the loss or the gradients were not finite


class Learner:
    """Holds the model, its fp32 master weights and the optimiser."""

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        total_steps: int,
        core: Decoder | None = None,
    ):
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.device = str(next(model.parameters()).device)
        self.processes = join_processes(config)
        has_kernel = use_our_attention(model)
        self.packed = has_kernel and config.packing == "auto"
        self.core = core or LogprobModel(model)  # what gives one number per trained token
        self._prepare_core()
        # what is called: the core, or a wrapper around it for several processes
        runner = self.processes.wrap(self.core)
        self.trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if not self.trained:
            raise SharpenError(
                "the model has no trainable parameter; attach an adapter or train it with full=true"
            )
        self.master = _master_weights(self.trained)
        optimizer = _make_optimizer(self.master, config, self.device)
        self._runner, self.optimizer = self.processes.prepare(runner, optimizer)
        # called with the learner before the gradients are clipped; may add to them
        self.before_clip: list[Callable[[Learner], None]] = []
        self.steps_done = 0
        self._bad_steps = 0  # in a row
        self.token_budget = config.token_budget

    def _prepare_core(self) -> None:
        """Set the core up as the config asks: layout, LoRA kernel, checkpointing, compilation."""
        config = self.config
        core = self.core
        core.packed = self.packed
        # in fp32 on a GPU there is no kernel for shared prompts
        can_share = self.packed or self.device == "cpu"
        core.shares = can_share and config.packing == "auto" and shares_prompts(core.decoder)
        fuse_lora(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for index, layer in enumerate(core.decoder.layers):
                recompute = index % config.gradient_checkpointing_every == 0
                layer.gradient_checkpointing = recompute
        if config.compile:
            core.compile_layers(config.activation_share)

    # Training --------------------------------------------------------------------------------

    def step(self, datums: Sequence[Datum], loss: Loss) -> StepReport:
        """Make one optimiser step over `datums`."""
        trained = sum(trained_tokens(datum) for datum in datums)
        if not trained:
            raise SharpenError(
                f"step {self.steps_done + 1}: none of its {len(datums)} rows has a trained token; "
                "look at the rows with `sharpen data check`"
            )
        lr = self._set_learning_rate()
        self.model.train()
        loss_value = self.accumulate(datums, loss, float(trained))
        for change_gradients in self.before_clip:
            change_gradients(self)
        norm = math.nan
        if math.isfinite(loss_value):
            norm = self.processes.step(
                self._runner, self.optimizer, list(self.master.values()), self.config.clip_norm
            )
        skipped = not math.isfinite(norm)
        self._count_bad_step(skipped)
        if not skipped:
            self.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        tokens = sum(len(datum.ids) for datum in datums)
        return StepReport(loss_value, norm, lr, tokens, trained, skipped)

    def _set_learning_rate(self) -> float:
        """Give the optimiser this step's learning rate and return it."""
        config = self.config
        warmup_steps = math.ceil(config.warmup_ratio * self.total_steps)
        lr = learning_rate(
            self.steps_done,
            self.total_steps,
            config.learning_rate,
            config.lr_scheduler,
            warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        return lr

    def _count_bad_step(self, skipped: bool) -> None:
        """Stop the run when too many steps in a row were skipped."""
        self._bad_steps = self._bad_steps + 1 if skipped else 0
        if self._bad_steps >= _MAX_BAD_STEPS:
            raise SharpenError(
                f"step {self.steps_done + 1}: {_MAX_BAD_STEPS} steps in a row had a loss or "
                "gradient that is not finite; lower the learning rate or look at the data"
            )

    def accumulate(self, datums: Sequence[Datum], loss: Loss, trained: float) -> float:
        """Add up the gradients of the whole step in the master weights and return the loss.

        On a full GPU the micro-batch is halved, the step is retried, and a line is printed.
        """
        while True:
            try:
                torch.manual_seed(self.config.seed * 1_000_003 + self.steps_done)
                self.optimizer.zero_grad(set_to_none=True)
                return self.forward_backward(datums, loss, trained)
            except torch.cuda.OutOfMemoryError:
                longest = max(len(datum.ids) for datum in datums)
                if self.token_budget <= longest or self.processes.world > 1:
                    raise SharpenError(
                        f"out of GPU memory with micro-batches of {self.token_budget} tokens; turn "
                        "on gradient_checkpointing or lower token_budget or max_length"
                    ) from None
                self.token_budget = max(self.token_budget // 2, longest)
                for parameter in self.trained.values():
                    parameter.grad = None
                torch.cuda.empty_cache()
                print(f"out of GPU memory: micro-batches of {self.token_budget} tokens from now on")

    def forward_backward(self, datums: Sequence[Datum], loss: Loss, trained: float) -> float:
        """Run this process's micro-batches and return the loss of the step over all processes."""
        processes = self.processes
        total = torch.zeros((), device=self.device)
        batches = plan_micro_batches(
            datums, self.token_budget, self.packed, processes.world, self.core.shares
        )
        own_batches = processes.own_share(batches)
        for number, indices in enumerate(own_batches):
            last = number == len(own_batches) - 1
            # A process without rows runs one for nothing, because the others wait for it.
            batch = self.core.batch([datums[index] for index in indices] or datums[:1])
            factor = 1.0 if indices else 0.0
            with processes.accumulating(self._runner, last):
                part = loss(self._runner(batch), batch, trained) * factor
                # gradients are averaged over processes, but their sum is needed
                processes.backward(self._runner, part * processes.world, last)
            total += part.detach()  # read once per step: reading waits for the GPU
            if processes.world == 1 or last:
                self.gather_gradients()
        return processes.sum(total)

    def gather_gradients(self) -> None:
        """Add half-precision gradients to fp32 ones, so that many micro-batches add up exactly."""
        for name, parameter in self.trained.items():
            master = self.master[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights into the model's own.

        A fused AdamW does not mark weights as changed, which those who sample from them check.
        """
        for name, parameter in self.trained.items():
            if self.master[name] is not parameter:
                parameter.copy_(self.master[name])
            torch.autograd.graph.increment_version(parameter)

    # Scoring ---------------------------------------------------------------------------------

    def logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Return the log-probabilities of each datum's trained tokens, in order."""
        self.model.eval()
        return self.core.score(datums, self.token_budget, self.processes, self._runner)

    def values(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """The same for a core that gives values."""
        return self.logprobs(datums)

    def mean_loss(self, datums: Sequence[Datum]) -> float:
        """Return the mean negative log-likelihood over all trained tokens."""
        logprobs = self.logprobs(datums)
        total = float(sum(values.sum(dtype=np.float64) for values in logprobs))
        tokens = sum(len(values) for values in logprobs)
        return -total / max(tokens, 1)

    # State -----------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, whole, by the model's names; every process must call it."""
        return {name: self.processes.full(weight) for name, weight in self.trained.items()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return everything that the next step depends on: tensors and plain values.

        Tensors are named `weight.NAME` and `optim.KEY.NAME`; every process must call it.
        """
        processes = self.processes
        tensors = {}
        for name, weight in self.master.items():
            tensors[f"weight.{name}"] = processes.full(weight)
        for name, weight in self.master.items():
            for key, value in processes.moments(self.optimizer, weight).items():
                tensors[f"optim.{key}.{name}"] = value
        return tensors, {"steps_done": self.steps_done, "bad_steps": self._bad_steps}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in self.master:
            if f"weight.{name}" not in tensors:
                raise SharpenError(
                    f"the checkpoint has no {name}: it is of another model or adapter; "
                    "start in another folder"
                )
        moments_by_name: dict[str, dict[str, Any]] = {}
        for tensor_name, tensor in tensors.items():
            kind, _, rest = tensor_name.partition(".")
            if kind == "optim":
                key, _, name = rest.partition(".")
                moments_by_name.setdefault(name, {})[key] = tensor
        if self.config.optimizer == "adamw_8bit":  # which counts steps in an int
            for moments in moments_by_name.values():
                moments["step"] = int(moments["step"])
        with torch.no_grad():
            for name, parameter in self.master.items():
                weight = tensors[f"weight.{name}"]
                moments = moments_by_name.get(name, {})
                self.processes.restore(self.optimizer, parameter, weight, moments)
        self.publish()
        self.steps_done = values["steps_done"]
        self._bad_steps = values["bad_steps"]


def _master_weights(trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the optimiser steps: the fp32 parameters themselves, and fp32 copies of the
    others, because half-precision weights would lose small updates."""
    master = {}
    for name, parameter in trained.items():
        is_fp32 = parameter.dtype == torch.float32
        master[name] = parameter if is_fp32 else parameter.detach().float()
    return master


def _make_optimizer(
    parameters: dict[str, torch.Tensor], config: LearnerConfig, device: str
) -> torch.optim.Optimizer:
    """Make an AdamW. Matrices decay, vectors (norms, biases) do not; LoRA's B matrices may have a
    higher learning rate than the A matrices (LoRA+)."""
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        is_matrix = parameter.dim() > 1
        is_lora_b = "lora_B" in name
        groups.setdefault((is_matrix, is_lora_b), []).append(parameter)
    settings = []
    for (is_matrix, is_lora_b), members in groups.items():
        settings.append(
            {
                "params": members,
                "weight_decay": config.weight_decay if is_matrix else 0.0,
                "rate": config.lora_plus_ratio if is_lora_b else 1.0,
            }
        )
    on_cuda = device.startswith("cuda")
    lr = config.learning_rate
    betas = config.adam_betas
    if config.optimizer == "adamw":
        return torch.optim.AdamW(settings, fused=on_cuda, lr=lr, betas=betas)
    if not on_cuda or importlib.util.find_spec("bitsandbytes") is None:
        raise SharpenError("adamw_8bit: needs a CUDA device and pip install 'sharpen[gpu]'")
    from bitsandbytes.optim import AdamW8bit  # type: ignore[reportMissingImports]

    return AdamW8bit(settings, lr=lr, betas=betas)
