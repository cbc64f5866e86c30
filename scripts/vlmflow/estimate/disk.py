"""What a run needs on disk."""

from vlmflow.estimate.accounts import Disk
from vlmflow.estimate.case import Case
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.states import trained_of
from vlmflow.estimate.way import BF16

BEING_WRITTEN = 1
"""A new checkpoint is complete before an old one is removed."""


def disk(case: Case) -> Disk:
    """Return the bytes of the models and of the checkpoints; the models are in 16 bits, as they are published."""
    model = weights_of(case.shape) * BF16
    trained = trained_of(case.shape, case.way)
    checkpoint = trained * (case.way.trained_bytes + case.way.optimizer_bytes)
    return Disk(model, model, checkpoint, (case.settings.keep_checkpoints + BEING_WRITTEN) * checkpoint)
