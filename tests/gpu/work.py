"""The floating-point operations of a row in training, and those that this device can do per second.

A row has L tokens, T of them trained, and a picture of P patches, four per token. A multiplication with its addition
counts as two:

    decoder     (2 + 2) · D · L    D: weights of the linear layers; forward, and backward only to the activations,
                                   since frozen weights need no gradient
    adapter     (2 + 4) · A · L    A: weights of the adapter; forward, and backward to activations and weights
    attention   (2 + 4) · H · L²   H: layers × heads × head width; queries by keys, and the result by values, each
                                   over the causal half
    output      (2 + 2) · O · T    O: vocabulary × width; only trained tokens need logits
    vision      2 · V · P + 2 · M · P / 4 + 4 · W · P²
                                   V: weights of patch embedding and blocks, M: of the mergers, W: depth × width;
                                   forward only, since nothing before the decoder is trained

These are model FLOPs (arXiv:2204.02311, appendix B) without the terms of frozen weights. They do not include padding,
the repeated computation of gradient checkpointing, norms and the optimizer; they include the unneeded gradient to the
inputs of the first decoder layer (under 1 %).
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from gpu.batches import RowSize
from vlmflow.core.files import read_json
from vlmflow.merging.safetensors_file import read_header

FORMULA = "4·D·L + 6·A·L + 6·H·L² + 4·O·T + 2·V·P + M·P/2 + 4·W·P²"

PATCHES_PER_TOKEN = 4
WARM_UPS, PRODUCTS, ROUNDS = 3, 10, 5


@dataclass(frozen=True)
class Weights:
    """The sizes in the formula: D, A, H, O, V, M, W; total: weights of the base."""

    decoder: int
    adapter: int
    attention: int
    output: int
    vision: int
    mergers: int
    vision_attention: int
    total: int

    @classmethod
    def count(cls, base: Path, adapter: Path) -> Self:
        """Read them from the files of a base model and an adapter."""
        config = read_json(base / "config.json")
        text, vision = config["text_config"], config["vision_config"]
        shapes = _shapes(base)
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}  # vectors are only added
        return cls(
            decoder=sum(size for name, size in sizes.items() if ".language_model.layers." in name),
            adapter=sum(math.prod(shape) for shape in _shapes(adapter).values()),
            attention=text["num_hidden_layers"] * text["num_attention_heads"] * text["head_dim"],
            output=text["vocab_size"] * text["hidden_size"],
            vision=sum(size for name, size in sizes.items() if ".visual.blocks." in name or ".patch_embed." in name),
            mergers=sum(size for name, size in sizes.items() if "merger" in name),
            vision_attention=vision["depth"] * vision["hidden_size"],
            total=sum(math.prod(shape) for shape in shapes.values()),
        )

    def flops(self, row: RowSize) -> float:
        """Return the operations of one row, forward and backward."""
        return (
            (4 * self.decoder + 6 * self.adapter) * row.tokens
            + 6 * self.attention * row.tokens**2
            + 4 * self.output * row.trained
            + 2 * self.vision * row.patches
            + 2 * self.mergers * row.patches / PATCHES_PER_TOKEN
            + 4 * self.vision_attention * row.patches**2
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a folder's files, by name."""
    headers = [read_header(file) for file in folder.glob("*.safetensors")]
    return {name: entry.shape for header in headers for name, entry in header.tensors.items()}


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
