"""What a run needs on disk."""

from vlmflow.estimate.accounts import Disk
from vlmflow.estimate.case import Case
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.states import base_bytes, trained_of
from vlmflow.estimate.way import BF16

BEING_WRITTEN = 1
"""A new checkpoint is complete before an old one is removed."""


def disk(case: Case) -> Disk:
    """Return the bytes of the models and of the checkpoints; the models are in 16 bits, as they are published."""
    model = weights_of(case.shape) * BF16
    way, trained = case.way, trained_of(case.shape, case.way)
    saved = base_bytes(case.shape, way) if way.is_full else trained * way.trained_bytes
    # DeepSpeed's mp_rank_00_model_states.pt has them once more, unless they are sharded.
    again = saved if way.sharding.engine == "deepspeed" and way.sharding.weights == 1 else 0
    checkpoint = saved + again + trained * way.optimizer_bytes
    return Disk(model, model, checkpoint, (case.settings.keep_checkpoints + BEING_WRITTEN) * checkpoint)
