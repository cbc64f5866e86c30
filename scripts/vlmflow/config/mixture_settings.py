"""The settings of a mixture of data sets, and what its members have in common."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, field_validator

from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import MOST, Name, NearDuplicates, PictureLimits, Seed, Settings

AMOUNT = r"^(?:all|[0-9]+(?:\.[0-9]+)? ?%|[0-9]+ rows?)$"

MOST_REPEATS = 100


@dataclass(frozen=True)
class Amount:
    """How much of a data set's train rows a mixture has: a share of them, or a number of rows; the other is None."""

    share: Fraction | None = None
    rows: int | None = None


def amount_of(text: str) -> Amount:
    """Return what `all`, `30%` or `5000 rows` means. text: a checked value of `mix`."""
    if text == "all":
        return Amount(share=Fraction(1))
    number, percent, _ = text.partition("%")
    return Amount(share=Fraction(number.strip()) / 100) if percent else Amount(rows=int(text.split()[0]))


def _checked(value: Any) -> Any:
    """Return a value of `mix` that means something; ValueError says what it could be."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(
            f"{value} could be a share of the data set, a share of the mixture, or a number of rows; write 30% of its "
            "train rows as 30%, each of them twice as 200%, 5,000 of them as 5000 rows, and all as all"
        )
    if not isinstance(value, str) or not re.fullmatch(AMOUNT, value):
        raise ValueError(f"{value!r} is not allowed; it must be all, a share (30%, 200%) or a number (5000 rows)")
    amount = amount_of(value)
    if amount.share is not None and not 0 < amount.share <= MOST_REPEATS:
        raise ValueError(f"{value!r} is not allowed; it must be more than 0% and at most {MOST_REPEATS * 100}%")
    if amount.rows is not None and not 0 < amount.rows <= MOST:
        raise ValueError(f"{value!r} is not allowed; it must be at least 1 row and at most {MOST}")
    return value


class MixtureSettings(Settings):
    """A mixture of other data sets, which is a data set itself: runs, pages and targets take it as any other.

    Val and test are those of its data sets together. A train row is left out if any of its pictures, or without
    one its prompt, is in the test or val rows of any of them.
    """

    mix: dict[Name, Annotated[str, Field(pattern=AMOUNT), BeforeValidator(_checked)]]
    """By data set, how much of its train rows: `all`; a share, as in `30%`, where `200%` is each row twice; or a
    number, as in `5000 rows`. A hash of seed and id draws rows: more include the fewer. A further data set changes none
    of them, unless its test or val has their pictures or prompts."""

    seed: Seed = 42
    """Decides which rows are drawn."""

    _members: dict[str, DatasetSettings] = PrivateAttr(default_factory=dict)

    @field_validator("mix")
    @classmethod
    def _something_is_mixed(cls, mix: dict[str, str]) -> dict[str, str]:
        if not mix:
            raise ValueError("it names no data set; write { NAME: all }, with names of datasets")
        return mix

    @property
    def members(self) -> dict[str, DatasetSettings]:
        """The mixed data sets by name, once the whole configuration was read."""
        return self._members

    @property
    def has_manifests(self) -> bool:
        """Whether any of the data sets has checked pictures."""
        return any(member.has_manifests for member in self._members.values())

    @property
    def modality(self) -> str | None:
        """`text` if no row can have a picture."""
        return None if any(member.modality != "text" for member in self._members.values()) else "text"

    @property
    def form(self) -> str:
        """`timestep` if all rows are of that form."""
        timestep = all(member.form == "timestep" for member in self._members.values())
        return "timestep" if timestep else "trajectory"

    @property
    def kinds(self) -> list[str]:
        """The kinds of the raw rows, each once."""
        return sorted({kind for member in self._members.values() for kind in member.kinds})

    @property
    def one_prompt(self) -> bool:
        """Whether all rows of one of the data sets have the same prompt."""
        return any(member.one_prompt for member in self._members.values())

    @property
    def all_addresses(self) -> list[str]:
        """The addresses of all raw splits."""
        return list(dict.fromkeys(address for member in self._members.values() for address in member.all_addresses))

    @property
    def licence(self) -> str | None:
        """The licence of all data sets, or that of each if they differ; None if none is stated."""
        stated = {name: member.licence for name, member in self._members.items()}
        if len(set(stated.values())) == 1:
            return next(iter(stated.values()))
        return "; ".join(f"{name}: {licence or 'unknown'}" for name, licence in stated.items())

    @property
    def source_licences(self) -> dict[str, str]:
        """The licences of single sources, by the sources' names in the mixture (`rows/mixture_files`)."""
        return {
            f"{name}/{source}": licence
            for name, member in self._members.items()
            for source, licence in member.source_licences.items()
        }

    @property
    def picture_limits(self) -> PictureLimits:
        """Limits that every picture of the mixture is within: pages decode them again."""
        limits = [member.picture_limits for member in self._members.values()]
        return PictureLimits(
            min_side=min(limit.min_side for limit in limits),
            max_aspect=max(limit.max_aspect for limit in limits),
            max_pixels=max(limit.max_pixels for limit in limits),
            max_bytes=max(limit.max_bytes for limit in limits),
        )

    @property
    def near_duplicates(self) -> NearDuplicates:
        """How near-duplicates between the data sets are searched. They stay: each data set drops only its own."""
        distance = max(member.near_duplicates.picture_distance for member in self._members.values())
        return NearDuplicates(picture_distance=distance)


def _is_mixture(block: Any) -> bool:
    return "mix" in block if isinstance(block, dict) else isinstance(block, MixtureSettings)


AnyDataset = Annotated[
    Annotated[DatasetSettings, Tag("DatasetSettings")] | Annotated[MixtureSettings, Tag("MixtureSettings")],
    Discriminator(lambda block: (MixtureSettings if _is_mixture(block) else DatasetSettings).__name__),
]
"""A data set with raw rows of its own, or a mixture; the tags are the names in the JSON Schema, for messages."""


def take_members(datasets: Mapping[str, DatasetSettings | MixtureSettings]) -> None:
    """Give every mixture the settings of the data sets that it mixes.

    Raises ValueError with the key if one of them is unknown, or a mixture.
    """
    for name, mixture in datasets.items():
        if not isinstance(mixture, MixtureSettings):
            continue
        for member in mixture.mix:
            key = f"datasets.{name}.mix.{member}"
            if member not in datasets:
                raise ValueError(f"{key}: unknown data set {member!r}; datasets has: {', '.join(datasets)}")
            if isinstance(datasets[member], MixtureSettings):
                kind = "the mixture itself" if member == name else "a mixture, too; mix its data sets"
                raise ValueError(f"{key}: {member!r} is {kind}")
        members = {member: datasets[member] for member in mixture.mix}
        mixture._members = {member: block for member, block in members.items() if isinstance(block, DatasetSettings)}
