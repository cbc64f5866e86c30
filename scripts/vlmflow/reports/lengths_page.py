"""The longest rows of a run, with lengths and questions, for the pages that name them.

The lengths page: one HTML file with the tokens of a run's rows, and the max_length that they need.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from vlmflow.core.account import MAKE_AGAIN, read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.summary import ChatTemplate, LengthSummary, ShownText, SplitLengths
from vlmflow.reports.charts import Chart, Histogram, chart, wide_bins
from vlmflow.reports.page import Tile, render
from vlmflow.rows.chat import said, without_tags
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.swift.model_layers import Description

QUESTION_SHOWN = 160
"""Characters."""


@dataclass(frozen=True)
class LongRow:
    """One row. question: its beginning; "" if the page's stage does not read the rows.

    turns: their number without a system prompt. source: as in the raw row.
    """

    split: str
    id: str
    tokens: int
    picture_tokens: int
    question: str = ""
    turns: int = 0
    source: str = ""


def long_rows(split: str, lengths: SplitLengths) -> list[LongRow]:
    """Return the longest rows of an account, without their questions."""
    return [LongRow(split, row.id, row.tokens, row.picture_tokens) for row in lengths.longest]


def with_looks(rows: Iterable[LongRow], file: Path, places: Mapping[str, tuple[int, int]]) -> list[LongRow]:
    """Return the rows of one data file with their questions.

    places: the bytes of a row in the file, from start to end (exclusive), by its id.

    Raises VlmflowError if there is no row at its place.
    """
    return [_with_look(row, file, *places[row.id]) for row in rows]


def _with_look(row: LongRow, file: Path, start: int, end: int) -> LongRow:
    with file.open("rb") as opened:
        line = os.pread(opened.fileno(), end - start, start)
    try:
        found = msgspec.json.decode(line, type=ShareGptRow)
    except ValueError as error:
        raise VlmflowError(f"{file}, bytes {start:,} to {end:,}: {error}", MAKE_AGAIN) from None
    texts = said(found.conversations)
    asked = " ".join(without_tags(texts[0]).split()) if texts else ""
    question = asked if len(asked) <= QUESTION_SHOWN else f"{asked[:QUESTION_SHOWN]} …"
    return replace(row, question=question, turns=len(texts), source=found.source)


@dataclass(frozen=True)
class LengthsPage:
    """The page's facts.

    longest: the longest rows of each data file, the longest first. example: a row as the model reads it.
    model: what the model says of itself.
    """

    title: str
    subtitle: str
    tiles: list[Tile]
    charts: list[Chart]
    longest: list[LongRow]
    max_length: int
    example: list[ShownText]
    model: Description | None


class Length(msgspec.Struct):
    """The fields of a line of `lengths/RUN/SPLIT.jsonl` that the page reads."""

    id: str
    start: int
    end: int
    text_tokens: int
    picture_tokens: int


class Tokens:
    """The tokens of one data file's rows.

    over_long: the number of rows with more than `max_length`. places: the bytes of the rows `named`, by their id.
    """

    def __init__(self, lengths: Path, max_length: int, named: Collection[str]) -> None:
        self.all, self.text, self.pictures = Histogram(), Histogram(), Histogram()
        self.over_long = 0
        self.places: dict[str, tuple[int, int]] = {}
        for row in lines_of(lengths, Length):
            tokens = row.text_tokens + row.picture_tokens
            self.all.add(tokens)
            self.text.add(row.text_tokens)
            self.over_long += tokens > max_length
            if row.picture_tokens:
                self.pictures.add(row.picture_tokens)
            if row.id in named:
                self.places[row.id] = (row.start, row.end)


def lengths_page(
    run: str, lengths: Mapping[str, Path], rows: Mapping[str, Path], summary: Path, max_length: int
) -> str:
    """Return the page.

    lengths, rows: the lengths file, and the measured rows, of train and of val.
    max_length: the run's own (train.max_length).

    Raises VlmflowError if a file has a damaged line.
    """
    account = read_account(summary, LengthSummary)
    named = {split: long_rows(split, account.splits[split]) for split in lengths}
    splits = {split: Tokens(file, max_length, {row.id for row in named[split]}) for split, file in lengths.items()}
    charts = [
        _chart("Tokens of a row", "tokens, text and pictures", {name: one.all for name, one in splits.items()}),
        _chart("Text of a row", "tokens, chat markup included", {name: one.text for name, one in splits.items()}),
        _chart("Pictures of a row", "tokens, in rows with a picture", {n: one.pictures for n, one in splits.items()}),
    ]
    page = LengthsPage(
        f"{run}: the lengths of its rows",
        f"Counted for the run's model with train.image_max_tokens = {account.image_max_tokens}; "
        f"{account.compared_with_ms_swift} rows compared with ms-swift's own encoding; all equal."
        f"{_of_template(account.chat_template)}",
        _tiles(account, splits, max_length),
        [one for one in charts if one.names],
        [row for split, tokens in splits.items() for row in with_looks(named[split], rows[split], tokens.places)],
        max_length,
        account.example,
        account.model,
    )
    return render("lengths.html.jinja", page)


def _of_template(found: ChatTemplate | None) -> str:
    if found is None:
        return ""
    if found.difference is None:
        return " The model's own chat template gives them the tokens of the training."
    return (
        f" The model's own chat template differs from the training (accepted by template_differs): {found.difference}."
    )


def _chart(title: str, unit: str, series: dict[str, Histogram]) -> Chart:
    return chart(title, unit, series, wide_bins(series))


def _tiles(account: LengthSummary, splits: dict[str, Tokens], max_length: int) -> list[Tile]:
    train, most, all_rows = account.train, account.max_length.covers_most, account.max_length.covers_all
    above = "; longer rows need over_long: leave_out or shorten" if most < all_rows else ""
    over_long = sum(one.over_long for one in splits.values())
    rows = sum(one.all.count for one in splits.values())
    return [
        Tile("rows to train on", f"{train.rows:,}", f"{train.tokens:,} tokens"),
        Tile("trained tokens", f"{train.trained_tokens:,}", "of train: answers with their ends"),
        Tile("picture tokens", f"{train.picture_share:.0%}", "of the tokens of train"),
        Tile("train.max_length", f"{max_length:,}", f"{over_long:,} of {rows:,} rows are longer"),
        Tile("99.9 % of rows fit", f"{most:,}", f"recommended max_length{above}"),
        Tile("all rows fit", f"{all_rows:,}", "max_length"),
    ]
