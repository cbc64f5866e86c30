"""Whether the rows of a batch may stand in one sequence without padding, by ms-swift's template and the model."""

from typing import Any


def joins_rows(template: Any) -> bool:
    """Return whether ms-swift's template can join rows, and each layer of the model attends to all of a row.

    Rows that stand behind each other need a mask where a layer attends to a window; a state that goes from token to
    token would go on into the next row.
    """
    supported = template.support_padding_free
    if supported is None:  # as ms-swift decides (pipelines/train/sft.py)
        supported = not template.model_meta.is_multimodal
    text = template.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    if layers is None:  # one window for all layers, such as Qwen3-MoE's
        layers = [] if getattr(text, "sliding_window", None) is None else ["sliding_attention"]
    return bool(supported) and set(layers) <= {"full_attention"}
