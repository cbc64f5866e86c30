"""What wildcards may be, and what the results of shared stages are called."""

import re
from collections.abc import Iterable

from vlmflow.config.model import Config


class Names:
    """The configuration's names, as constraints of wildcards."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        parts = settings.cluster.pods_per_stage
        self.part = f".{{part}}-of-{parts}" if parts > 1 else ""
        """What stands in the names of a stage's results where several pods share it: `.{part}-of-4`, else nothing."""

    def constraints(self) -> dict[str, str]:
        """Give the constraints of all wildcards that several rules have."""
        return {
            "run": _one_of(self._settings.runs),
            "model": _one_of(self._settings.models),
            "dataset": _one_of(self._settings.datasets),
            "split": "train|test",
        }

    def fire_datasets(self) -> str:
        """Give the constraint that leaves the data sets of kind fire, which has rules of its own."""
        return _one_of(name for name, block in self._settings.datasets.items() if block.kind == "fire")

    def other_datasets(self) -> str:
        """Give the constraint that leaves the data sets of all other kinds."""
        return _one_of(name for name, block in self._settings.datasets.items() if block.kind != "fire")


def _one_of(names: Iterable[str]) -> str:
    """Give a wildcard constraint: any of the names, or nothing at all where there are none."""
    return "|".join(map(re.escape, names)) or "$^"
