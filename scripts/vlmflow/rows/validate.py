"""From converted rows to train, val and test: what no row by itself can tell."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import msgspec

from vlmflow.config.data_settings import RowLimits
from vlmflow.errors import VlmflowError
from vlmflow.files import sha256_of, whole_file
from vlmflow.json_rows import JsonRows
from vlmflow.pictures.account import picture_counts
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.progress import Progress
from vlmflow.rows.account import Account
from vlmflow.rows.convert import RejectedRow
from vlmflow.rows.holdout import choose_val_pictures
from vlmflow.rows.rejects import Reject
from vlmflow.rows.row_check import Verdict, check_rows


@dataclass(frozen=True)
class SplitFiles:
    """What the stages before made of one raw split ("train" or "test")."""

    split: str
    raw: Path
    converted: Path
    rejects: Path
    pictures: Path


@dataclass(frozen=True)
class SplitRules:
    """How rows are held out and how many may be lost; see `data_settings.DatasetSettings`."""

    val_share: float
    seed: int
    max_reject_share: float
    row_limits: RowLimits


Place = Callable[[Verdict], str | Reject]
"""Says to which split a raw row goes, by the first of its training rows, or why it goes nowhere."""


class DatasetWriter:
    """Train, val, test and quarantine of one data set, while they are written."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl"))
            for name in ("train", "val", "test", "quarantine")
        }
        self.examples = {"train": 0, "val": 0, "test": 0}
        self.pictures: dict[str, bytes] = {}

    def keep(self, split: str, verdicts: list[Verdict]) -> None:
        """Write the training rows of one raw row."""
        self.examples[split] += len(verdicts)
        self.pictures[verdicts[0].picture] = verdicts[0].picture_digest
        for verdict in verdicts:
            self.files[split].write(verdict.line)

    def pictures_digest(self) -> str:
        """Give one SHA-256 over names and contents of all pictures that the kept rows name."""
        digest = hashlib.sha256()
        for name, content in sorted(self.pictures.items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


def validate(splits: list[SplitFiles], folder: Path, rules: SplitRules, processes: int) -> dict[str, Any]:
    """Write train, val, test and quarantine as JSON lines into `folder`, and give the account of every row.

    Where a split is refused, the quarantine stays as `quarantine.jsonl.part`, and no other file takes its name.

    Raises VlmflowError where no row is kept, too many are rejected, or the rows do not add up.
    """
    files = {split.split: split for split in splits}
    with ExitStack() as stack:
        writer = DatasetWriter(folder, stack)
        accounts = {
            name: Account(name, stack.enter_context(JsonRows(split.raw)), writer.files["quarantine"])
            for name, split in files.items()
        }
        if "test" in files:
            _take(files["test"], accounts["test"], writer, lambda verdict: "test", rules, processes)
        test_pictures = frozenset(writer.pictures.values())
        val_pictures = choose_val_pictures(
            read_picture_manifest(files["train"].pictures), rules.val_share, rules.seed, test_pictures
        )

        def place_train(verdict: Verdict) -> str | Reject:
            if verdict.picture_digest in test_pictures:
                return Reject("in_test_split", f"{verdict.picture} is a picture of the test split")
            return "val" if verdict.picture_digest in val_pictures else "train"

        _take(files["train"], accounts["train"], writer, place_train, rules, processes)
        for name in ("train", "val"):
            if not writer.examples[name]:
                raise VlmflowError(
                    f"{folder}/{name}.jsonl would be empty: {rules.val_share:.1%} of the train split are held out "
                    f"by picture, and {accounts['train'].kept} rows are left",
                    "give more rows, or another share (datasets.NAME.val_share)",
                )
    return _stats(files, accounts, writer, folder)


def _take(
    files: SplitFiles,
    account: Account,
    writer: DatasetWriter,
    place: Place,
    rules: SplitRules,
    processes: int,
) -> None:
    """Put every row of one raw split where it belongs, each raw row as a whole."""
    seen: set[bytes] = set()
    for rejected in _converter_rejects(files.rejects):
        account.reject(rejected.raw_row, Reject(rejected.reason, rejected.detail))
    pictures = {entry.path: entry for entry in read_picture_manifest(files.pictures)}
    with Progress(f"validate_sharegpt {files.converted}", len(account.rows), "rows") as progress:
        progress.start_at(account.rejected.total())
        rows = groupby(check_rows(files.converted, pictures, rules.row_limits, processes), attrgetter("raw_row"))
        for number, group in rows:
            verdicts = list(group)
            target = _judge(verdicts, seen, place)
            if isinstance(target, Reject):
                account.reject(number, target)
            else:
                account.keep(verdicts)
                writer.keep(target, verdicts)
            progress.advance()
    account.close(rules.max_reject_share)


def _judge(verdicts: list[Verdict], seen: set[bytes], place: Place) -> str | Reject:
    """Judge one raw row: one unusable attempt rejects it whole."""
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
        return Reject("duplicate", f"{verdicts[0].picture} with this conversation came before")
    seen.add(content)
    return target


def _converter_rejects(path: Path) -> Iterator[RejectedRow]:
    decoder = msgspec.json.Decoder(RejectedRow)
    with path.open("rb") as lines:
        yield from map(decoder.decode, lines)


def _stats(
    files: dict[str, SplitFiles], accounts: dict[str, Account], writer: DatasetWriter, folder: Path
) -> dict[str, Any]:
    names = [f"{name}.jsonl" for name in (*writer.examples, "quarantine")]
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
        made = pool.map(sha256_of, [folder / name for name in names])
        given = pool.map(sha256_of, [split.raw for split in files.values()])
    return {
        **{name: accounts[name].counts() for name in ("train", "test") if name in accounts},
        "examples": writer.examples,
        "kept_by_source": {name: dict(sorted(account.sources.items())) for name, account in accounts.items()},
        "kept_by_attempts": {name: dict(sorted(account.attempts.items())) for name, account in accounts.items()},
        "score_field_differs": {name: account.score_field_differs for name, account in accounts.items()},
        "pictures": {name: picture_counts(read_picture_manifest(split.pictures)) for name, split in files.items()},
        "digests": {**dict(zip(names, made, strict=True)), "pictures": writer.pictures_digest()},
        "raw": {
            name: {"file": str(split.raw), "bytes": split.raw.stat().st_size, "sha256": digest}
            for (name, split), digest in zip(files.items(), given, strict=True)
        },
    }
