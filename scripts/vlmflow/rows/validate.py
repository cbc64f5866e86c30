"""Assigns converted rows to train, val and test: the checks that need all rows, and the account."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

import msgspec

from vlmflow.config.row_settings import RowLimits
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import naming, sha256_of, unfinished, whole_file
from vlmflow.core.printable import counted
from vlmflow.core.progress import Progress
from vlmflow.pictures.image_manifest import contents_digest, read_picture_manifest
from vlmflow.pictures.picture_counts import NotChecked, picture_counts
from vlmflow.raw.split import open_rows
from vlmflow.rows.converted import RejectedRow
from vlmflow.rows.holdout import hold_out
from vlmflow.rows.rejects import Reject
from vlmflow.rows.row_check import CheckedRows, Grouping, Verdict
from vlmflow.rows.row_counts import Account
from vlmflow.rows.stats import RawFile, RowStats
from vlmflow.rows.unread_keys import Found, UnreadKeys

if TYPE_CHECKING:  # it imports numpy, which takes as long as all other imports here
    from vlmflow.pictures.look_alikes import LookAlike

log = logging.getLogger("vlmflow")


@dataclass(frozen=True)
class SplitFiles:
    """The files that earlier stages made of one raw split.

    raw: the raw files, in the order in which their rows are numbered. converted, rejects: the converter's outputs.
    pictures: the image manifest; None if there are no pictures, or they were not checked.
    unread: the converter's account of what it did not read; without it, the counts are 0.
    """

    split: str
    raw: list[Path]
    converted: Path
    rejects: Path
    pictures: Path | None = None
    unread: Path | None = None


@dataclass(frozen=True)
class SplitRules:
    """The settings of checking and splitting rows; see `data_settings.DatasetSettings`.

    one_prompt: see `row_check.Grouping`.
    drop_near_questions: reject train rows without a picture that ask nearly the same as a test row.
    last_answer_only: only the last answer of a row is trained.
    """

    val_share: float
    seed: int
    max_reject_share: float
    row_limits: RowLimits
    test_share: float = 0.0
    modality: str | None = "image"
    one_prompt: bool = False
    drop_near_questions: bool = False
    last_answer_only: bool = False


Place = Callable[[Verdict], str | Reject]
"""Takes the verdict on a raw row's first training row; returns the split of the raw row, or why it has none."""


class DatasetWriter:
    """Writes train, val, test and quarantine of one data set, and collects facts about what it wrote.

    examples: the number of rows by split. pictures: the SHA-256 of the pictures of train and val, by name.
    groups: those of val and test (see `row_check.Grouped`). test_questions: those of test. trained: the characters of
    train's trained answers by score.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl"))
            for name in ("train", "val", "test", "quarantine")
        }
        self.quarantine = self.files["quarantine"], unfinished(folder / "quarantine.jsonl")
        self.examples = {"train": 0, "val": 0, "test": 0}
        self.pictures: dict[str, bytes] = {}
        self.groups: dict[str, set[bytes]] = {"val": set(), "test": set()}
        self.test_questions: set[bytes] = set()
        self.trained: Counter[int] = Counter()

    def write(self, split: str, verdicts: list[Verdict]) -> None:
        """Write the training rows of one raw row to a split. verdicts: those on these rows, at least one."""
        self.examples[split] += len(verdicts)
        if verdicts[0].picture and split != "test":
            self.pictures[verdicts[0].picture] = verdicts[0].group
        if split != "train":
            self.groups[split].add(verdicts[0].group)
        if split == "test":
            self.test_questions.add(verdicts[0].question)
        for verdict in verdicts:
            self.files[split].write(verdict.line)
            if split == "train":
                self.trained.update(verdict.trained)


FindLookAlikes = Callable[[frozenset[bytes]], "Mapping[bytes, LookAlike]"]
"""Takes the SHA-256 digests of the test split's pictures; returns the other pictures that look like one, by SHA-256."""


