"""Assigns converted rows to train, val and test: the checks that need all rows, and the account."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account, read_lines
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.files import naming, sha256_of, unfinished, whole_file
from vlmflow.core.progress import Progress
from vlmflow.pictures.manifest import NotChecked, contents_digest, picture_counts, read_picture_manifest
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import RejectedRow
from vlmflow.rows.holdout import FindLookAlikes, held_out
from vlmflow.rows.row_check import CheckedRows, Grouping, Verdict
from vlmflow.rows.sharegpt import last_answer_only
from vlmflow.rows.stats import Account, RawFile, RowStats
from vlmflow.rows.strict_rows import Found, UnreadKeys


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


Place = Callable[[Verdict], str | Reject]
"""Takes the verdict on a usable raw row; returns its split, or why it has none."""


class DatasetWriter:
    """Writes train, val, test and quarantine of one data set, and collects facts about what it wrote.

    examples: the number of rows by split. pictures: the SHA-256 of the pictures of train and val, by name.
    test_parts, test_questions: see `row_check.Grouped`. trained: the characters of train's trained answers by score.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl"))
            for name in ("train", "val", "test", "quarantine")
        }
        self.quarantine = self.files["quarantine"], unfinished(folder / "quarantine.jsonl")
        self.examples = {"train": 0, "val": 0, "test": 0}
        self.pictures: dict[str, bytes] = {}
        self.test_parts: set[bytes] = set()
        self.test_questions: set[bytes] = set()
        self.trained: Counter[int] = Counter()

    def write(self, split: str, verdict: Verdict) -> None:
        """Write the training rows of one raw row to a split."""
        self.examples[split] += verdict.rows
        self.files[split].write(verdict.lines)
        if split == "test":
            self.test_parts.update(verdict.parts)
            self.test_questions.add(verdict.question)
        elif verdict.pictures:
            self.pictures.update(zip(verdict.pictures, verdict.parts, strict=True))
        if split == "train":
            for score, characters in verdict.trained.items():
                self.trained[score] += characters


def validate(
    splits: list[SplitFiles],
    folder: Path,
    settings: PartOf[DatasetSettings],
    processes: int,
    fixed_rows: Sequence[Path] = (),
    find_look_alikes: FindLookAlikes = lambda test: {},
) -> RowStats:
    """Write train, val, test and quarantine as JSON lines into `folder`, and return the account of every row.

    splits: the raw train split, and the raw validation and test splits that there are.
    settings: those of the data set.
    fixed_rows: edited quarantine files, whose rows replace raw rows.
    find_look_alikes: returns the pictures that train rows must not have; by default none.

    After an error no file gets its name; the rows rejected so far are in `quarantine.jsonl.part`.

    Raises VlmflowError if no row of a split is kept, too many are rejected, the counts do not add up, or train or val
    would be empty.
    """
    files = {split.split: split for split in splits}
    with ExitStack() as stack:
        writer = DatasetWriter(folder, stack)
        accounts = {
            name: Account(
                name,
                stack.enter_context(open_rows(split.raw, name, fixed_rows, settings.read_columns)),
                *writer.quarantine,
            )
            for name, split in files.items()
        }
        checked = {
            name: _checked(split, accounts[name], settings, folder, stack, processes) for name, split in files.items()
        }

        def take(name: str, split_of: Place) -> None:
            _take(files[name], accounts[name], writer, split_of, settings, checked[name])

        if "test" in files:
            take("test", lambda verdict: "test")
        shares = settings.test_share, settings.val_share, settings.seed
        drawn = held_out(checked, writer.test_parts, writer.test_questions, *shares, find_look_alikes)
        if "val" in files:
            take("val", lambda verdict: drawn.near_test(verdict) or "val")
        take("train", drawn.split_of)
        account = accounts["train"]
        kept, elsewhere = account.kept, sum(account.rejected[reason] for reason in OF_OTHER_SPLITS)
        if not (writer.examples["train"] and writer.examples["val"]) and (shared := _what_all_share(checked["train"])):
            raise VlmflowError(f"{files['train'].converted}: all usable rows share {shared}", ALL_SHARE)
        for name, share in (("train", 1 - settings.val_share), ("val", settings.val_share)):
            if not writer.examples[name]:
                raise VlmflowError(
                    f"{folder}/{name}.jsonl would be empty: its share of the train split, taken by picture or prompt, "
                    f"is {share:.1%}, of {counted(kept, 'row')}; {elsewhere} more have what test or val has",
                    "add rows, or change the shares (datasets.NAME.val_share, test_share)",
                )
        for name, share in (("val", settings.val_share), ("test", settings.test_share)):
            if name not in files and writer.examples[name] > 2 * share * kept + 1:
                log.warning(
                    "%s: %s has %d of %d rows, more than twice its share (%s): rows with one picture, or one first "
                    "question, stay together",
                    *(folder.name, name, writer.examples[name], kept, f"{share:.1%}"),
                )
        if not writer.examples["test"]:
            log.info("%s: no raw test split and test_share is 0: test.jsonl is empty", folder.name)
    return _stats(files, accounts, writer, folder)


