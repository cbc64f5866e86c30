"""What a training of the model's own weights leaves in each checkpoint beside these weights."""

import msgspec

TRAINED = "trained.json"
"""The file with the names of the trained tensors, a `TrainedTensors`."""

LOGITS = "logits.safetensors"
"""The file with some rows of the val split as the trainer fed them to the model, and the model's logits there.

Tensors by name: `row.N.NAME`, an input of row N as the model's `forward` takes it; `row.N.logits`, positions by
vocabulary in float32.
"""

ROWS = 8
"""The most rows that are stored."""

POSITIONS = 16
"""The last positions of a row whose logits are stored; they depend on everything before them."""


class TrainedTensors(msgspec.Struct, frozen=True):
    """The names of the trained tensors, as in the checkpoint's safetensors files."""

    tensors: list[str]
