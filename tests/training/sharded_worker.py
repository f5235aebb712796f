"""Run under torchrun: trains with FSDP and stops with an error unless every parameter really is sharded."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from traformer.cli import leave
from traformer.runs.config import RunConfig
from traformer.training import loop

original = loop._Run.train


def checked_train(self):
    world = dist.get_world_size()
    total = sum(parameter.numel() for parameter in self.parameters.values())
    local = sum(parameter.to_local().numel() for parameter in self.parameters.values())
    counts = [None] * world
    dist.all_gather_object(counts, local)
    assert sum(counts) == total, (counts, total)
    assert abs(local - total / world) <= 0.1 * total, f"{local} of {total} elements are here, with {world} processes"
    result = original(self)
    # The optimizer's moments are sharded too, after steps were made.
    moments = [state["exp_avg"] for state in self.optimizer.state.values()]
    assert moments and sum(moment.to_local().numel() for moment in moments) == local
    if dist.get_rank() == 0:
        print(f"sharded: {local} of {total} elements here")
    return result


if __name__ == "__main__":
    loop._Run.train = checked_train
    torch.manual_seed(0)
    path, config = sys.argv[1:]
    loop.train(
        RunConfig.from_dict(json.loads(config)), path, parallel="fsdp", resume="--resume" in sys.argv, quiet=True
    )
    leave(0)
