"""`stats.json`, the account of a data set: the results of all raw rows, and digests of its inputs and outputs."""

import msgspec

from vlmflow.config import raw_forms
from vlmflow.pictures.picture_counts import NotChecked, PictureCounts
from vlmflow.rows.rejects import LEFT_OUT
from vlmflow.rows.trained_text import last_answer_only
from vlmflow.rows.unread_keys import UnreadKeys


class SplitCounts(msgspec.Struct):
    """The results of the rows of one raw split."""

    rows_in: int
    """All rows: `kept` plus all of `rejected`."""

    kept: int

    rejected: dict[str, int]
    """By reason, including the rows that were not requested."""

    @property
    def rejects(self) -> dict[str, int]:
        """The rejected rows by reason, without those that were not requested."""
        return {reason: count for reason, count in self.rejected.items() if reason not in LEFT_OUT}

    @property
    def rows_left_out(self) -> dict[str, int]:
        """The rows that the configuration does not request, by reason."""
        return {reason: count for reason, count in self.rejected.items() if reason in LEFT_OUT}

    @property
    def went(self) -> tuple[int, int, int, int]:
        """The numbers of rows in, kept, rejected and left out; the first is the sum of the others."""
        return self.rows_in, self.kept, sum(self.rejects.values()), sum(self.rows_left_out.values())


class EditedFile(msgspec.Struct):
    """A file of edited rows (`datasets.NAME.fixed_rows`), by its path in the configuration."""

    file: str
    sha256: str


class RawFile(msgspec.Struct):
    """A file of raw rows."""

    file: str
    bytes: int
    sha256: str


class RulesUsed(msgspec.Struct, omit_defaults=True):
    """The settings on which the results depend; see docs/config.md."""

    max_history_rounds: int | None
    val_share: float
    seed: int
    max_reject_share: float
    row_limits: dict[str, int]
    test_share: float
    min_score: int | None = None
    """Absent if all attempts are trained."""

    single_turn: str | None = None
    """Absent if trajectories have no further row."""

    thoughts: str = "keep"
    feedback_form: str = "raw"
    """Both absent if the texts are those of the raw rows."""

    train_on: str = "all"
    """Absent if all answers are trained, or the form decides."""

    near_duplicates: dict[str, int | bool] | None = None
    """Absent if near-duplicates of the test split are kept."""


class MemberStats(msgspec.Struct, omit_defaults=True):
    """What a mixture has of one of its data sets."""

    drawn: str
    """How much of its train rows: the value of `mix`."""

    kind: str
    form: str
    train_on: str
    """These are its own."""

    train: SplitCounts
    val: SplitCounts
    test: SplitCounts
    examples: dict[str, int]
    """Both are its part of the mixture's."""

    digests: dict[str, str]
    """SHA-256 of its train.jsonl, val.jsonl and test.jsonl by name."""

    mended: list[EditedFile] = []


class RowStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part that `validate` counts. All tables but `examples` and `digests` are by raw split."""

    train: SplitCounts

    val: SplitCounts | None = None
    test: SplitCounts | None = None
    """Both absent if there is no such raw split."""

    examples: dict[str, int]
    """The number of rows in train.jsonl, val.jsonl and test.jsonl; the timestep form and single_turn make several of a
    raw row, and a mixture repeats rows."""

    kept_by_source: dict[str, dict[str, int]]
    """Kept raw rows by source."""

    kept_by_attempts: dict[str, dict[int, int]]
    """Kept raw rows by number of attempts, up to the last one that is trained."""

    trained_characters: dict[int, int] = {}
    """The characters of the trained answers of train.jsonl, by score. Absent if answers have no scores."""

    mended_rows: dict[str, int]
    """Raw rows that an edited row replaced."""

    score_field_differs: dict[str, int]
    """Kept raw rows of FIRE whose field `score` differs from the scores in the texts, which are used."""

    pictures: dict[str, PictureCounts]

    unread: dict[str, UnreadKeys]

    digests: dict[str, str]
    """SHA-256 of train.jsonl, val.jsonl, test.jsonl and quarantine.jsonl by name, and under `pictures` one SHA-256 over
    the pictures of train and val (`image_manifest.pictures_digest`)."""

    raw: dict[str, list[RawFile]]

    @property
    def splits(self) -> dict[str, SplitCounts]:
        """The raw splits by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: counts for name, counts in named.items() if counts}


MIXTURE = "mixture"
"""The kind of a mixture in its account. The rows in are those of its data sets."""


class Stats(RowStats):
    """The whole account. These keys come first in the file, because those of RowStats are `kw_only`."""

    dataset: str
    """Its name in the configuration."""

    kind: str
    modality: str | None
    skip_images: bool
    form: str
    mended: list[EditedFile]
    settings: RulesUsed

    members: dict[str, MemberStats] = {}
    """By data set, what a mixture has of each; its own counts are their sums. Absent if it is no mixture."""

    def __post_init__(self) -> None:
        """Replace the counts of unchecked pictures, which would say that rows name no pictures."""
        if not self.pictures_checked:
            self.pictures = {split: NotChecked() for split in self.pictures}

    @property
    def pictures_checked(self) -> bool:
        """Whether pictures were checked: rows may have pictures, and skip_images is not set."""
        return self.modality != "text" and not self.skip_images

    @property
    def last_answer_only(self) -> bool:
        """Whether only the last answer of a row is trained."""
        return last_answer_only(self.form, self.settings.train_on)

    @property
    def has_pictures(self) -> bool:
        """Whether any row has a picture."""
        return any(counts.usable for counts in self.pictures.values())

    @property
    def scored(self) -> list[str]:
        """The data sets whose answers may have scores: itself, or those of a mixture whose rows have a min_score."""
        scored = raw_forms.kinds_with("min_score")
        return [name for name, one in self.members.items() if one.kind in scored] or [self.dataset]

    @property
    def one_prompt(self) -> bool:
        """Whether all rows have the same prompt; in a mixture those of one of its data sets."""
        return any(raw_forms.form_of(kind).one_prompt for kind in self.kinds)

    @property
    def kinds(self) -> list[str]:
        """The kinds of the raw rows, each once."""
        return sorted({member.kind for member in self.members.values()} or {self.kind})

    @property
    def made_of(self) -> str:
        """The form or kind of the rows, or what is mixed, for people."""
        if self.members:
            made_of = f"mixture of {', '.join(f'{name} ({one.drawn})' for name, one in self.members.items())}"
        else:
            has_form = "form" in raw_forms.form_of(self.kind).settings
            made_of = f"{self.form} form" if has_form else f"rows of kind {self.kind}"
        return f"{made_of}, only last answers trained" if self.settings.train_on == "last" else made_of
