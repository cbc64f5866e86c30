"""A few seconds of data-parallel training on random data: can the processes of a run reach each other, and how fast?

The training image's Python gets this file as text and runs it under torchrun. The first process, and every one that
fails, prints one line of JSON: {backend, nodes, processes, device, gigabytes_per_second, within_node, between_nodes,
shared_memory_mb} or {wrong}.

usage: ddp_trial.py [cuda]; cuda if the pod requested GPUs
"""

import json
import os
import shutil
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

STEPS = 20
ELEMENTS = 16 * 1024 * 1024
"""Numbers of 4 bytes that the processes sum up to measure the bandwidth."""
ROUNDS = 3


def main(rank: int, processes: int, local: int, on_node: int) -> dict[str, Any]:
    """Train, compare the weights and measure the bandwidth; returns the content of the line to print.

    local: this process's number on its node. on_node: the processes of a node.
    """
    cuda = "cuda" in sys.argv[1:]
    if cuda and torch.cuda.device_count() < on_node:
        return {"wrong": f"the pod sees {torch.cuda.device_count()} of {on_node} GPUs"}
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[local] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(device)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - x.sum(1, keepdim=True) / 16).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in layers.parameters()])
    highest, lowest = weights.clone(), weights.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    speed, nodes = bandwidth(device, list(range(processes))), processes // on_node
    within = [bandwidth(device, list(range(node * on_node, (node + 1) * on_node))) for node in range(nodes)]
    between = bandwidth(device, list(range(0, processes, on_node)))
    dist.destroy_process_group()
    if not torch.equal(highest, lowest):
        return {"wrong": "after training the processes hold different weights: their gradients were not exchanged"}
    if not losses[-1] < losses[0]:
        return {"wrong": f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"}
    return {
        "backend": "nccl" if cuda else "gloo",
        "nodes": nodes,
        "processes": processes,
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "gigabytes_per_second": speed,
        "within_node": within[0],
        "between_nodes": between,
        "shared_memory_mb": shutil.disk_usage("/dev/shm").total // 1_000_000,  # noqa: S108
    }


def bandwidth(device: torch.device, ranks: list[int]) -> float:
    """Return the bus bandwidth among some processes in GB/s, as nccl-tests define it: 2 (n-1)/n of the bytes a second.

    All processes must call it; those that are not among them only wait. One process alone has none: 0.
    """
    count, group = len(ranks), dist.new_group(ranks)
    if count == 1:
        return 0.0
    seconds = 0.0
    if dist.get_rank() in ranks:
        numbers = torch.ones(ELEMENTS, device=device)
        dist.all_reduce(numbers, group=group)
        dist.barrier(group)
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            dist.all_reduce(numbers, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / ROUNDS
    dist.barrier()
    return 2 * (count - 1) / count * ELEMENTS * 4 / seconds / 1e9 if seconds else 0.0


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    try:
        numbers = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        answer = main(rank, *numbers)
    except Exception as error:
        answer = {"wrong": f"process {rank}: {type(error).__name__}: {error}"}
    if rank == 0 or "wrong" in answer:
        print(json.dumps(answer), flush=True)
    sys.exit("wrong" in answer)