def validate(
    splits: list[SplitFiles],
    folder: Path,
    rules: SplitRules,
    processes: int,
    mended: Sequence[Path] = (),
    find_look_alikes: FindLookAlikes = lambda test: {},
    columns: list[str] | None = None,
) -> RowStats:
    """Write train, val, test and quarantine as JSON lines into `folder`, and return the account of every row.

    splits: the raw train split, and the raw validation and test splits that there are.
    mended: edited quarantine files, whose rows replace raw rows.
    find_look_alikes: returns the pictures that train rows must not have; by default none.
    columns: see `open_rows`.

    After an error no file gets its name; the rows rejected so far are in `quarantine.jsonl.part`.

    Raises VlmflowError if no row of a split is kept, too many are rejected, the counts do not add up, or train or val
    would be empty.
    """
    files = {split.split: split for split in splits}
    with ExitStack() as stack:
        writer = DatasetWriter(folder, stack)
        accounts = {
            name: Account(name, stack.enter_context(open_rows(split.raw, name, mended, columns)), *writer.quarantine)
            for name, split in files.items()
        }
        checked = {
            name: _checked(split, accounts[name], rules, folder, stack, processes) for name, split in files.items()
        }

        def take(name: str, place: Place) -> None:
            _take(files[name], accounts[name], writer, place, rules, checked[name])

        if "test" in files:
            take("test", lambda verdict: "test")
        held_out = _held_out(checked, writer, rules, find_look_alikes)
        if "val" in files:
            take("val", lambda verdict: held_out.reject(verdict) or "val")
        take("train", lambda verdict: held_out.place(verdict, writer.groups["val"] if "val" in files else None))
        kept = accounts["train"].kept
        if not (writer.examples["train"] and writer.examples["val"]) and len(checked["train"].groups) == 1:
            raise VlmflowError(f"{files['train'].converted}: {_what_all_share(checked['train'])}", ALL_SHARE)
        for name, share in (("train", 1 - rules.val_share), ("val", rules.val_share)):
            if not writer.examples[name]:
                raise VlmflowError(
                    f"{folder}/{name}.jsonl would be empty: its share of the train split, taken by picture or prompt, "
                    f"is {share:.1%}, of {counted(kept, 'row')}",
                    "add rows, or change the shares (datasets.NAME.val_share, test_share)",
                )
        if not writer.examples["test"]:
            log.info("%s: no raw test split and test_share is 0: test.jsonl is empty", folder.name)
    return _stats(files, accounts, writer, folder)


ALL_SHARE = (
    "rows with one picture, or prompt, belong in one split: give val and test files of their own (datasets.NAME.val, "
    "test), or rows with other pictures"
)


def _what_all_share(checked: CheckedRows) -> str:
    """Return in words what the rows share that are all of one group."""
    first = next(verdict for verdict in checked if verdict.reject is None)
    return f"all usable rows share {f'the picture {first.picture}' if first.picture else 'one prompt'}"


@dataclass(frozen=True)
class HeldOut:
    """What rows of the raw train and validation splits must not have, and which groups of the train split leave it.

    in_test: the groups of the raw test split. test, val: those of the raw train split that become test and val. near:
    the pictures that look like one of test, by their SHA-256. asks: the groups that ask nearly what a test row asks.
    """

    in_test: frozenset[bytes]
    test: frozenset[bytes]
    val: frozenset[bytes]
    near: "Mapping[bytes, LookAlike]"
    asks: set[bytes]

    def reject(self, verdict: Verdict) -> Reject | None:
        """Return why a row must be in no split but test, or None."""
        if verdict.group in self.in_test:
            return Reject("in_test_split", f"{_shared(verdict)} of the test split")
        if found := self.near.get(verdict.group):
            like = f"the test split's picture with sha256 {found.sha256.hex()}"
            return Reject("near_test_picture", f"{verdict.picture} is {found.distance} of 64 bits from {like}")
        if verdict.group in self.asks:
            return Reject("near_test_question", "near_duplicates.jsonl names the test row")
        return None

    def place(self, verdict: Verdict, in_val: Collection[bytes] | None) -> str | Reject:
        """Return the split of a row of the raw train split. in_val: the groups of the raw validation split, if any."""
        if verdict.group in self.test:
            return "test"
        if rejected := self.reject(verdict):
            return rejected
        if in_val is not None and verdict.group in in_val:
            return Reject("in_val_split", f"{_shared(verdict)} of the raw validation split")
        return "val" if verdict.group in self.val else "train"


def _shared(verdict: Verdict) -> str:
    return f"{verdict.picture} is a picture" if verdict.picture else "its prompt is one"


def _held_out(
    checked: Mapping[str, CheckedRows], writer: DatasetWriter, rules: SplitRules, find_look_alikes: FindLookAlikes
) -> HeldOut:
    """Draw what is held out of the raw train split: test and val, unless they are raw splits.

    checked: the verdicts by raw split. writer: has written the raw test split, if any.
    """
    in_test = frozenset(writer.groups["test"])
    train = checked["train"]
    test = hold_out(train.groups, 0.0 if "test" in checked else rules.test_share, f"{rules.seed} test", frozenset())
    near = find_look_alikes(in_test | test)
    questions = train.questions | (checked["val"].questions if "val" in checked else {})
    asked = writer.test_questions.union(train.questions[group] for group in test & train.questions.keys())
    asks = {group for group, question in questions.items() if question in asked}
    val_share = 0.0 if "val" in checked else rules.val_share
    val = hold_out(train.groups, val_share, str(rules.seed), in_test | test | near.keys() | asks)
    return HeldOut(in_test, test, val, near, asks)


