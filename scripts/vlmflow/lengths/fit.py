"""Handles rows that are longer than a run allows: refuses, drops or shortens them, and names each of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import IO, Literal

import msgspec

from vlmflow.config.settings import RowLimits
from vlmflow.core.account import digests_of, write_account
from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.files import whole_file
from vlmflow.core.progress import Progress
from vlmflow.lengths.count import Counter, LengthAccount, RowLength, Tokens, make_again, read_lengths
from vlmflow.lengths.summary import ACCOUNT, ChatTemplate, FittedRows, FittedSplit
from vlmflow.pictures.manifest import name_and_digest, pictures_digest
from vlmflow.rows.chat import dialogue_start
from vlmflow.rows.holdout import group_of, half_of
from vlmflow.rows.sharegpt import ShareGptRow, as_line, first_fault, lines_of
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import TrainingData, entries_named, pictures_in

OverLong = Literal["refuse", "leave_out", "shorten"]
"""What to do with rows that do not fit; see docs/config.md (runs.NAME.over_long)."""

NAMED = 5
"""The most rows that a message names; `over_long.jsonl` names all of them."""

OVER_LONG = "over_long.jsonl"


Shortened = tuple[ShareGptRow, Tokens]
"""A shorter row, with its tokens."""

Shorten = Callable[[ShareGptRow, int], Shortened | None]
"""Takes a row that does not fit and the allowed length; returns a shorter row that fits, or None."""


class OverLongRow(msgspec.Struct):
    """A line of `over_long.jsonl`: a row that did not fit, with its original tokens.

    outcome: "left_out", or "shortened". fitted_tokens: its tokens afterwards, null if left out.
    attempts_dropped: the number of dropped oldest attempts.
    """

    split: str
    id: str
    tokens: int
    outcome: str
    fitted_tokens: int | None = None
    attempts_dropped: int = 0


@dataclass
class Fitted:
    """One split during fitting: the account of the kept rows, and of those that did not fit, with original lengths."""

    kept: LengthAccount = field(default_factory=LengthAccount)
    over_long: LengthAccount = field(default_factory=LengthAccount)
    left_out: int = 0
    judging: int = 0


def fit_rows(
    data: TrainingData,
    stats: Stats,
    lengths: dict[str, Path],
    counter: Callable[[], Counter],
    max_length: int,
    over_long: OverLong,
    folder: Path,
    chat_template: ChatTemplate | None = None,
    one_sequence: bool = False,
    model: dict[str, str] | None = None,
) -> FittedRows:
    """Write the rows of train and val that fit `max_length` tokens into `folder`, and return the account.

    stats: the data set's own account. lengths: the lengths file of each split.
    counter: makes the counter that measured them; called only to shorten rows. chat_template, one_sequence: as in
    their account. model: `text_files.text_digests` of its model.
    folder: gets {train,val}.jsonl; {train,val}.lengths.jsonl, their lengths; over_long.jsonl, every row that did not
    fit; account.json. No row is cut: it stays unchanged, loses whole attempts, or is left out. The half of val that
    judges is set aside (`rows.holdout`).

    Memory does not grow with the rows of train.

    Raises VlmflowError if rows do not fit and must be refused, if none is left, or if lengths belong to other rows.
    """
    rows = {"train": data.train, "val": data.val}
    limits = RowLimits(**stats.settings.row_limits)
    shorten = shortening(counter, limits) if over_long == "shorten" else lambda *_: None
    splits: dict[str, Fitted] = {}
    judging = _judging(data, stats.one_prompt)
    with whole_file(folder / OVER_LONG) as others:
        for split, file in rows.items():
            with Progress(f"fitting {file.name}", stats.examples[split], "rows") as progress:
                aside = judging if split == "val" else frozenset()
                splits[split] = _fit_split(file, lengths[split], max_length, shorten, folder, others, progress, aside)
    over_long_rows = (row for fitted in splits.values() for row in fitted.over_long.longest)
    longest = sorted(over_long_rows, key=lambda row: -row.tokens)[:NAMED]
    if longest and over_long == "refuse":
        raise VlmflowError(
            _too_many(splits, longest, max_length),
            f"raise runs.NAME.train.max_length to {longest[0].tokens}, lower runs.NAME.train.image_max_tokens, "
            "or choose what happens to such rows (runs.NAME.over_long: leave_out, or shorten in the timestep form)",
        )
    if longest:
        log.info(f"{_too_many(splits, longest, max_length)}; all of them: {OVER_LONG}")
    kept = [f"{split}.jsonl" for split in splits]
    account = FittedRows(
        dataset=stats.dataset,
        form=stats.form,
        train_on=stats.settings.train_on,
        max_length=max_length,
        train=_describe("train", splits["train"], max_length),
        val=_describe("val", splits["val"], max_length),
        digests={
            **digests_of(folder, [*kept, *(f"{split}.lengths.jsonl" for split in splits), OVER_LONG]),
            "pictures": pictures_digest(entries_named(pictures_in(*(folder / name for name in kept)), data.manifests)),
        },
        chat_template=chat_template,
        one_sequence=one_sequence,
        model=model,
    )
    write_account(folder / ACCOUNT, account)
    return account


def _fit_split(
    rows: Path,
    lengths: Path,
    max_length: int,
    shorten: Shorten,
    folder: Path,
    others: IO[bytes],
    progress: Progress,
    aside: frozenset[str],
) -> Fitted:
    """Write the rows of one split that fit, in order, and to `others` the outcome of each row that does not.

    aside: the ids of rows that are in neither.
    """
    fitted = Fitted()
    encode = msgspec.json.Encoder().encode
    written = 0
    with whole_file(folder / rows.name) as target, whole_file(folder / f"{rows.stem}.lengths.jsonl") as measured:
        for line, length in _measured(rows, lengths):
            progress.advance()
            if length.id in aside:
                fitted.judging += 1
                continue
            tokens = Tokens(length.text_tokens, length.picture_tokens, length.trained_tokens)
            if length.tokens > max_length:
                row = msgspec.json.decode(line, type=ShareGptRow)
                shorter = shorten(row, max_length)
                fitted.over_long.add(length)
                others.write(encode(_outcome(rows.stem, length, row, shorter)) + b"\n")
                if shorter is None:
                    fitted.left_out += 1
                    continue
                row, tokens = shorter
                line = as_line(row, row.images)
            kept = msgspec.structs.replace(
                length,
                start=written,
                end=written + len(line),
                text_tokens=tokens.text,
                picture_tokens=tokens.pictures,
                trained_tokens=tokens.trained,
            )
            target.write(line + b"\n")
            measured.write(encode(kept) + b"\n")
            fitted.kept.add(kept)
            written = kept.end + 1
    return fitted


def _judging(data: TrainingData, one_prompt: bool) -> frozenset[str]:
    """Return the ids of the rows of val that judge; none if it is too small to be halved.

    one_prompt: see `halves.group_of`.
    """
    digests = dict(map(name_and_digest, entries_named(pictures_in(data.val), data.manifests).values()))
    groups = {row.id: group_of(row, digests, one_prompt) for row in lines_of(data.val, ShareGptRow)}
    judges = half_of(groups.values(), "judges") or frozenset()
    return frozenset(name for name, group in groups.items() if group in judges)


def _measured(rows: Path, lengths: Path) -> Iterator[tuple[bytes, RowLength]]:
    """Yield every row's line, without its end, with its length.

    Raises VlmflowError if they do not belong together.
    """
    start = 0
    with rows.open("rb") as lines:
        for number, (line, length) in enumerate(zip_longest(lines, read_lengths(lengths)), start=1):
            end = start + len(line or b"") - 1
            if line is None or length is None or (length.start, length.end) != (start, end):
                raise VlmflowError(
                    f"{lengths}, line {number}: not the length of this line of {rows}", make_again(lengths)
                )
            yield line[:-1], length
            start = end + 1


def _outcome(split: str, length: RowLength, row: ShareGptRow, shorter: Shortened | None) -> OverLongRow:
    if shorter is None:
        return OverLongRow(split, length.id, length.tokens, "left_out")
    kept, tokens = shorter
    dropped = len(row.attempts) - len(kept.attempts)
    return OverLongRow(split, length.id, length.tokens, "shortened", tokens.text + tokens.pictures, dropped)


def shortening(counter: Callable[[], Counter], limits: RowLimits) -> Shorten:
    """Return a function that drops a row's oldest attempts, one by one, until it fits.

    The question with its pictures, and the last answer (the target), always stay: a row that is too long with these
    alone does not fit. Use it for the timestep form, whose earlier attempts are history and not trained.
    limits: the limits of the data set's rows.

    The function raises VlmflowError if the shorter row would violate the rules of rows.
    """
    once = cache(counter)  # the tokenizer is read for the first row that needs it

    def shorten(row: ShareGptRow, max_length: int) -> Shortened | None:
        for count in range(1, len(row.attempts)):
            shorter = without_oldest(row, count)
            tokens = once().measure([shorter])[0]
            if tokens.text + tokens.pictures > max_length:
                continue
            if fault := first_fault(shorter, limits):
                raise VlmflowError(
                    f"row {row.id}, shortened by {count} attempts, is no longer a valid row: {fault.reason}: "
                    f"{fault.detail}",
                    "leave such rows out (runs.NAME.over_long: leave_out); this is a bug, please report it",
                )
            return shorter, tokens
        return None

    return shorten


def without_oldest(row: ShareGptRow, count: int) -> ShareGptRow:
    """Return a row without its `count` oldest attempts and the replies to them.

    System turn and question stay; the other attempts keep their numbers.
    """
    start = dialogue_start(row.conversations) + 1
    return row.without(start, start + 2 * count)


def _describe(split: str, fitted: Fitted, max_length: int) -> FittedSplit:
    if not fitted.kept.rows:
        raise VlmflowError(
            f"no row of the {split} split fits train.max_length = {max_length}; {fitted.left_out} are longer",
            f"raise runs.NAME.train.max_length to {fitted.over_long.longest[0].tokens}, or lower "
            "runs.NAME.train.image_max_tokens",
        )
    return FittedSplit(
        rows_in=fitted.kept.rows + fitted.left_out + fitted.judging,
        shortened=fitted.over_long.rows - fitted.left_out,
        left_out=fitted.left_out,
        lengths=fitted.kept.describe(),
        judging=fitted.judging,
    )


def _too_many(splits: dict[str, Fitted], longest: list[RowLength], max_length: int) -> str:
    """Return the number of over-long rows, and the names of the longest, as a text."""
    over_long = sum(fitted.over_long.rows for fitted in splits.values())
    rows = sum(fitted.kept.rows + fitted.left_out for fitted in splits.values())
    named = ", ".join(f"{row.id} ({row.tokens} tokens)" for row in longest)
    return f"{over_long} of {rows} rows have more than train.max_length = {max_length} tokens: {named}"


def in_words(account: FittedRows) -> str:
    """Return the numbers of a run's rows, in one line."""
    return "; ".join(
        f"{split}: {rows.rows_in:,} rows, {rows.shortened:,} shortened, {rows.left_out:,} left out"
        + (f", {rows.judging:,} set aside to judge" if rows.judging else "")
        for split, rows in account.splits.items()
    )
