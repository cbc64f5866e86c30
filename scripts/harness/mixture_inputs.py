"""The files that the rule of mixtures needs, and where other rules find those of a mixture."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from vlmflow.config.data_settings import RAW_SPLITS, DatasetSettings
from vlmflow.config.model import Config


class MixtureInputs:
    """The input functions that know of mixtures; `RuleInputs` has them too."""

    _settings: Config

    def member_pictures(self, wildcards: Any) -> list[str]:
        """The image manifests of the data sets that the mixture `dataset` mixes."""
        return self.with_pictures(self._settings.members(wildcards.dataset), "images/{member}/{split}.jsonl")

    def with_pictures(self, members: Mapping[str, DatasetSettings], pattern: str) -> list[str]:
        """Return files of every raw split of those data sets that have pictures."""
        return [
            pattern.format(member=name, split=split)
            for name, member in members.items()
            if member.has_manifests
            for split in splits_of(self._settings, name)
        ]

    def of_members(self, *files: str) -> Callable[[Any], list[str]]:
        """Some files of each of the data sets that the mixture `dataset` mixes.

        It ends the process if one has skip_images.
        """

        def named(wildcards: Any) -> list[str]:
            self.refuse_unchecked_pictures(wildcards.dataset, f"mixture {wildcards.dataset} would have")
            return [f"data/{member}/{file}" for member in self._settings.members(wildcards.dataset) for file in files]

        return named

    def refuse_unchecked_pictures(self, dataset: str, what: str) -> None:
        """End the process if a data set, or one that it mixes, has skip_images. what: what would have its pictures."""
        for name, member in self._settings.members(dataset).items():
            if member.skip_images:
                sys.exit(
                    f"datasets.{name}.skip_images: true is only for inspecting texts; {what} unchecked pictures\n"
                    "  what to do: remove it, or choose another data set"
                )

    def searched(self, wildcards: Any) -> str:
        """The rows of wildcard `dataset` among which near-duplicates of its test split are searched.

        A mixture has no others than its train rows, since its data sets search theirs themselves.
        """
        mixture = wildcards.dataset in self._settings.mixtures
        return f"data/{wildcards.dataset}/train.jsonl" if mixture else f"converted/{wildcards.dataset}/train.jsonl"

    def account_of_searched(self, wildcards: Any) -> str:
        """The account with their digest."""
        mixture = wildcards.dataset in self._settings.mixtures
        return f"data/{wildcards.dataset}/stats.json" if mixture else f"converted/{wildcards.dataset}/train.unread.json"


def splits_of(settings: Config, dataset: str) -> list[str]:
    """Return the raw splits of a data set, in the order of RAW_SPLITS: train, and those others that it names.

    A mixture has no raw rows, and all splits.
    """
    own = settings.raw_datasets.get(dataset)
    return [split for split in RAW_SPLITS if own is None or getattr(own, split)]