def _checked(
    files: SplitFiles, account: Account, rules: SplitRules, folder: Path, stack: ExitStack, processes: int
) -> CheckedRows:
    pictures = None
    if files.pictures is not None:
        pictures = {entry.path: entry for entry in read_picture_manifest(files.pictures)}
    grouping = Grouping(pictures, rules.modality, rules.one_prompt, rules.drop_near_questions)
    with naming(folder):  # a full disk's error names the folder, since the temporary file has no name
        spool = stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
        rows, last_only = len(account.rows), rules.last_answer_only
        return CheckedRows(spool, files.converted, rows, grouping, rules.row_limits, processes, last_only)


def _take(
    files: SplitFiles,
    account: Account,
    writer: DatasetWriter,
    place: Place,
    rules: SplitRules,
    checked: Iterable[Verdict],
) -> None:
    """Write every row of one raw split to its place, all training rows of a raw row to the same one.

    checked: the verdicts on the split, in the order of its rows.
    """
    seen: set[bytes] = set()
    for rejected in _converter_rejects(files.rejects):
        account.reject(rejected.raw_row, Reject(rejected.reason, rejected.detail))
    with Progress(f"validate_sharegpt {files.converted}", len(account.rows), "rows") as progress:
        progress.start_at(account.rejected.total())
        for number, group in groupby(checked, attrgetter("raw_row")):
            verdicts = list(group)
            target = _judge(verdicts, seen, place)
            if isinstance(target, Reject):
                account.reject(number, target)
            else:
                account.count_kept(verdicts)
                writer.write(target, verdicts)
            progress.advance()
    account.close(rules.max_reject_share)


def _judge(verdicts: list[Verdict], seen: set[bytes], place: Place) -> str | Reject:
    """Return the split of a raw row, or why it is rejected: one unusable training row rejects all of them.

    seen: digests of the contents of earlier rows; that of a row that is kept is added.
    """
    for verdict in verdicts:
        if verdict.reject is not None:
            return verdict.reject
    target = place(verdicts[0])
    if isinstance(target, Reject):
        return target
    content = verdicts[0].content_digest
    if len(verdicts) > 1:
        content = hashlib.blake2b(b"".join(verdict.content_digest for verdict in verdicts), digest_size=16).digest()
    if content in seen:
        return Reject(
            "duplicate", f"{verdicts[0].picture or 'a row'} with this conversation is already in an earlier row"
        )
    seen.add(content)
    return target


def _converter_rejects(path: Path) -> Iterator[RejectedRow]:
    decoder = msgspec.json.Decoder(RejectedRow)
    with path.open("rb") as lines:
        yield from map(decoder.decode, lines)


def _stats(files: dict[str, SplitFiles], accounts: dict[str, Account], writer: DatasetWriter, folder: Path) -> RowStats:
    names = [f"{name}.jsonl" for name in (*writer.examples, "quarantine")]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        made = pool.map(sha256_of, [folder / name for name in names])
        raw = {name: list(pool.map(_described, split.raw)) for name, split in files.items()}
    return RowStats(
        train=accounts["train"].counts(),
        val=accounts["val"].counts() if "val" in accounts else None,
        test=accounts["test"].counts() if "test" in accounts else None,
        examples=writer.examples,
        kept_by_source={name: dict(sorted(account.sources.items())) for name, account in accounts.items()},
        kept_by_attempts={name: dict(sorted(account.attempts.items())) for name, account in accounts.items()},
        trained_characters=dict(sorted(writer.trained.items())),
        mended_rows={name: len(account.rows.mended) for name, account in accounts.items()},
        score_field_differs={name: account.score_field_differs for name, account in accounts.items()},
        pictures={
            name: picture_counts(read_picture_manifest(split.pictures)) if split.pictures else NotChecked()
            for name, split in files.items()
        },
        unread={
            name: read_account(split.unread, UnreadKeys) if split.unread else Found().counts(())
            for name, split in files.items()
        },
        digests={**dict(zip(names, made, strict=True)), "pictures": contents_digest(writer.pictures)},
        raw=raw,
    )


def _described(raw: Path) -> RawFile:
    return RawFile(str(raw), raw.stat().st_size, sha256_of(raw))
