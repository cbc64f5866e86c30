"""A few seconds of data-parallel training on random data: can the processes of a run reach each other, and how fast?

The training image's Python gets this file as text and runs it under torchrun. The first process, and every one that
fails, prints one line of JSON: {backend, processes, device, gigabytes_per_second, shared_memory_mb} or {wrong}.

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


def main(rank: int, processes: int) -> dict[str, Any]:
    """Train, compare the weights and measure the bandwidth; returns the content of the line to print."""
    cuda = "cuda" in sys.argv[1:]
    if cuda and torch.cuda.device_count() < processes:
        return {"wrong": f"the pod sees {torch.cuda.device_count()} of {processes} GPUs"}
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[rank] if cuda else None)
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
    speed = bandwidth(device, processes)
    dist.destroy_process_group()
    if not torch.equal(highest, lowest):
        return {"wrong": "after training the processes hold different weights: their gradients were not exchanged"}
    if not losses[-1] < losses[0]:
        return {"wrong": f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"}
    return {
        "backend": "nccl" if cuda else "gloo",
        "processes": processes,
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "gigabytes_per_second": speed,
        "shared_memory_mb": shutil.disk_usage("/dev/shm").total // 1_000_000,  # noqa: S108
    }


def bandwidth(device: torch.device, processes: int) -> float:
    """Return the bus bandwidth in GB/s as nccl-tests define it: 2 (n-1)/n of the bytes, per second."""
    numbers = torch.ones(ELEMENTS, device=device)
    dist.all_reduce(numbers)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / ROUNDS
    return 2 * (processes - 1) / processes * ELEMENTS * 4 / seconds / 1e9


if __name__ == "__main__":
    place = int(os.environ["RANK"])
    try:
        said = main(place, int(os.environ["WORLD_SIZE"]))
    except Exception as error:
        said = {"wrong": f"process {place}: {type(error).__name__}: {error}"}
    if place == 0 or "wrong" in said:
        print(json.dumps(said), flush=True)
    sys.exit("wrong" in said)
