"""What chose a run's settings: the block that a search's `best.yaml` sets."""

from typing import Annotated, Any

from pydantic import Field

from vlmflow.config.settings import Count, Name, Positive, Settings


class ChosenBy(Settings):
    """The search that chose a run's settings (docs/search.md)."""

    search: Name
    """Its name."""

    trial: Count
    """The number of the trial whose settings it recommends; 0 has the run's own."""

    trials: Positive
    """How many it had."""

    study: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of its last `study.json`."""

    settings: dict[str, bool | int | float | str]
    """The values that it chose, by key of `train`; the run must have them."""

    def in_words(self) -> str:
        """Return it for people, and for provenance.json."""
        which = f"best of {self.trials}" if self.trial else f"the run's own settings; none of {self.trials} beat them"
        return f"search {self.search}, trial {self.trial} ({which}), study.json with sha256 {self.study}"

    def refuse_others(self, train: Any) -> None:
        """Raise ValueError with the first key of `train` that has another value than the search chose."""
        for key, chosen in self.settings.items():
            value = train
            for name in key.split("."):
                value = getattr(value, name, None)
            if value != chosen:
                raise ValueError(
                    f"chosen_by: search {self.search} chose {key}: {chosen}, but train.{key} is {value}; name "
                    "best.yaml after your other files, or remove chosen_by"
                )
