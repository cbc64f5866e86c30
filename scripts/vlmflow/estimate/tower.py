"""The bytes that the picture tower and the mergers behind it need on one GPU, counted as in `activations`.

A frozen tower computes without a graph (ms-swift's `patch_frozen_module`): only its features stay. If a part of it is
trained, gradient checkpointing covers its blocks too (`vit_gradient_checkpointing`).
"""

from dataclasses import dataclass

from vlmflow.estimate.activations import Batch, casts, linear_inputs
from vlmflow.estimate.parameters import ALIGNER, TOWER
from vlmflow.estimate.shape import VisionShape
from vlmflow.estimate.way import FP32, Way


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
        linear_inputs([one], way, patches, TOWER, kept=kept)
        for one, kept in ((qkv, False), (projection, True), (first, False), (second, False))
    )
    return saved * patches + inputs + casts(vision.block, way, TOWER)


def _mergers(vision: VisionShape, way: Way, patches: int) -> int:
    """Return what the mergers save: the norm, the inputs of both layers, and that of GELU."""
    first, second = vision.merger
    tokens = patches // vision.patches_per_token
    each = (_norm(vision.hidden_size, way) * patches) + way.compute * first.outputs * tokens
    each += sum(linear_inputs([one], way, tokens, ALIGNER) for one in (first, second))
    return (1 + vision.levels) * (each + casts(vision.merger, way, ALIGNER))


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
