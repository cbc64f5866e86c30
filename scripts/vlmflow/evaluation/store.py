"""Measured losses that are kept (`kept_lines`)."""

from pathlib import Path
from typing import Any

from vlmflow.evaluation.answer_losses import Measured
from vlmflow.evaluation.kept_lines import KeptLines


class LossStore(KeptLines[Measured]):
    """The losses of one model, measured in one way. folder, meaning: as for `KeptLines`."""

    def __init__(self, folder: Path, meaning: dict[str, Any]) -> None:
        super().__init__(folder, "losses", meaning, Measured)
