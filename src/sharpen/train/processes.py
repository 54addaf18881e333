"""One process or several: who takes which micro-batch, and how gradients and weights come together.

`torchrun` or `accelerate launch` starts the processes; `parallel` says how they share the work.
DDP comes through Accelerate, FSDP2 is torch's `fully_shard`, ZeRO is DeepSpeed's. All processes
know all rows of a step, so that the split needs no talk and the step's loss is the same for any
number of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sharpen.train.config.learner import LearnerConfig
from sharpen.types import SharpenError


class SingleProcess:
    """One process: nothing to share."""

    rank, world = 0, 1
    resumable = True

    def wrap(self, core: Any) -> Any:
        return core

    def prepare(self, core: Any, optimizer: Any) -> tuple[Any, Any]:
        return core, optimizer

    def mine(self, batches: Sequence[Any]) -> Sequence[Any]:
        return batches[self.rank :: self.world]

    def accumulating(self, core: Any, last: bool) -> Any:
        return contextlib.nullcontext()

    def backward(self, core: Any, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def total(self, value: torch.Tensor) -> float:
        return float(value)

    def gather(self, found: dict[int, Any]) -> dict[int, Any]:
        """Each process's findings, put together."""
        return found

    def agreed(self, number: int) -> int:
        """The highest number of any process: a signal may reach one of them a step earlier."""
        return number

    def step(self, core: Any, optimizer: Any, parameters: Sequence[Any], clip: float) -> float:
        """Clip and step; returns the gradients' norm. A norm that is not finite takes no step."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[operator]
        if norm - norm == 0:  # neither NaN nor infinite
            optimizer.step()
        return norm

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that may be spread over processes."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
        return whole.detach()

    def moments(self, optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
        """What the optimiser remembers of a parameter, whole."""
        found = optimizer.state.get(parameter, {})
        return {key: self.full(torch.as_tensor(value)) for key, value in found.items()}

    def restore(
        self, optimizer: Any, parameter: Any, weight: torch.Tensor, moments: dict[str, Any]
    ) -> None:
        """The opposite of `full` and `moments`."""
        parameter.copy_(self.put(parameter, weight))
        if moments:
            optimizer.state[parameter] = {
                key: value
                if isinstance(value, int) or not value.dim()
                else self.put(parameter, value)
                for key, value in moments.items()
            }

    def put(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A whole value in the form of `target`."""
        if not hasattr(target, "device_mesh"):
            return value.to(target.device, copy=True)
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
        return distribute_tensor(value.to(target.device), mesh, placements)


class DataParallel(SingleProcess):
    """Data parallel by Accelerate: every process holds the model, gradients are averaged."""

    def __init__(self):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes

    def wrap(self, core: Any) -> Any:
        return self.accelerator.prepare_model(core)

    def accumulating(self, core: Any, last: bool) -> Any:
        return contextlib.nullcontext() if last else core.no_sync()

    def total(self, value: torch.Tensor) -> float:
        torch.distributed.all_reduce(value)
        return float(value)

    def gather(self, found: dict[int, Any]) -> dict[int, Any]:
        parts: Any = [None] * self.world
        torch.distributed.all_gather_object(parts, found)
        return {index: value for part in parts for index, value in part.items()}

    def agreed(self, number: int) -> int:
        return max(self.gather({self.rank: number}).values())


class FSDP2(DataParallel):
    """FSDP2: weights, gradients and moments spread over the processes, a layer at a time whole."""

    def wrap(self, core: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        for layer in core.decoder.layers:
            fully_shard(layer)
        return fully_shard(core)

    @contextlib.contextmanager
    def accumulating(self, core: Any, last: bool) -> Iterator[None]:
        core.set_requires_gradient_sync(last)
        yield


class DeepSpeedZero(DataParallel):
    """DeepSpeed's ZeRO, which clips and steps by itself, and whose state is in its own hands: such
    a run keeps no checkpoints."""

    resumable = False
    wrap, accumulating = SingleProcess.wrap, SingleProcess.accumulating  # not Accelerate's

    def __init__(self, stage: int, config: LearnerConfig):
        try:
            import deepspeed  # type: ignore[reportMissingImports]
        except ImportError:
            raise SharpenError("parallel=zero: pip install 'sharpen[deepspeed]'") from None
        cuda = torch.cuda.is_available()
        deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=False)
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.settings = {
            "train_micro_batch_size_per_gpu": 1,  # we cut the step ourselves
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.clip_norm,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": cuda},
        }

    def prepare(self, core: Any, optimizer: Any) -> tuple[Any, Any]:
        import deepspeed  # type: ignore[reportMissingImports]

        given = {"model": core, "optimizer": optimizer, "config": self.settings}
        engine, wrapped, *_ = deepspeed.initialize(**given)
        return engine, wrapped

    def backward(self, core: Any, loss: torch.Tensor, last: bool) -> None:
        core.set_gradient_accumulation_boundary(last)
        core.backward(loss)

    def step(self, core: Any, optimizer: Any, parameters: Sequence[Any], clip: float) -> float:
        core.step()
        return float(core.get_global_grad_norm())

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[reportMissingImports]

        whole = safe_get_full_fp32_param(tensor)
        return (tensor if whole is None else whole).detach()


def processes(config: LearnerConfig) -> SingleProcess:
    """What the launcher started and the config asks for."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        if config.parallel != "auto":
            start = "start several with torchrun --nproc_per_node N -m sharpen.cli.main train sft …"
            raise SharpenError(f"parallel={config.parallel}: there is one process; {start}")
        return SingleProcess()
    atexit.register(leave)
    if config.parallel.startswith("zero"):
        return DeepSpeedZero(int(config.parallel[-1]), config)
    return FSDP2() if config.parallel == "fsdp2" else DataParallel()


def leave() -> None:
    """Take leave of the others: threads that still talk to them abort an interpreter that ends."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
