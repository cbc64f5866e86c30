"""`stats.json`, the account of a data set: where every raw row went, and digests of what it was made from and holds."""

import msgspec

from vlmflow.config import raw_forms
from vlmflow.pictures.picture_counts import NotChecked, PictureCounts
from vlmflow.rows.rejects import LEFT_OUT
from vlmflow.rows.unread import UnreadKeys


class SplitCounts(msgspec.Struct):
    """Where the rows of one raw split went."""

    rows_in: int
    """All of them: those kept, and those of `rejected` together."""

    kept: int

    rejected: dict[str, int]
    """By reason, those left out on purpose among them."""

    @property
    def rejects(self) -> dict[str, int]:
        """The rejected rows by reason, without those left out on purpose."""
        return {reason: count for reason, count in self.rejected.items() if reason not in LEFT_OUT}

    @property
    def rows_left_out(self) -> dict[str, int]:
        """The rows that the configuration does not ask for, by reason."""
        return {reason: count for reason, count in self.rejected.items() if reason in LEFT_OUT}

    @property
    def went(self) -> tuple[int, int, int, int]:
        """Rows in, kept, rejected and left out; the first is the sum of the others."""
        return self.rows_in, self.kept, sum(self.rejects.values()), sum(self.rows_left_out.values())


class EditedFile(msgspec.Struct):
    """A file of edited rows (`datasets.NAME.mended`), as the configuration names it."""

    file: str
    sha256: str


class RawFile(msgspec.Struct):
    """A file of raw rows."""

    file: str
    bytes: int
    sha256: str


class RulesUsed(msgspec.Struct, omit_defaults=True):
    """The settings that decided over rows; see docs/config.md."""

    max_history_rounds: int | None
    val_share: float
    seed: int
    max_reject_share: float
    row_limits: dict[str, int]
    test_share: float
    near_duplicates: dict[str, int | bool] | None = None
    """Left out where near-duplicates of the test split stay."""


class RowStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part that `validate` counts. Tables whose fields say no more are by raw split ("train", "test")."""

    train: SplitCounts

    test: SplitCounts | None = None
    """Left out where there is no raw test split."""

    examples: dict[str, int]
    """Rows of train.jsonl, val.jsonl and test.jsonl: more than raw rows in the timestep form."""

    kept_by_source: dict[str, dict[str, int]]
    """Raw rows by the source that they name."""

    kept_by_attempts: dict[str, dict[int, int]]
    """Raw rows by their number of attempts."""

    mended_rows: dict[str, int]
    """Raw rows in whose place an edited row was taken."""

    score_field_differs: dict[str, int]
    """Raw rows of FIRE whose field `score` differs from the feedback's texts, which count."""

    pictures: dict[str, PictureCounts]

    unread: dict[str, UnreadKeys]

    digests: dict[str, str]
    """SHA-256 of train.jsonl, val.jsonl, test.jsonl and quarantine.jsonl by name, and as `pictures` one over names and
    contents of the pictures of train and val."""

    raw: dict[str, list[RawFile]]

    @property
    def splits(self) -> dict[str, SplitCounts]:
        """The raw splits by name."""
        return {"train": self.train} | ({"test": self.test} if self.test else {})


class Stats(RowStats):
    """The whole account. Its own keys come first in the file: those of RowStats are `kw_only`."""

    dataset: str
    """The name in the configuration."""

    kind: str
    modality: str
    skip_images: bool
    form: str
    mended: list[EditedFile]
    settings: RulesUsed

    def __post_init__(self) -> None:
        """Tell splits whose pictures nobody checked from those that name none."""
        if not self.pictures_checked:
            self.pictures = {split: NotChecked() for split in self.pictures}

    @property
    def pictures_checked(self) -> bool:
        """Whether the pictures were checked: rows have some, and they were not skipped."""
        return self.modality == "image" and not self.skip_images

    @property
    def made_of(self) -> str:
        """What the rows are made of, in a few words."""
        has_form = "form" in raw_forms.form_of(self.kind).settings
        return f"{self.form} form" if has_form else f"rows of kind {self.kind}"
