"""One process or many: plain, DDP, or FSDP2, as `torchrun` or `accelerate launch` started us.

torch's own wrappers are called directly: what is asked for is what runs, on CPUs too, or it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from traformer.devices import choose_device
from traformer.errors import InputError, TraformerError, unknown_name

KINDS = ("ddp", "fsdp")
T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """This process's place among the others, and the few collective operations that training needs."""

    kind: str  # "single", "ddp" or "fsdp"
    rank: int
    world: int
    device: torch.device

    @classmethod
    def start(cls, kind: str | None, device: str) -> Parallel:
        """Join the process group that the launcher describes in the environment, if there is one."""
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if kind is not None and kind not in KINDS:
            raise unknown_name("parallel", kind, KINDS)
        if kind is not None and world == 1:
            raise InputError(
                f"parallel {kind!r} needs several processes; start it with `torchrun --nproc-per-node 2 -m traformer`"
            )
        place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if world == 1:
            return cls("single", 0, 1, place)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(kind or "ddp", rank, world, place)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The module made ready for its kind; FSDP shards every block, then what is left."""
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(
                module, device_ids=[self.device.index] if self.device.type == "cuda" else None
            )
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.world,))
            for block in [*blocks, module]:
                fully_shard(block, mesh=mesh)
        return module

    @contextmanager
    def backward_of(self, module: Any, last: bool) -> Iterator[None]:
        """Gradients are exchanged in the last micro-batch of a step only."""
        if self.kind == "fsdp":
            module.set_requires_gradient_sync(last)
            yield
        elif self.kind == "ddp" and not last:
            with module.no_sync():
                yield
        else:
            yield

    def sum(self, *values: float) -> list[float]:
        """Each value added up over all processes."""
        if self.world == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` in the main process and give its result, or its user's error, to every process."""
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]  # the result, the error
        if self.is_main:
            try:
                outcome[0] = action()
            except TraformerError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def stop(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; every process takes part if it is sharded."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return (full_tensor() if full_tensor else tensor).detach().cpu()


def shard_like(tensor: Tensor, parameter: Any) -> Tensor:
    """A whole tensor laid out as `parameter` is: its shard of this process, or all of it."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device)
