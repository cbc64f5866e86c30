"""Prints the rows of every pass that ms-swift's own samplers give, on each rank of several.

Run in a process of its own, because torch.distributed has one world per process; its fake backend takes part in every
collective operation alone.
"""

import json
import sys
from typing import Any

import torch.distributed as dist
from swift.dataloader.shard import BatchSamplerShard
from swift.sequence_parallel.utils import SequenceParallelSampler
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler


def passes(given: dict[str, Any]) -> list[list[list[list[int]]]]:
    """Return the batches by rank and pass. given: count, lengths, processes, sequence_parallel, batch, passes, …"""
    ranks = []
    for rank in range(given["processes"]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=given["processes"])
        ranks.append(_of_this_rank(given))
        dist.destroy_process_group()
    return ranks


def _of_this_rank(given: dict[str, Any]) -> list[list[list[int]]]:
    parallel, size = given["sequence_parallel"], given["batch"]
    if parallel > 1:
        shape, names = (given["processes"] // parallel, parallel), ("data", "sequence")

        class Mesh:
            device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

        sampler = SequenceParallelSampler(Mesh, range(given["count"]), seed=given["seed"])
        batches = BatchSampler(sampler, size, drop_last=False)
    else:
        grouped = {"group_by_length": True, "lengths": given["lengths"]} if given["group_by_length"] else {}
        sampler = batches = BatchSamplerShard(given["count"], size, True, False, given["seed"], **grouped)
    made = []
    for epoch in range(given["passes"]):
        sampler.set_epoch(epoch)
        made.append(list(batches)[: len(batches)])
    return made


if __name__ == "__main__":
    todo = json.loads(sys.argv[1])
    print(json.dumps([passes(each) for each in todo]))
