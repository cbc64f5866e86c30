"""What the ranks of a training tell each other."""

import hashlib
import resource
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank; all ranks must call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_different_weights(model: torch.nn.Module) -> None:
    """Raise RuntimeError on all ranks if their trained weights differ: they do not train together."""
    digests = set(gather(_digest_of_trained(model)))
    if len(digests) > 1:
        raise RuntimeError(f"not really distributed: {len(digests)} different sets of trained weights at one step")


def peak_memory() -> int:
    """Return the most memory of this process so far, in bytes: on the GPU, or on a machine without one in all."""
    if torch.cuda.is_available():
        on_gpu: int = torch.cuda.max_memory_reserved()
        return on_gpu
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _digest_of_trained(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()
