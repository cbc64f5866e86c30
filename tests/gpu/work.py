"""What this device can compute per second."""

import math
import time

import torch

FORMULA = "4·D·L + 6·A·L + 6·H·L² + 4·O·T + 2·V·P + M·P/2 + 4·W·P²"
"""The operations of a row without those that gradient checkpointing repeats; `vlmflow.estimate.work` defines them."""

WARM_UPS, PRODUCTS, ROUNDS = 3, 10, 5


def measured_peak(device: str, size: int) -> float:
    """Return the operations per second of a dense bfloat16 product of two square matrices: the best of some rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UPS):
        left @ right
    best = math.inf
    for _ in range(ROUNDS):
        begun = now(device)
        for _ in range(PRODUCTS):
            left @ right
        best = min(best, now(device) - begun)
    return PRODUCTS * 2 * size**3 / best


def now(device: str) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
