"""What the configuration says of one data set."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vlmflow.config.key_meanings import meanings_of, meanings_of_rows
from vlmflow.config.settings import EXPONENT_FORM, Number, Positive, Seed, Settings, Share
from vlmflow.config.source import files_of, split_sample

_ANY_KIND = ("image", "images", "source")
KEYS_OF_KIND = {
    "volcano": ("conversations", *_ANY_KIND),
    "sharegpt": ("conversations", *_ANY_KIND),
    "alpaca": ("instruction", "input", "output", *_ANY_KIND),
    "messages": ("messages", *_ANY_KIND),
    "prompt_completion": ("prompt", "completion", *_ANY_KIND),
    "text": ("text", *_ANY_KIND),
}
"""The keys of the raw forms that may be called otherwise in a file; fire's may not."""

PICTURE_KEYS = ("image_roots", "fetch_images", "skip_images", "picture_limits")
"""Settings of data sets whose rows have pictures."""

NOT_IN_COLUMNS = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""What the name of a column may not hold: in JSON it would stand there as an escape."""


class PictureLimits(Settings):
    """What a picture may be; one outside of these limits costs its rows, with the reason counted."""

    min_side: Annotated[int, Field(ge=1), EXPONENT_FORM] = 28
    """Shortest side in pixels: below one patch pair of Qwen-VL (28) the processor refuses the picture."""

    max_aspect: Annotated[Number, Field(ge=1)] = 200.0
    """Longest side over shortest side: Qwen-VL's processor refuses more than 200."""

    max_pixels: Annotated[int, Field(ge=1, le=178_956_970), EXPONENT_FORM] = 40_000_000
    """Width times height: a decompression bomb is refused from its header, before it is decoded. A pixel takes up to
    18 bytes, and resolve_images and hash_pictures declare memory for pictures of the default on all of their cores:
    with more, give both more (--set-resources resolve_images:mem_mb=16000). Above the largest value Pillow refuses the
    picture in the trainer."""

    max_bytes: Annotated[int, Field(ge=1), EXPONENT_FORM] = 100_000_000
    """Size of the file in bytes."""


class RowLimits(Settings):
    """What a row may be; limits on size that keep one broken row from costing a day of training."""

    max_turns: Annotated[int, Field(ge=2), EXPONENT_FORM] = 64
    """Turns in one conversation, human and gpt together; of FIRE in a whole trajectory, in both forms."""

    max_turn_chars: Annotated[int, Field(ge=1), EXPONENT_FORM] = 20_000
    """Characters in one turn."""


