"""The bytes that the picture tower and the mergers behind it need on one GPU, from what PyTorch keeps.

Each function below counts the tensors that autograd saves, as the modules of transformers 5.19 and peft 0.20 make them
on a CUDA device (modeling_qwen3_vl.py, tuners/lora/layer.py):

    norm (LayerNorm)   its input in float32, mean and deviation
    attention          queries, keys, values and result in 16 bits, one float32 per head (flash and efficient kernels)
    linear, adapted    the dropout's mask (1 byte per number), its input after dropout, the product with A
    linear, trained    its input

`tests/stages/test_estimated_memory.py` compares the sums with the tensors of real models.

A frozen tower computes without a graph (ms-swift's `patch_frozen_module`): only its features stay. If a part of it is
trained, gradient checkpointing covers its blocks too (`vit_gradient_checkpointing`).
"""

from dataclasses import dataclass

from vlmflow.estimate.parameters import ALIGNER, ALL_LINEAR, TOWER
from vlmflow.estimate.pass_memory import Batch
from vlmflow.estimate.shape import Matrix, VisionShape
from vlmflow.estimate.way import FP32, Way

MASK = 1
"""Bytes of a number in a dropout mask (`native_dropout`: bool)."""


@dataclass(frozen=True)
class Pictures:
    """Bytes of the tower. kept: until the backward pass reaches it. passing: at most, while the tower computes."""

    kept: int
    passing: int


NOTHING = Pictures(0, 0)


def picture_tower(vision: VisionShape | None, way: Way, batch: Batch) -> Pictures:
    """Return the bytes for the pictures of a batch."""
    if vision is None or not batch.pictures:
        return NOTHING
    patches = batch.pictures * vision.patches_per_token
    features = (1 + vision.levels) * way.compute * vision.out_hidden_size * batch.pictures
    pixels, pixels_cast = (number * vision.patch_values * patches for number in (FP32, way.compute))
    graph = _mergers(vision, way, patches) if ALIGNER in way.trained else 0
    if TOWER in way.trained:
        residual = way.base * vision.hidden_size * patches
        graph += vision.depth * (residual if way.gradient_checkpointing else _block(vision, way, patches))
        graph += pixels_cast if way.is_full else 0  # the gradient of the convolution's weights needs its input
    return Pictures(pixels + features + graph, pixels + pixels_cast + graph + _computing(vision, way, patches))


def _block(vision: VisionShape, way: Way, patches: int) -> int:
    """Return what one block saves: norms, attention, the inputs of its layers; gate and result of its MLP."""
    qkv, projection, first, second = vision.block
    width = vision.hidden_size
    attention = way.compute * (3 + 1 + 2) * width + FP32 * vision.num_heads  # q, k after rotation; qkv itself; result
    saved = 2 * _norm(width, way) + attention + way.compute * vision.intermediate_size
    inputs = sum(
        _input(one, way, patches, TOWER, kept=kept)
        for one, kept in ((qkv, False), (projection, True), (first, False), (second, False))
    )
    return saved * patches + inputs + _casts(vision.block, way, TOWER)


def _mergers(vision: VisionShape, way: Way, patches: int) -> int:
    """Return what the mergers save: the norm, the inputs of both layers, and that of GELU."""
    first, second = vision.merger
    tokens = patches // vision.patches_per_token
    each = (_norm(vision.hidden_size, way) * patches) + way.compute * first.outputs * tokens
    each += sum(_input(one, way, tokens, ALIGNER) for one in (first, second))
    return (1 + vision.levels) * (each + _casts(vision.merger, way, ALIGNER))


def _input(matrix: Matrix, way: Way, tokens: int, part: str, *, kept: bool = False) -> int:
    """Return the saved bytes of a linear layer. kept: the layer before it saves its input anyway, as its result."""
    if way.is_full:
        return way.compute * matrix.inputs * tokens if part in way.trained and not kept else 0
    if not _is_adapted(matrix, way, part):
        return 0
    if way.adapter.dropout:
        each = (way.compute + MASK) * matrix.inputs  # the mask, and the input after dropout
    else:
        each = way.compute * matrix.inputs if way.autocast or not kept else 0
    return tokens * (each + way.compute * way.adapter.rank)


def _casts(matrices: list[Matrix], way: Way, part: str) -> int:
    """Return the bytes of the 16-bit copies that autocast makes of float32 weights, and that a layer's graph keeps."""
    if not way.autocast:
        return 0
    rank = way.adapter.rank
    adapters = sum(rank * (one.inputs + one.outputs) for one in matrices if _is_adapted(one, way, part))
    base = sum(one.weights for one in matrices) if way.base == FP32 else 0
    return way.compute * (adapters + base)


def _is_adapted(matrix: Matrix, way: Way, part: str) -> bool:
    """Return whether a linear layer of a part gets an adapter."""
    targets = way.adapter.targets
    return not way.is_full and (matrix.name in targets or (ALL_LINEAR in targets and part in way.trained))


def _norm(width: int, way: Way) -> int:
    """Return what a LayerNorm saves per row: its input (in float32 under autocast), mean and deviation."""
    return (FP32 if way.autocast else way.base) * width + 2 * FP32


def _computing(vision: VisionShape, way: Way, patches: int) -> int:
    """Return what the tower needs while it computes: its input, and at most one of the following.

    Positions: four neighbours of each patch, as they are and weighted in float32. Attention: queries, keys and values,
    and two of them rotated in float32. The MLP: its inner numbers, before and after GELU.
    """
    width = vision.hidden_size
    positions = 4 * (way.base + FP32) * width
    attention = 3 * way.compute * width + 4 * FP32 * width
    inner = 2 * way.compute * vision.intermediate_size
    return patches * (2 * way.base * width + max(positions, attention, inner))
