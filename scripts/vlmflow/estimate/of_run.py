"""The estimate of a run of the configuration, from the files of earlier stages."""

import logging
from pathlib import Path

from vlmflow.config.run_blocks import EstimateBlock
from vlmflow.core.errors import VlmflowError
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.estimate.accounts import NoEstimate, Result
from vlmflow.estimate.estimate import estimate
from vlmflow.estimate.estimate_input import inputs_of
from vlmflow.estimate.row_lengths import RowLengths
from vlmflow.estimate.shape import UnknownModelError, read_shape
from vlmflow.fetch.small_files import read_small_files

log = logging.getLogger("vlmflow")


def estimate_of_run(train: Path, val: Path, summary: Path, model_files: Path, settings: EstimateBlock) -> Result:
    """Return the estimate of a run; NoEstimate if the estimate does not know its model's architecture.

    With `estimate: ignore` also NoEstimate if the model's config.json cannot be read, or has sizes that do not fit
    together.

    train, val, summary: the files of measure_lengths. model_files: the base model without its weights
    (model_files/MODEL). settings: those of the run.

    Raises VlmflowError if a file has changed, or config.json lacks a size or has a wrong one.
    """
    again = f"measure them again: snakemake --forcerun measure_lengths -- {summary}"
    refuse_other_rows(summary, [train, val], "lengths", again)
    lengths = RowLengths.read(train), RowLengths.read(val)
    try:
        shape = read_shape(read_small_files(model_files))
        return estimate(inputs_of(shape, settings, *lengths), settings.gpu, settings.gpu_hour_price)
    except VlmflowError as error:
        if not isinstance(error, UnknownModelError) and settings.estimate != "ignore":
            raise
        log.warning(f"no estimate: {error.cause}")
        return NoEstimate(error.cause)