ALL_SHARE = (
    "rows with one picture, or prompt, belong in one split: give val and test files of their own (datasets.NAME.val, "
    "test), or rows with other pictures or prompts"
)

OF_OTHER_SPLITS = ("in_test_split", "in_val_split", "near_test_picture", "near_test_question")
"""The reasons of train rows that have what test or val has."""


def _what_all_share(checked: CheckedRows) -> str:
    """Return what all usable rows have in common, for people; "" if they have nothing."""
    shared = reduce(and_, (checked.parts_of([group]) for group in checked.groups))
    if not shared:
        return ""
    first = next(verdict for verdict in checked if verdict.reject is None)
    names = [name for name, part in zip(first.pictures, first.parts, strict=False) if part in shared]
    return f"the picture {' and '.join(names)}" if names else "one prompt"


def _checked(
    files: SplitFiles,
    account: Account,
    settings: PartOf[DatasetSettings],
    folder: Path,
    stack: ExitStack,
    processes: int,
) -> CheckedRows:
    pictures = None
    if files.pictures is not None:
        pictures = {entry.path: entry for entry in read_picture_manifest(files.pictures)}
    grouping = Grouping(pictures, settings.modality, settings.one_prompt, settings.near_duplicates.drop)
    with naming(folder):  # a full disk's error names the folder, since the temporary file has no name
        spool = stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
        rows, last_only = len(account.rows), last_answer_only(settings.form, settings.train_on)
        return CheckedRows(spool, files.converted, rows, grouping, settings.row_limits, processes, last_only)


def _take(
    files: SplitFiles,
    account: Account,
    writer: DatasetWriter,
    split_of: Place,
    settings: PartOf[DatasetSettings],
    checked: Iterable[Verdict],
) -> None:
    """Write every row of one raw split to its place, all training rows of a raw row to the same one.

    checked: the verdicts on the split, in the order of its rows.
    """
    seen: set[bytes] = set()
    for rejected in read_lines(files.rejects, RejectedRow):
        account.reject(rejected.raw_row, Reject(rejected.reason, rejected.detail))
    with Progress(f"validate_sharegpt {files.converted}", len(account.rows), "rows") as progress:
        progress.start_at(account.rejected.total())
        for verdict in checked:
            target = _judge(verdict, seen, split_of)
            if isinstance(target, Reject):
                account.reject(verdict.raw_row, target)
            else:
                account.count_kept(verdict)
                writer.write(target, verdict)
            progress.advance()
    account.close(settings.max_reject_share)


def _judge(verdict: Verdict, seen: set[bytes], split_of: Place) -> str | Reject:
    """Return the split of a raw row, or why it is rejected.

    seen: digests of the contents of earlier rows; that of a row that is kept is added.
    """
    target = verdict.reject or split_of(verdict)
    if isinstance(target, Reject):
        return target
    if verdict.content_digest in seen:
        label = ", ".join(verdict.pictures) or "a row"
        return Reject("duplicate", f"{label} with this conversation is already in an earlier row")
    seen.add(verdict.content_digest)
    return target


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
        mended_rows={name: len(account.rows.fixed) for name, account in accounts.items()},
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
