"""What a run needs on disk."""

from vlmflow.estimate.accounts import Disk
from vlmflow.estimate.estimate_input import EstimateInput
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.states import base_bytes, trained_of
from vlmflow.estimate.training_mode import BF16

BEING_WRITTEN = 1
"""A new checkpoint is complete before an old one is removed."""


def disk(inputs: EstimateInput) -> Disk:
    """Return the bytes of the models and of the checkpoints; the models are in 16 bits, as they are published."""
    model = weights_of(inputs.shape) * BF16
    mode, trained = inputs.mode, trained_of(inputs.shape, inputs.mode)
    saved = base_bytes(inputs.shape, mode) if mode.is_full else trained * mode.trained_bytes
    # DeepSpeed's mp_rank_00_model_states.pt has them once more, unless they are sharded.
    again = saved if mode.sharding.engine == "deepspeed" and mode.sharding.weights == 1 else 0
    checkpoint = saved + again + trained * mode.optimizer_bytes
    return Disk(model, model, checkpoint, (inputs.settings.keep_checkpoints + BEING_WRITTEN) * checkpoint)