class RowChoice(Settings):
    """Which rows of a raw split are used at all; the others are counted as left out, and not looked at further."""

    sources: list[str] | None = None
    """What the rows' `source` may be; null for any."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """How many of these rows, drawn by the seed; null for all."""

    seed: Seed = 0
    """Decides which rows are drawn."""

    modality: Literal["image", "text"] | None = None
    """image: rows with a picture; text: rows without; null for rows that all have one."""

    names: dict[str, str] = {"image": "image", "images": "images", "source": "source"}
    """What these keys of the rows are called in the file; one that is not here is not read."""

    read_columns: list[str] | None = None
    """The columns that are read where the file is parquet; null for all."""


class NearDuplicates(Settings):
    """What looks like a picture of the test split, or asks, without a picture, what it asks; not byte for byte."""

    picture_distance: Annotated[int, Field(ge=0, le=10), EXPONENT_FORM] = 4
    """Two pictures are near when their perceptual hashes differ in at most this many of 64 bits. Up to 4 they are one
    picture, scaled or compressed anew; from 8 on charts of one template are near."""

    drop: bool = False
    """Reject the train rows of such pictures, and those with such questions, as those of the test split's own pictures
    and prompts are."""


class DatasetSettings(Settings):
    """One data set: where its raw files and pictures are, and how rows are made of them."""

    kind: Literal["fire", "volcano", "alpaca", "sharegpt", "messages", "prompt_completion", "text"]
    """The raw form. fire: trajectories. volcano, sharegpt: `conversations` of `from` (human, gpt) and `value`.
    alpaca: `instruction`, `input`, `output`. messages: `messages` of `role` (user, assistant) and `content`.
    prompt_completion: `prompt` and `completion`. text: `text`. All but fire may name a picture (`image`, or
    `images` with one name) and a `source`."""

    train: str | Annotated[list[str], Field(min_length=1)]
    """The raw train split: hf://datasets/OWNER/NAME/FILE (pinned in pins.yaml, or by itself:
    …/NAME@COMMIT/FILE), file:///PATH, or a path.
    A file is
    a JSON array, JSON lines, CSV (.csv, .tsv) or parquet (.parquet). #500 behind it draws 500 of its rows. Several
    files are a list, or train-*-of-00004.parquet for four; their rows are numbered through, in that order."""

    test: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The raw test split, in the same forms; it stays untouched until evaluation. Null: see test_share."""

    mended: str | Annotated[list[str], Field(min_length=1)] | None = None
    """An edited copy of quarantine.jsonl, or of quarantine.jsonl.part where too many rows were rejected; `row` counts
    from 0. What stands under `raw` in its lines takes the place of those raw rows. An object is the row, in a table one
    with the columns as keys; a text is what stands in the file, JSON or a line of CSV. Where null stands (a row over 1
    MiB, or one that parquet cannot give), write the whole row as an object; null leaves it as it is. Several copies,
    mended one after the other, are a list: the later wins."""

    modality: Literal["image", "text"] = "image"
    """image: rows with a picture; text: rows without. Rows of the other sort are left out, and counted: mixed in one
    file, they make processes that train side by side wait for each other for ever."""

    image_roots: list[str] = []
    """Folders that hold the pictures under the paths that the rows name; the first that has one wins."""

    fetch_images: bool = False
    """Fetch the pictures that image_roots lack, from the sources in picture_sources.yaml; false looks in the roots
    alone."""

    skip_images: bool = False
    """Do not look at the pictures, to see what the texts alone give. Such data cannot be trained on."""

    columns: dict[str, str] = {}
    """What the raw form's keys are called in your file, as in {prompt: question, completion: answer}; not for fire."""

    ignore_keys: list[str] = []
    """Keys of your file that change what a row means, and that nothing here reads (system, history, tools, label,
    weight, chosen, rejected, tool_calls of a turn, and others): in a row where such a key says something, it stops the
    conversion, unless it is named here. The rows are then used as though it were not there. A key of a turn is
    `messages.weight`. Null, empty and neutral values (`tools: []`, `weight: 1`, `label: true`) never stop; all other
    unread keys are only counted, in stats.json."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Kind text: what the human says before every text, as in "Describe the picture."; other kinds have their own."""

    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Begins every conversation that has no system turn of its own; null for none."""

    sources: list[str] | None = None
    """Use only rows whose `source` is one of these; null for all."""

    max_samples: Positive | None = None
    """Use only so many rows of each raw split, drawn by the seed; null for all."""

    licence: str | None = None
    """The data set's licence, as its owner names it (cc-by-4.0); the model card says unknown where none is given. A
    changed licence writes the card anew, in seconds; it neither trains, merges nor verifies."""

    source_licences: dict[str, str] = {}
    """Licences of single sources, by the rows' `source` or by the first folder of their pictures' paths; they
    lie over those of picture_sources. Changing them writes the card anew, as `licence` does."""

    form: Literal["trajectory", "timestep"] = "trajectory"
    """Kind fire. trajectory: a conversation per raw row, every answer trained. timestep: an example per attempt, whose
    state is the question and the last attempts with their feedback, and whose last answer alone is trained."""

    max_history_rounds: Annotated[int, Field(ge=0), EXPONENT_FORM] | None = 6
    """Timestep form: how many earlier attempts stand in an example's state; null for all of them."""

    test_share: Annotated[Number, Field(ge=0, lt=1)] = 0.02
    """Where there is no raw test split: share of the raw train split that becomes test, by picture, or by prompt where
    rows have no pictures. 0 gives an empty test.jsonl."""

    val_share: Annotated[Number, Field(gt=0, lt=1)] = 0.02
    """Share of the raw train split that is held out, by picture or prompt, to choose checkpoints."""

    seed: Seed = 42
    """Decides which rows are drawn and which pictures or prompts are held out."""

    max_reject_share: Share = 0.05
    """Largest share of a split's rows that may be rejected; what is left out, duplicates and leaks do not count. A
    small set made by hand may need more."""

    picture_limits: PictureLimits = PictureLimits()
    row_limits: RowLimits = RowLimits()
    near_duplicates: NearDuplicates = NearDuplicates()

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "text" and self.prompt is None:
            raise ValueError("prompt: missing; kind text needs what the human says before every text")
        if self.kind == "fire" and (self.modality == "text" or self.columns):
            raise ValueError("kind fire: its rows have pictures, and keys of their own: no modality text, no columns")
        for whose, applies, keys in (
            ("kind fire", self.kind == "fire", ("form", "max_history_rounds")),
            ("every kind but fire", self.kind != "fire", ("ignore_keys",)),
            ("kind text", self.kind == "text", ("prompt",)),
            ("modality image", self.modality == "image", PICTURE_KEYS),
        ):
            self._refuse_others_keys(whose, applies, keys)
        if unknown := sorted(set(self.columns) - set(KEYS_OF_KIND.get(self.kind, ()))):
            known = ", ".join(KEYS_OF_KIND[self.kind])
            raise ValueError(f"columns: rows of kind {self.kind} have no key {unknown[0]!r}; they have {known}")
        _refuse_unreadable_columns(self._names, self.columns)
        known = meanings_of(self.kind, self._names)
        for key in self.ignore_keys:
            if key not in known:
                raise ValueError(f"ignore_keys: {key!r} stops no row of kind {self.kind}; {', '.join(known)} may")
        for split in ("train", "test"):
            for address in self._named(split):
                if isinstance(getattr(self, split), list) and split_sample(address)[1] is not None:
                    raise ValueError(f"{split}: {address!r} is one file of a list; max_samples draws rows of them all")
        return self

    def _refuse_others_keys(self, whose: str, applies: bool, keys: Sequence[str]) -> None:
        """Raise ValueError for a key that is set, and would do nothing, or what nobody expects, for these rows."""
        for key in keys:
            if not applies and getattr(self, key) != type(self).model_fields[key].default:
                these = f"kind {self.kind}, modality {self.modality}"
                raise ValueError(f"{key}: {self.model_dump()[key]!r} is for {whose} alone, not for {these}; remove it")

    def addresses(self, split: str) -> list[str]:
        """Give the addresses of a raw split's files, without the number of rows to draw; none for a split not there."""
        return [file for address in self._named(split) for file in files_of(split_sample(address)[0])]

    @property
    def mended_files(self) -> list[str]:
        """The edited copies of quarantine.jsonl, the last of which wins."""
        return self._named("mended")

    def _named(self, key: str) -> list[str]:
        named = getattr(self, key)
        return named if isinstance(named, list) else [named] if named else []

    def choice(self, split: str) -> RowChoice:
        """Give which rows of a raw split are used: the fewer of max_samples and what stands behind the address."""
        counts = [self.max_samples, *(split_sample(address)[1] for address in self._named(split))]
        samples = min((count for count in counts if count is not None), default=None)
        return RowChoice(
            sources=self.sources,
            samples=samples,
            seed=0 if samples is None else self.seed,
            modality=None if self.kind == "fire" else self.modality,
            names={key: name for key, name in self._names.items() if key in _ANY_KIND},
            read_columns=self.read_columns,
        )

    @property
    def read_columns(self) -> list[str] | None:
        """The columns that rows of this kind are made of, and those that would change what they mean; null for fire's.

        Others may hold what no JSON can.
        """
        if self.kind == "fire":
            return None
        names = self._names
        return [*names.values(), *meanings_of_rows(self.kind, names)]

    @property
    def _names(self) -> dict[str, str]:
        return {"image": "image", "source": "source"} if self.kind == "fire" else read_names(self.kind, self.columns)

    @property
    def has_manifests(self) -> bool:
        """Whether the pictures that the rows name are resolved."""
        return self.modality == "image" and not self.skip_images


def read_names(kind: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Give the keys that rows of a kind are read by, with what they are called in the file.

    Where `image` is called `images`, or the other way round, the other one is not read.
    """
    names = {key: columns.get(key, key) for key in KEYS_OF_KIND[kind]}
    for key, other in (("image", "images"), ("images", "image")):
        if columns.get(key) == other and other not in columns:
            del names[other]
    return names


def _refuse_unreadable_columns(names: Mapping[str, str], columns: Mapping[str, str]) -> None:
    """Raise ValueError for names that no key of a raw row can be read by (msgspec), and for one that two keys have.

    names: of all keys that are read. columns: those that the configuration gives.
    """
    for key, name in columns.items():
        if found := NOT_IN_COLUMNS.search(name):
            raise ValueError(f"columns.{key}: {name!r} holds {found[0]!r}; rename the column in the file")
    read: dict[str, str] = {}
    for key, name in names.items():
        if name in read:
            changed = key if key in columns else read[name]
            both = f"{name!r} would be both {read[name]} and {key}"
            raise ValueError(f"columns.{changed}: {both}; give one of them another column")
        read[name] = key
