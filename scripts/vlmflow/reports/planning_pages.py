"""The pages that plan a run before it asks for a GPU: the lengths of its rows, and the estimate of what it needs."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from vlmflow.config.gpus import GPUS
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import MAKE_AGAIN, read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.account import NoEstimate, Result
from vlmflow.estimate.changes import FITS, REFUSED, parts_of, spread_of
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.lengths.summary import LengthSummary
from vlmflow.reports.charts import Histogram, wide_chart
from vlmflow.reports.page import render
from vlmflow.rows.chat import turn_texts, without_tags
from vlmflow.rows.sharegpt import ShareGptRow, lines_of


def lengths_page(
    run: str, lengths: Mapping[str, Path], rows: Mapping[str, Path], summary: Path, max_length: int
) -> str:
    """Return `reports/lengths-RUN.html`: the tokens of a run's rows, and the max_length that they need.

    lengths, rows: the lengths file, and the measured rows, of train and of val.
    max_length: the run's own (train.max_length).

    Raises VlmflowError if a file has a damaged line.
    """
    account = read_account(summary, LengthSummary)
    longest = {split: account.splits[split].longest for split in lengths}
    tokens = {split: Tokens(file, max_length, {row.id for row in longest[split]}) for split, file in lengths.items()}
    return render(
        "lengths.html.jinja",
        run=run,
        account=account,
        max_length=max_length,
        tokens=tokens.values(),
        charts=[
            wide_chart(title, unit, {split: getattr(of_file, part) for split, of_file in tokens.items()})
            for title, unit, part in (
                ("Tokens of a row", "tokens, text and pictures", "all"),
                ("Text of a row", "tokens, chat markup included", "text"),
                ("Pictures of a row", "tokens, in rows with a picture", "pictures"),
            )
        ],
        longest=[
            (split, row, _look(rows[split], *tokens[split].places[row.id]))
            for split, named in longest.items()
            for row in named
        ],
    )


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


def _look(file: Path, start: int, end: int) -> dict[str, str | int]:
    """Return the question of a row of a data file, the number of its turns without a system prompt, and its source.

    start, end: its bytes there.

    Raises VlmflowError if there is no row.
    """
    with file.open("rb") as rows:
        line = os.pread(rows.fileno(), end - start, start)
    try:
        row = msgspec.json.decode(line, type=ShareGptRow)
    except ValueError as error:
        raise VlmflowError(f"{file}, bytes {start:,} to {end:,}: {error}", MAKE_AGAIN) from None
    texts = turn_texts(row.conversations)
    question = " ".join(without_tags(texts[0]).split()) if texts else ""
    return {"question": question, "turns": len(texts), "source": row.source}


def estimate_page(run: str, result: Result, settings: PartOf[RunSettings]) -> str:
    """Return `reports/estimate-RUN.html`: memory, time, price and disk of a run, and what would make it fit.

    result: the estimate, or why there is none. settings: those of the run.
    """
    if isinstance(result, NoEstimate):
        return render("estimate.html.jinja", run=run, estimate=None, reason=result.reason)
    return render(
        "estimate.html.jinja",
        run=run,
        estimate=result,
        settings=settings,
        spread=spread_of(result),
        schedule=schedule_in_words(result.steps, result.evaluations),
        parts=parts_of(result.memory),
        gpus=GPUS,
        colour_of=_colour_of,
    )


def _colour_of(memory_share: float) -> str:
    """Return the class of a product by the share of its memory that is needed."""
    return "good" if memory_share <= FITS else "maybe" if memory_share <= REFUSED else "bad"
