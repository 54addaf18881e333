"""The only training step: datums in, one optimiser step out, and the same result however it was
split.

`step` makes micro-batches by token budget, adds up gradients of one loss that is normalised by the
whole step's trained tokens, clips, and steps AdamW on fp32 master weights. `logprobs` scores. Every
step draws its randomness from (seed, step), so that a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sharpen.models.attention import plain_head, use_our_attention
from sharpen.models.lora import fuse_lora
from sharpen.models.shared_prompt import shares_prompts
from sharpen.train.batching import Batch, collate, row_batches, trained_tokens
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.losses import learning_rate, selected_logprobs
from sharpen.train.processes import SingleProcess, processes
from sharpen.types import Datum, SharpenError

Loss = Callable[[torch.Tensor, Batch, float], torch.Tensor]  # logprobs_N, batch, the step's tokens
MAX_BAD_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    norm: float
    lr: float
    tokens: int  # real tokens of the step, padding not counted
    trained: int  # of them carrying loss
    skipped: bool = False


class Learner:
    """Holds the model, its fp32 master weights and the optimiser."""

    def __init__(
        self, model: Any, config: LearnerConfig, total_steps: int, core: Decoder | None = None
    ):
        self.model, self.config, self.total_steps = model, config, total_steps
        self.device = str(next(model.parameters()).device)
        self.processes = processes(config)
        self.packed = use_our_attention(model) and config.packing == "auto"
        self.core = core or LogprobModel(model)
        self.core.packed = self.packed
        able = self.packed or self.device == "cpu"  # fp32 on a GPU has no kernel for it
        self.core.shares = able and config.packing == "auto" and shares_prompts(self.core.decoder)
        fuse_lora(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for index, layer in enumerate(self.core.decoder.layers):
                layer.gradient_checkpointing = index % config.gradient_checkpointing_every == 0
        if config.compile:
            self.core.compile_layers(config.activation_share)
        self.runner = self.processes.wrap(self.core)  # what is called: the core, or one around it
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.trained:
            raise SharpenError("the model has no trainable parameter")
        # half-precision weights would lose small updates: AdamW steps fp32 copies of them
        self.master = {
            n: p if p.dtype == torch.float32 else p.detach().float()
            for n, p in self.trained.items()
        }
        optimizer = make_optimizer(self.master, config, self.device)
        self.runner, self.optimizer = self.processes.prepare(self.runner, optimizer)
        self.before_clip: list[Callable[[Learner], None]] = []  # may add to the gradients
        self.steps_done = 0
        self.bad_steps = 0
        self.token_budget = config.token_budget

    def step(self, datums: Sequence[Datum], loss: Loss) -> StepReport:
        """One optimiser step over `datums`."""
        trained = sum(trained_tokens(d) for d in datums)
        if not trained:
            raise SharpenError("a step without a trained token")
        lr = learning_rate(
            self.steps_done,
            self.total_steps,
            self.config.learning_rate,
            self.config.lr_scheduler,
            math.ceil(self.config.warmup_ratio * self.total_steps),
        )
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        value = self.accumulate(datums, loss, float(trained))
        for change in self.before_clip:
            change(self)
        norm = math.nan
        if math.isfinite(value):
            masters, clip = list(self.master.values()), self.config.clip_norm
            norm = self.processes.step(self.runner, self.optimizer, masters, clip)
        skipped = not math.isfinite(norm)
        self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps >= MAX_BAD_STEPS:
            raise SharpenError(
                f"step {self.steps_done + 1}: {MAX_BAD_STEPS} steps in a row had a loss or "
                "gradient that is not finite; lower the learning rate or look at the data"
            )
        if not skipped:
            self.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        tokens = sum(len(d.ids) for d in datums)
        return StepReport(value, norm, lr, tokens, trained, skipped)

    def accumulate(self, datums: Sequence[Datum], loss: Loss, trained: float) -> float:
        """Gradients of the whole step into the master weights; on a full GPU again with half the
        micro-batch."""
        while True:
            try:
                torch.manual_seed(self.config.seed * 1_000_003 + self.steps_done)
                self.optimizer.zero_grad(set_to_none=True)
                return self.forward_backward(datums, loss, trained)
            except torch.cuda.OutOfMemoryError:
                largest = max(len(d.ids) for d in datums)
                if self.token_budget <= largest or self.processes.world > 1:
                    raise SharpenError(
                        f"out of GPU memory with micro-batches of {self.token_budget} tokens; turn "
                        "on gradient_checkpointing or lower token_budget or max_length"
                    ) from None
                self.token_budget = max(self.token_budget // 2, largest)
                for parameter in self.trained.values():
                    parameter.grad = None
                torch.cuda.empty_cache()
                print(f"out of GPU memory: micro-batches of {self.token_budget} tokens from now on")

    def forward_backward(self, datums: Sequence[Datum], loss: Loss, trained: float) -> float:
        """This process's micro-batches. Gradients are averaged over processes, hence the factor; a
        process without rows runs one for nothing, because the others wait for it."""
        group = self.processes
        total = torch.zeros((), device=self.device)
        shape = (self.packed, group.world, self.core.shares)
        mine = group.mine(row_batches(datums, self.token_budget, *shape))
        for number, chosen in enumerate(mine):
            last = number == len(mine) - 1
            batch = self.core.batch([datums[i] for i in chosen] or datums[:1])
            with group.accumulating(self.runner, last):
                part = loss(self.runner(batch), batch, trained) * (1.0 if chosen else 0.0)
                group.backward(self.runner, part * group.world, last)
            total += part.detach()  # read once a step: reading waits for the GPU
            if group.world == 1 or last:
                self.gather_gradients()
        return group.total(total)

    def gather_gradients(self) -> None:
        """Add half-precision gradients to fp32 ones, so that many micro-batches add up exactly."""
        for name, parameter in self.trained.items():
            master = self.master[name]
            if master is parameter or parameter.grad is None:
                continue
            master.grad = (
                parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            )
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Master weights → the model's own, which tell whoever sampled from them that they changed:
        a fused AdamW does not."""
        for name, parameter in self.trained.items():
            if self.master[name] is not parameter:
                parameter.copy_(self.master[name])
            torch.autograd.graph.increment_version(parameter)

    def logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probabilities of each datum's trained tokens, in order."""
        self.model.eval()
        return self.core.score(datums, self.token_budget, self.processes, self.runner)

    values = logprobs  # of a core that gives values

    def mean_loss(self, datums: Sequence[Datum]) -> float:
        """Mean negative log-likelihood over all trained tokens."""
        found = self.logprobs(datums)
        return -float(sum(v.sum(dtype=np.float64) for v in found)) / max(sum(map(len, found)), 1)

    def weights(self) -> dict[str, torch.Tensor]:
        """What was trained, whole, by the model's names; every process must ask."""
        return {n: self.processes.full(p) for n, p in self.trained.items()}

    # State -----------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that the next step depends on: tensors and plain values."""
        group = self.processes
        tensors = {f"weight.{n}": group.full(p) for n, p in self.master.items()}
        for name, parameter in self.master.items():
            for key, value in group.moments(self.optimizer, parameter).items():
                tensors[f"optim.{key}.{name}"] = value
        return tensors, {"steps_done": self.steps_done, "bad_steps": self.bad_steps}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        missing = [n for n in self.master if f"weight.{n}" not in tensors]
        if missing:
            raise SharpenError(
                f"the checkpoint has no {missing[0]}: it is of another model or adapter"
            )
        moments: dict[str, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "optim":
                part, _, name = rest.partition(".")
                moments.setdefault(name, {})[part] = tensor
        for found in moments.values():
            if self.config.optimizer == "adamw_8bit":  # which counts steps in an int
                found["step"] = int(found["step"])
        with torch.no_grad():
            for name, parameter in self.master.items():
                weight, found = tensors[f"weight.{name}"], moments.get(name, {})
                self.processes.restore(self.optimizer, parameter, weight, found)
        self.publish()
        self.steps_done, self.bad_steps = values["steps_done"], values["bad_steps"]


class Decoder(torch.nn.Module):
    """A model as one function of a batch: its decoder, and one figure for each trained token."""

    def __init__(self, decoder: Any):
        super().__init__()
        self.decoder, self.packed, self.compiled = decoder, False, False
        self.shares = False  # whether rows of one prompt compute it once

    def batch(self, datums: Sequence[Datum]) -> Batch:
        device = str(next(self.parameters()).device)
        return collate(datums, device, self.packed, self.shares)

    def hidden(self, batch: Batch) -> torch.Tensor:
        return self.decoder(
            input_ids=batch.tokens_B_T, use_cache=False, **batch.extra
        ).last_hidden_state

    @torch.no_grad()
    def score(
        self, datums: Sequence[Datum], token_budget: int, group: Any = None, runner: Any = None
    ) -> list[np.ndarray]:
        """The figures of each datum's trained tokens, whatever its place in a micro-batch."""
        group, runner = group or SingleProcess(), runner or self
        found: dict[int, np.ndarray] = {}
        shape = (self.packed, group.world, self.shares)
        for chosen in group.mine(row_batches(datums, token_budget, *shape)):
            batch = self.batch([datums[i] for i in chosen] or datums[:1])
            values, rows = runner(batch).cpu().numpy(), batch.row_N.cpu().numpy()
            found |= {index: values[rows == row] for row, index in enumerate(chosen)}
        found = group.gather(found)
        return [found[index] for index in range(len(datums))]

    def compile_layers(self, activation_share: float = 1.0) -> None:
        """The layers are alike: one graph serves all of them, whatever the length. Below a share of
        1 the compiler recomputes what is cheapest to compute again."""
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = activation_share
        self.compiled = True
        for layer in self.decoder.layers:
            layer.compile(dynamic=True)


class LogprobModel(Decoder):
    """A causal model: log-probabilities of the trained tokens. Logits exist for those positions
    only."""

    def __init__(self, model: Any):
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = plain_head(causal)
        super().__init__(getattr(causal, causal.base_model_prefix))
        self.head, self.temperature = head, 1.0

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden_N_D = self.hidden(batch).flatten(0, 1)[batch.at_N]
        if self.temperature != 1.0:  # the distribution that was sampled from
            hidden_N_D = hidden_N_D / self.temperature
        return selected_logprobs(hidden_N_D, self.head.weight, batch.targets_N, self.compiled)


def make_optimizer(parameters: dict[str, Any], config: LearnerConfig, device: str) -> Any:
    """AdamW; matrices decay, vectors (norms, biases) do not, and LoRA's B may learn faster than
    A."""
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.dim() > 1, "lora_B" in name), []).append(parameter)
    settings = [
        {
            "params": found,
            "weight_decay": config.weight_decay if decays else 0.0,
            "rate": config.lora_plus_ratio if faster else 1.0,
        }
        for (decays, faster), found in groups.items()
    ]
    given = {"lr": config.learning_rate, "betas": config.adam_betas}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(settings, fused=device.startswith("cuda"), **given)
    if not device.startswith("cuda") or importlib.util.find_spec("bitsandbytes") is None:
        raise SharpenError("adamw_8bit: needs a CUDA device and pip install 'sharpen[gpu]'")
    from bitsandbytes.optim import AdamW8bit  # type: ignore[reportMissingImports]

    return AdamW8bit(settings, **given)
