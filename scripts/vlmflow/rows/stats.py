"""`stats.json`, the account of a data set: the results of all raw rows, and digests of its inputs and outputs.

Counts every raw row of a split as kept, or as rejected for one reason, and writes the quarantine.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.config import raw_forms
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import NotChecked, PictureCounts
from vlmflow.raw.rewritten import key_fault
from vlmflow.raw.split import RawRows
from vlmflow.rows.chat import HARMLESS, LEFT_OUT, REASONS, Reject
from vlmflow.rows.row_check import Verdict, advice
from vlmflow.rows.sharegpt import last_answer_only
from vlmflow.rows.strict_rows import UnreadKeys


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


def rules_used(settings: PartOf[DatasetSettings]) -> RulesUsed:
    """Return the account of the settings of a data set."""
    left_out = set() if settings.near_duplicates.drop else {"near_duplicates"}
    used = settings.model_dump_json(include=set(RulesUsed.__struct_fields__) - left_out)
    return msgspec.json.decode(used, type=RulesUsed)  # the default itself would not be written


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
        return [name for name, member in self.members.items() if member.kind in scored] or [self.dataset]

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
            made_of = f"mixture of {', '.join(f'{name} ({member.drawn})' for name, member in self.members.items())}"
        else:
            has_form = "form" in raw_forms.form_of(self.kind).settings
            made_of = f"{self.form} form" if has_form else f"rows of kind {self.kind}"
        return f"{made_of}, only last answers trained" if self.settings.train_on == "last" else made_of


RAW_KEPT = 1 << 20
"""The largest rejected row, in bytes, whose content is written to the quarantine; its place always is."""

DETAIL_KEPT = 150
"""The characters of a reject's detail that are kept from its beginning, and from its end, which often has the reason. A
hostile row may put megabytes between them."""

EXAMPLES_SHOWN = 3

BYTE_OF_ROW = re.compile(r"\(byte (\d+)\)$")
"""The end of a decoder's message: the byte of the fault, counted from the beginning of the row."""


class QuarantinedRow(msgspec.Struct):
    """A line of quarantine.jsonl: a rejected row with its place, the reason and its content.

    row: its number in the raw split, counted from 0 over all files. file, file_row: its file, and its number there.
    start, end: its first byte in the file and the byte after its last; null in parquet, which has no such place.
    checksum: that of the raw row (RawRows.checksum), to recognise a fixed row that replaces it.
    raw: the row, or the fixed row that replaced it, as JSON; as a text if it is not JSON or has a key twice; null if it
    is larger than RAW_KEPT, or if parquet has values that JSON cannot hold.
    """

    split: str
    row: int
    reason: str
    detail: str
    file: str
    file_row: int
    start: int | None
    end: int | None
    checksum: str
    raw: msgspec.Raw


