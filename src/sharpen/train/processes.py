"""One process or several: who computes which micro-batch, and how gradients and weights are shared.

The learner asks `join_processes` for its group. `torchrun` or `accelerate launch` starts the
processes; the setting `parallel` says how they share the work: DDP through Accelerate, FSDP2 with
torch's `fully_shard`, ZeRO with DeepSpeed. Every process knows all rows of a step. So the split
needs no communication, and the loss is the same for any number of processes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from sharpen.train.config.learner import LearnerConfig
from sharpen.types import SharpenError

T = TypeVar("T")


class SingleProcess:
    """One process: nothing to share. The other classes override what differs."""

    rank = 0  # the number of this process
    world = 1  # the number of processes
    resumable = True  # whether checkpoints can be written

    def wrap(self, core: Any) -> Any:
        """Return what is called instead of the model: the model, or a wrapper around it."""
        return core

    def prepare(self, core: Any, optimizer: Optimizer) -> tuple[Any, Any]:
        """Return the wrapped model and the optimiser as they are used for training."""
        return core, optimizer

    def own_share(self, batches: Sequence[T]) -> Sequence[T]:
        """Return the micro-batches that this process computes."""
        return batches[self.rank :: self.world]

    def accumulating(self, core: Any, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch: gradients are synchronised after the last one
        only."""
        return contextlib.nullcontext()

    def backward(self, core: Any, loss: Tensor, last: bool) -> None:
        """Add the gradients of one micro-batch."""
        loss.backward()

    def sum(self, value: Tensor) -> float:
        """Return the sum of a value over all processes."""
        return float(value)

    def gather(self, results: dict[int, Any]) -> dict[int, Any]:
        """Return the results of all processes in one dict."""
        return results

    def highest(self, number: int) -> int:
        """Return the highest number of any process. A signal may reach one of them a step
        earlier."""
        return number

    def step(self, core: Any, optimizer: Any, parameters: Sequence[Tensor], clip: float) -> float:
        """Clip the gradients, step, and return their norm. A norm that is not finite takes no
        step."""
        norm_tensor = torch.nn.utils.clip_grad_norm_(parameters, clip)
        norm = float(_whole_tensor(norm_tensor))
        is_finite = norm - norm == 0
        if is_finite:
            optimizer.step()
        return norm

    def full(self, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter that may be spread over processes."""
        return _whole_tensor(tensor).detach()

    def moments(self, optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimiser's whole state of a parameter."""
        state = optimizer.state.get(parameter, {})
        return {key: self.full(torch.as_tensor(value)) for key, value in state.items()}

    def restore(
        self, optimizer: Any, parameter: Tensor, weight: Tensor, moments: dict[str, Any]
    ) -> None:
        """Set a parameter and its optimiser state from what `full` and `moments` returned."""
        parameter.copy_(_distribute_like(parameter, weight))
        if not moments:
            return
        state = {}
        for key, value in moments.items():
            if isinstance(value, int) or not value.dim():
                state[key] = value  # the step count, which is not spread
            else:
                state[key] = _distribute_like(parameter, value)
        optimizer.state[parameter] = state


def _whole_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or all parts of a distributed one put together."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()  # type: ignore[operator]
    return tensor


def _distribute_like(target: Tensor, value: Tensor) -> Tensor:
    """Return a whole value on the device of `target`, spread over processes in the same way."""
    if not hasattr(target, "device_mesh"):
        return value.to(target.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    mesh = target.device_mesh  # type: ignore[attr-defined]
    placements = target.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(target.device), mesh, placements)


class _DataParallel(SingleProcess):
    """DDP by Accelerate: every process holds the whole model, gradients are averaged."""

    def __init__(self):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes

    def wrap(self, core: Any) -> Any:
        return self.accelerator.prepare_model(core)

    def accumulating(self, core: Any, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else core.no_sync()

    def sum(self, value: Tensor) -> float:
        torch.distributed.all_reduce(value)
        return float(value)

    def gather(self, results: dict[int, Any]) -> dict[int, Any]:
        results_by_process: Any = [None] * self.world
        torch.distributed.all_gather_object(results_by_process, results)
        gathered: dict[int, Any] = {}
        for process_results in results_by_process:
            gathered |= process_results
        return gathered

    def highest(self, number: int) -> int:
        return max(self.gather({self.rank: number}).values())


class _FSDP2(_DataParallel):
    """FSDP2: weights, gradients and optimiser state are spread over the processes; one layer at a
    time is put together."""

    def wrap(self, core: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        for layer in core.decoder.layers:
            fully_shard(layer)
        return fully_shard(core)

    @contextlib.contextmanager
    def accumulating(self, core: Any, last: bool) -> Iterator[None]:
        core.set_requires_gradient_sync(last)
        yield


class _DeepSpeedZero(_DataParallel):
    """DeepSpeed's ZeRO, which clips and steps by itself. Its state is not accessible, so such a run
    keeps no checkpoints."""

    resumable = False
    # not Accelerate's
    wrap = SingleProcess.wrap
    accumulating = SingleProcess.accumulating

    def __init__(self, stage: int, config: LearnerConfig):
        try:
            import deepspeed  # type: ignore[reportMissingImports]
        except ImportError:
            raise SharpenError("parallel=zero: pip install 'sharpen[deepspeed]'") from None
        cuda = torch.cuda.is_available()
        deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=False)
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self.settings = {
            "train_micro_batch_size_per_gpu": 1,  # the learner cuts the step itself
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.clip_norm,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": cuda},
        }

    def prepare(self, core: Any, optimizer: Optimizer) -> tuple[Any, Any]:
        import deepspeed  # type: ignore[reportMissingImports]

        initialized = deepspeed.initialize(model=core, optimizer=optimizer, config=self.settings)
        engine, wrapped_optimizer, *_ = initialized
        return engine, wrapped_optimizer

    def backward(self, core: Any, loss: Tensor, last: bool) -> None:
        core.set_gradient_accumulation_boundary(last)
        core.backward(loss)

    def step(self, core: Any, optimizer: Any, parameters: Sequence[Tensor], clip: float) -> float:
        core.step()
        return float(core.get_global_grad_norm())

    def full(self, tensor: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[reportMissingImports]

        whole = safe_get_full_fp32_param(tensor)
        return (tensor if whole is None else whole).detach()


def join_processes(config: LearnerConfig) -> SingleProcess:
    """Join the processes that the launcher started, in the way that `parallel` asks for."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        if config.parallel != "auto":
            raise SharpenError(
                f"parallel={config.parallel}: there is one process; start several with "
                "torchrun --nproc_per_node N -m sharpen.cli.main train sft …"
            )
        return SingleProcess()
    atexit.register(_leave_processes)
    if config.parallel.startswith("zero"):
        stage = int(config.parallel[-1])
        return _DeepSpeedZero(stage, config)
    if config.parallel == "fsdp2":
        return _FSDP2()
    return _DataParallel()


def _leave_processes() -> None:
    """Leave the process group: threads that still communicate would abort an interpreter that
    ends."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
