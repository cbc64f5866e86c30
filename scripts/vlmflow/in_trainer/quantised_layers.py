"""Keeps the layers of a quantised base as they were loaded."""

from typing import Any


def keep_their_form(model: Any) -> None:
    """Forbid bitsandbytes' layers to repack their weights at the first evaluation on a CPU with AVX512-BF16.

    It computes a little differently afterwards (bitsandbytes 0.50, nn/modules.py, `Linear4bit.forward`), so a training
    that resumes at an evaluated step would not have an unbroken one's losses. On a GPU this changes nothing.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