@dataclass
class Account:
    """The results of all rows of one raw split; all counts are of raw rows.

    quarantine: the open file for rejected rows. quarantine_path: its path until it is complete.
    attempts: the kept rows by number of attempts. sources: the kept rows by source.
    sources_left_out: the rows that were left out for their source, by source.
    score_field_differs: the kept rows with such a field (see `trajectories.Trajectory`).
    shown: by reason, the first rows with their details, for messages.
    """

    split: str
    rows: RawRows
    quarantine: IO[bytes]
    quarantine_path: Path
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    sources_left_out: Counter[str] = field(default_factory=Counter)
    score_field_differs: int = 0
    shown: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def count_kept(self, verdict: Verdict) -> None:
        """Count one raw row as kept."""
        self.kept += 1
        self.attempts[verdict.attempts] += 1
        self.sources[verdict.source] += 1
        self.score_field_differs += verdict.score_field_differs

    def reject(self, number: int, reject: Reject) -> None:
        """Count raw row `number` as rejected, and write it to the quarantine unless it was not requested (LEFT_OUT)."""
        self.rejected[reject.reason] += 1
        if reject.reason in LEFT_OUT:
            if reject.reason == "source_left_out":
                self.sources_left_out[reject.detail] += 1
            return
        location = self.rows.locate(number)
        detail = _shortened(BYTE_OF_ROW.sub(partial(self._byte_of_file, number), reject.detail))
        row = QuarantinedRow(
            split=self.split,
            row=number,
            reason=reject.reason,
            detail=detail,
            file=str(location.file),
            file_row=location.row,
            start=location.start,
            end=location.end,
            checksum=self.rows.checksum(number),
            raw=_as_json(self.rows[number]),
        )
        self.quarantine.write(msgspec.json.encode(row) + b"\n")
        examples = self.shown.setdefault(reject.reason, [])
        if len(examples) < EXAMPLES_SHOWN:
            examples.append((number, detail))

    def counts(self) -> SplitCounts:
        """Return the split's part of `stats.json`."""
        return SplitCounts(len(self.rows), self.kept, dict(sorted(self.rejected.items())))

    def close(self, max_reject_share: float) -> None:
        """Check that every row is accounted for and that enough are kept.

        max_reject_share: the largest share of the requested rows that may be rejected for a fault (not HARMLESS).

        Raises VlmflowError if the counts do not add up; also if no row is kept, or too many are rejected, with counts
        and examples by reason.
        """
        rows_in, rejected = len(self.rows), self.rejected.total()
        if self.kept + rejected != rows_in:
            raise VlmflowError(
                f"{self.rows}: {rows_in} rows in, {self.kept} kept, {rejected} rejected: the counts do not add up",
                "the converted files are not those of these raw rows: remove them and run the same command again",
            )
        rejects = Counter({reason: count for reason, count in self.rejected.items() if reason not in HARMLESS})
        asked_for = rows_in - sum(self.rejected[reason] for reason in LEFT_OUT)
        if self.kept == 0:
            raise self._refusal(f"none of the {rows_in} rows is left", self.rejected, asked_for)
        if rejects.total() > max_reject_share * asked_for:
            raise self._refusal(
                f"{rejects.total()} of {asked_for} rows were rejected ({rejects.total() / asked_for:.1%}, "
                f"not counting duplicates and leaks); max_reject_share allows {max_reject_share:.1%}",
                rejects,
                asked_for,
            )

    def _refusal(self, cause: str, lost: Counter[str], asked_for: int) -> VlmflowError:
        """Return the error. lost: the number of lost rows by reason. asked_for: the number of requested rows."""
        reasons = []
        for reason, count in self.rejected.most_common():
            examples = [f"{self.rows.named(number)}: {detail}" for number, detail in self.shown.get(reason, [])]
            reasons.append(f"  {count:>8} {reason}: " + "; ".join(examples or [REASONS.get(reason, "")]))
        return VlmflowError(
            "\n".join([f"{self.rows}: {cause} (rows are counted from 0, lines from 1)", *reasons]),
            advice(lost, asked_for, self.sources_left_out, self.quarantine_path, none_left=not self.kept),
        )

    def _byte_of_file(self, number: int, byte: re.Match[str]) -> str:
        """Convert the byte in a decoder's message to the byte of the file; a fixed row and parquet have none."""
        start = None if number in self.rows.fixed else self.rows.locate(number).start
        return f"(byte {byte[1]} of the row)" if start is None else f"(byte {start + int(byte[1])} of the file)"


def _shortened(detail: str) -> str:
    return detail if len(detail) <= 2 * DETAIL_KEPT else f"{detail[:DETAIL_KEPT]} … {detail[-DETAIL_KEPT:]}"


def _as_json(row: bytes) -> msgspec.Raw:
    """Return a row as JSON. If it has a key twice, it is a text: a tool that writes JSON again would lose one."""
    if len(row) > RAW_KEPT:
        return msgspec.Raw(b"null")
    try:
        msgspec.json.decode(row)
        row.decode()
        if not key_fault(row):
            return msgspec.Raw(b" ".join(row.splitlines()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return msgspec.Raw(msgspec.json.encode(row.decode(errors="backslashreplace")))
