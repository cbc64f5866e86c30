"""The settings of one data set."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vlmflow.config.raw_forms import ANY_ROW, all_settings, form_of, kinds, kinds_with
from vlmflow.config.settings import (
    EXPONENT_FORM,
    MOST,
    NOT_IN_COLUMNS,
    Count,
    NearDuplicates,
    Number,
    PictureLimits,
    Positive,
    RowChoice,
    RowLimits,
    Seed,
    Settings,
    Share,
    Take,
)
from vlmflow.config.source import files_of, split_sample

RAW_SPLITS = ("train", "val", "test")
"""The raw splits that a data set may have files for; train it must have."""

PICTURE_KEYS = ("image_roots", "fetch_images", "skip_images", "picture_limits")
"""Settings of data sets of which rows may have pictures."""


class DatasetSettings(Settings):
    """One data set: where its raw files and pictures are, and how rows are made from them."""

    kind: Literal[*kinds()]  # type: ignore[valid-type]  # the kinds are found when this is imported
    """The raw form; docs/data.md shows a row of each."""

    train: str | Annotated[list[str], Field(min_length=1)]
    """The raw train split: hf://datasets/OWNER/NAME/FILE (pinned in pins.yaml, or with its commit:
    …/NAME@COMMIT/FILE), file:///PATH, or a path. A file is a JSON array, JSON lines, CSV (.csv, .tsv) or parquet
    (.parquet). #500 after it draws 500 of its rows. For several files give a list, or train-*-of-00004.parquet for
    four; their rows are numbered consecutively, in that order."""

    val: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The raw validation split, in the same forms. Null: see val_share."""

    test: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The raw test split, in the same forms; it stays unused until evaluation. Null: see test_share."""

    fixed_rows: str | Annotated[list[str], Field(min_length=1)] | None = None
    """An edited copy of quarantine.jsonl, or of quarantine.jsonl.part if too many rows were rejected; `row` counts from
    0. The value of `raw` in each line replaces that raw row. An object is the row (for a table, with the columns as
    keys); a text is the file's own text, JSON or a CSV line. For null (a row over 1 MiB, or one that parquet cannot
    give), write the whole row as an object; null changes nothing. For several copies, fixed one after the other, give a
    list: the later wins."""

    mended: str | Annotated[list[str], Field(min_length=1)] | None = Field(None, json_schema_extra={"deprecated": True})
    """The former name of fixed_rows; the next release does not read it."""

    modality: Literal["image", "text"] | None = None
    """image: use only rows with a picture; text: only rows without; the others are left out, and counted. null: all."""

    image_roots: list[str] = []
    """Folders that hold the pictures under the paths that the rows name; the first that has the picture wins."""

    fetch_images: bool = False
    """Fetch the pictures that image_roots lack, from the sources in picture_sources.yaml; false uses only the roots."""

    skip_images: bool = False
    """Do not check the pictures, to see what the texts alone give. No run can train on such data."""

    columns: dict[str, str] = {}
    """The names of the raw form's keys in your file, as in {prompt: question, completion: answer}; not for fire."""

    ignore_keys: list[str] = []
    """Keys to ignore although they change what a row means (label, weight, chosen, rejected, objects, videos, and
    others that the kind does not read), or hold texts as long as the answers. The workflow does not read these keys;
    one with a value stops the conversion unless it is named here. A key of a turn is `messages.weight`, one of an
    object `metadata.tools`. Null, empty and neutral values (`videos: []`, `weight: 1`, `label: true`) never stop the
    conversion; all other unread keys are only counted, in stats.json."""

    take: Take = None
    """Of preference data, the answers to use. chosen: the better one, `chosen` (or the row's own answer, beside
    `rejected_response`), as the answer to `prompt` or to the turns; the worse one is ignored, and counted. true: rows
    whose `label` or `kto_tag` is true (KTO); the others are left out, and counted. null: such keys stop the
    conversion."""

    frames_as_pictures: Annotated[int, Field(ge=1, le=MOST), EXPONENT_FORM] | None = None
    """Videos whose frames are files (`videos: [[1.jpg, 2.jpg, …]]`): use so many frames of each as pictures, evenly
    drawn, in place of its tag. null: videos stop the conversion, as do those of other forms always."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Kind text: the human's question before every text, as in "Describe the picture."; other kinds have their own."""

    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """The system turn of every conversation that has none; null for none."""

    sources: list[str] | None = None
    """Use only rows whose `source` is one of these; null for all."""

    max_samples: Positive | None = None
    """Use at most this many rows of each raw split, drawn by the seed; null for all."""

    licence: str | None = None
    """The data set's licence, as its owner names it (cc-by-4.0); without one the model card says unknown. A changed
    licence only rewrites the card, in seconds, without training, merging or verifying."""

    source_licences: dict[str, str] = {}
    """Licences of single sources, by the rows' `source` or by the first folder of their pictures' paths; they override
    those of picture_sources. A change only rewrites the card, as for `licence`."""

    form: Literal["trajectory", "timestep"] = "trajectory"
    """Kind fire. trajectory: a conversation per raw row, with every answer trained. timestep: an example per attempt,
    with the question and the last attempts with their feedback as its state; only the last answer is trained."""

    max_history_rounds: Count | None = 6
    """Timestep form: how many earlier attempts an example's state has; null for all of them."""

    min_score: Annotated[int, Field(ge=0, le=10), EXPONENT_FORM] | None = None
    """Kind fire: only attempts that the feedback after them gives at least this score, 0 to 10, are trained. The others
    stay in the history with their feedback. A row ends with its last trained attempt; one without any is left out and
    counted. null trains all attempts."""

    single_turn: Literal["last_good"] | None = None
    """Kind fire. last_good: a further row for each trajectory, the question with the last attempt that has at least
    min_score (8 without min_score), so that this answer is trained without feedback, too. There is none if no attempt
    has it, or the first is the last that does. Its id ends in -single; it is not evaluated."""

    thoughts: Literal["keep", "drop"] = "keep"
    """Kind fire. drop: of every attempt only the part after its last `Answer:`; an attempt without one stays whole, and
    is counted."""

    feedback_form: Literal["raw", "sentence"] = "raw"
    """Kind fire. sentence: `Score: 5.` and `Feedback: Look again.` become `A score of 5 is given to the answer. Look
    again.`; feedback of another form stays as it is, and is counted."""

    test_share: Annotated[Number, Field(ge=0, lt=1)] = 0.02
    """Without a raw test split: the share of the raw train split that becomes test, by picture, or by prompt for rows
    without pictures. 0 gives an empty test.jsonl."""

    val_share: Annotated[Number, Field(gt=0, lt=1)] = 0.02
    """Without a raw validation split: share of the raw train split, after test_share was taken from it, that is held
    out, by picture or prompt, to choose the checkpoint; of 200 or more, one half chooses, and the other judges
    (docs/evaluation.md)."""

    train_on: Literal["all", "last"] = "all"
    """all: every answer of a conversation is trained. last: only the last one; those before are history, as always in
    the timestep form."""

    seed: Seed = 42
    """Decides which rows are drawn and which pictures or prompts are held out."""

    max_reject_share: Share = 0.05
    """Largest share of a split's rows that may be rejected; rows left out, duplicates and leaks do not count. A small
    hand-made set may need more."""

    picture_limits: PictureLimits = PictureLimits()
    row_limits: RowLimits = RowLimits()
    near_duplicates: NearDuplicates = NearDuplicates()

    @model_validator(mode="after")
    def _fixed_rows_have_one_name(self) -> Self:
        if self.fixed_rows is not None and self.mended is not None:
            raise ValueError("mended: the former name of fixed_rows, which is set, too; name all files in fixed_rows")
        return self

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        form = form_of(self.kind)
        if form.one_prompt and self.prompt is None:
            raise ValueError(
                f"prompt: missing; kind {self.kind} needs the question that the human asks before every text"
            )
        if form.fixed and (self.modality == "text" or self.columns):
            own = "its rows always have pictures and its own keys"
            raise ValueError(f"kind {self.kind}: {own}; remove modality: text and columns")
        for key in all_settings():
            self._refuse_others_keys(_whose(key), key in form.settings, (key,))
        self._refuse_others_keys("rows with pictures", self.modality != "text", PICTURE_KEYS)
        if unknown := sorted(set(self.columns) - form.all_keys.keys()):
            known = ", ".join(form.all_keys)
            raise ValueError(f"columns: unknown key {unknown[0]!r}; rows of kind {self.kind} have: {known}")
        _refuse_unreadable_columns(self._names, self.columns)
        meanings = form.meanings_of(self.columns)
        for key in self.ignore_keys:
            if key not in meanings and (form.fixed or key in self._names.values()):
                raise ValueError(
                    f"ignore_keys: {key!r} never stops a row of kind {self.kind}; these do: {', '.join(meanings)}"
                    + ", and unread keys of other names that hold texts" * (not form.fixed)
                )
        if self.val and self.val_share != type(self).model_fields["val_share"].default:
            raise ValueError(
                f"val_share: {self.val_share} applies to rows without `val`, which names files; remove one"
            )
        for split in RAW_SPLITS:
            for address in self._named(split):
                if isinstance(getattr(self, split), list) and split_sample(address)[1] is not None:
                    raise ValueError(
                        f"{split}: {address!r} is one file of a list; use max_samples to draw from all of them"
                    )
        return self

    def _refuse_others_keys(self, whose: str, applies: bool, keys: Sequence[str]) -> None:
        """Raise ValueError for a key that is set, but that these rows do not use, or use in an unexpected way."""
        for key in keys:
            if not applies and getattr(self, key) != type(self).model_fields[key].default:
                these = f"kind {self.kind}" + (f", modality {self.modality}" if self.modality else "")
                raise ValueError(
                    f"{key}: {self.model_dump()[key]!r} applies to {whose} only, not to {these}; remove it"
                )

    def addresses(self, split: str) -> list[str]:
        """Return the addresses of a raw split's files, without the number of rows to draw; [] for a missing split."""
        return [file for address in self._named(split) for file in files_of(split_sample(address)[0])]

    @property
    def all_addresses(self) -> list[str]:
        """The addresses of all raw splits."""
        return [address for split in RAW_SPLITS for address in self.addresses(split)]

    @property
    def fixed_row_files(self) -> list[str]:
        """The edited copies of quarantine.jsonl, the last of which wins."""
        return self._named("fixed_rows") or self._named("mended")

    def _named(self, key: str) -> list[str]:
        named = getattr(self, key)
        return named if isinstance(named, list) else [named] if named else []

    def choice(self, split: str) -> RowChoice:
        """Return which rows of a raw split are used.

        At most as many are drawn as the smallest of max_samples and the `#N` of its addresses says.
        """
        counts = [self.max_samples, *(split_sample(address)[1] for address in self._named(split))]
        samples = min((count for count in counts if count is not None), default=None)
        in_turns = form_of(self.kind).pictures_in_turns or self.frames_as_pictures is not None
        return RowChoice(
            sources=self.sources,
            samples=samples,
            seed=0 if samples is None else self.seed,
            modality=None if form_of(self.kind).fixed else self.modality,
            names={key: name for key, name in self._names.items() if in_turns or key in ANY_ROW},
            kind=self.kind if in_turns else None,
            take=self.take,
            frames=self.frames_as_pictures,
            read_columns=self.read_columns,
        )

    @property
    def read_columns(self) -> list[str] | None:
        """The columns that rows of this kind are made of, and those that would change what they mean; None for all.

        Others may hold what JSON cannot represent.
        """
        form = form_of(self.kind)
        if form.fixed or not form.keys:
            return None
        return [*form.names(self.columns).values(), *form.joins, *form.meanings_of_rows(self.columns)]

    @property
    def near_duplicates_to_drop(self) -> NearDuplicates:
        """The settings for near-duplicates; distance 0 if none are dropped.

        So a new distance makes nothing stale in a data set that drops none.
        """
        near = self.near_duplicates
        return near if near.drop else near.model_copy(update={"picture_distance": 0})

    @property
    def kinds(self) -> list[str]:
        """Its kind; a mixture may have several."""
        return [self.kind]

    @property
    def one_prompt(self) -> bool:
        """Whether all rows have the same prompt."""
        return form_of(self.kind).one_prompt

    @property
    def _names(self) -> dict[str, str]:
        return form_of(self.kind).names(self.columns, self.ignore_keys)

    @property
    def has_manifests(self) -> bool:
        """Whether the pictures that the rows name are resolved."""
        return self.modality != "text" and not self.skip_images


def _whose(setting: str) -> str:
    """Return the kinds that have a setting that not every kind has, for messages."""
    have = kinds_with(setting)
    others = [kind for kind in kinds() if kind not in have]
    return f"kind {' or '.join(have)}" if len(have) <= len(others) else f"every kind but {' and '.join(others)}"


def _refuse_unreadable_columns(names: Mapping[str, str], columns: Mapping[str, str]) -> None:
    """Raise ValueError for column names that msgspec cannot find in a raw row, and for one name of two keys.

    names: the column names of all keys that are read. columns: those that the configuration gives.
    """
    for key, name in columns.items():
        if match := NOT_IN_COLUMNS.search(name):
            raise ValueError(f"columns.{key}: {name!r} holds {match[0]!r}; rename the column in the file")
    read: dict[str, str] = {}
    for key, name in names.items():
        if name in read:
            changed = key if key in columns else read[name]
            both = f"{name!r} would be read as both {read[name]} and {key}"
            raise ValueError(f"columns.{changed}: {both}; give one of them another column")
        read[name] = key
