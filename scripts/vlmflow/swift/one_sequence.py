"""Whether the rows of a batch may stand in one sequence without padding, by ms-swift's template and the model."""

from typing import Any


def joins_rows(template: Any) -> bool:
    """Return whether ms-swift's template can join rows, and each layer of the model attends to all of a row by sdpa.

    Rows that stand behind each other need a mask where a layer attends to a window, or eagerly; a state that goes from
    token to token would go on into the next row.
    """
    from vlmflow.swift.meta_model import class_of

    supported = template.support_padding_free
    if supported is None:  # as ms-swift decides (pipelines/train/sft.py)
        supported = not template.model_meta.is_multimodal
    text = template.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    if layers is None:  # one window for all layers, such as Qwen3-MoE's
        layers = [] if getattr(text, "sliding_window", None) is None else ["sliding_attention"]
    kind = class_of(template.config)
    return bool(supported) and kind is not None and kind._supports_sdpa and set(layers) <= {"full_attention"}
