"""The allowed values of wildcards, and the names of the results of shared stages."""

import re
from collections.abc import Iterable

from vlmflow.config.data_settings import RAW_SPLITS
from vlmflow.config.model import Config


class Names:
    """The configuration's names, as constraints of wildcards."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        parts = settings.cluster.pods_per_stage
        self.part = f".{{part}}-of-{parts}" if parts > 1 else ""
        """The part in the names of a stage's results if several pods share it: `.{part}-of-4`, otherwise ""."""
        self.mixtures = _one_of(settings.mixtures)
        """The constraint of wildcard `dataset` in the rule that mixes data sets."""
        self.datasets = _one_of(settings.datasets)
        """The constraint of wildcard `dataset` in rules for every data set; other rules take those with raw rows."""

    def constraints(self) -> dict[str, str]:
        """Return the constraints of the wildcards that several rules have."""
        return {
            "run": _one_of(self._settings.runs),
            "model": _one_of(self._settings.models),
            "dataset": _one_of(self._settings.raw_datasets),
            "split": "|".join(RAW_SPLITS),
            "search": _one_of(self._settings.search),
            **dict.fromkeys(("round", "rung", "slot"), r"0|[1-9]\d*"),
        }


def _one_of(names: Iterable[str]) -> str:
    """Return a wildcard constraint that matches these names, or nothing if there are none."""
    return "|".join(map(re.escape, names)) or "$^"
