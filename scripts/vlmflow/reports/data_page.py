"""The data page: one HTML file with a data set's content, its lost rows, and the reasons.

The data set's files are read line by line, so that memory does not grow with the rows.
"""

import base64
import hashlib
import heapq
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.config.settings import NearDuplicates, PictureLimits
from vlmflow.core.account import read_account
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress
from vlmflow.pictures.decode import plain_picture
from vlmflow.pictures.manifest import Unusable, read_picture_manifest, size_of
from vlmflow.pictures.roots import read_picture
from vlmflow.reports.charts import Chart, Histogram, integer_chart, wide_chart
from vlmflow.reports.counts_page import ranked, row_account
from vlmflow.reports.page import render
from vlmflow.rows.chat import answers, turn_texts
from vlmflow.rows.near_duplicates import NearDuplicate
from vlmflow.rows.sharegpt import ShareGptRow, in_words, lines_of
from vlmflow.rows.stats import QuarantinedRow, Stats

FILES = ("train", "val", "test")
"""The data files of a data set, without their suffix."""

SAMPLES = {"train": 9, "test": 3}
"""The number of conversations of a file that the page shows."""

REJECTS_PER_REASON = 3
PAIRS_SHOWN = 12


def data_page(
    data: Path,
    manifests: Mapping[str, Path],
    store: Path,
    limits: PictureLimits,
    near_duplicates: NearDuplicates,
    good_run: str | None = None,
) -> str:
    """Return the page.

    data: the data set's folder with the files of `validate_sharegpt` and `find_near_duplicates`.
    manifests: the image manifest of each raw split. store: the data set's picture store. limits: those of its pictures.
    near_duplicates: how they were searched, and whether their train rows were rejected. good_run: a run that trains
    only good attempts of the same data.

    Raises VlmflowError if a file has a damaged line.
    """
    stats = read_account(data / "stats.json", Stats)
    facts = {name: row_facts(data / f"{name}.jsonl", SAMPLES.get(name, 0)) for name in FILES}
    sides = {split: _longer_sides(manifest) for split, manifest in manifests.items()}
    return render(
        "data.html.jinja",
        sources=ranked(stats.kept_by_source),
        trained_text=in_words(stats.trained_characters, stats.scored, good_run),
        row_charts=_row_charts(facts),
        picture_chart=wide_chart("Size of the usable pictures", "pixels, longer side", sides),
        looked=bool(manifests),
        near=_near(data / "near_duplicates.jsonl"),
        near_duplicates=near_duplicates,
        samples=[(name, row) for name, of_file in facts.items() for row in of_file.samples],
        thumbnail=lambda name, side: thumbnail(store / name, side, limits),
        rejects=_first_rejects(data / "quarantine.jsonl"),
        rejects_per_reason=REJECTS_PER_REASON,
        text_of=lambda row: bytes(row.raw).decode(errors="replace"),
        quarantine=data / "quarantine.jsonl",
        **row_account(stats),
    )


@dataclass
class RowFacts:
    """Figures of the rows of one data file.

    turns: per row. characters: of all turns of a row together. answers: characters of every gpt turn.
    scores: one per scored answer, 0 to 10.
    samples: rows chosen by a hash of their identity, the same in every run.
    """

    turns: Histogram = field(default_factory=Histogram)
    characters: Histogram = field(default_factory=Histogram)
    answers: Histogram = field(default_factory=Histogram)
    scores: Histogram = field(default_factory=Histogram)
    samples: list[ShareGptRow] = field(default_factory=list)


def row_facts(file: Path, samples: int) -> RowFacts:
    """Read one data file.

    samples: the number of sample rows, from as many sources as possible.

    Raises VlmflowError if a line is not a row.
    """
    facts = RowFacts()
    drawn: dict[str, list[tuple[str, ShareGptRow]]] = {}
    for row in lines_of(file, ShareGptRow):
        facts.turns.add(len(turn_texts(row.conversations)))
        facts.characters.add(sum(len(turn.value) for turn in row.conversations))
        for answer in answers(row.conversations):
            facts.answers.add(len(answer))
        for score in row.scores:
            facts.scores.add(int(score))
        if samples:
            _draw(drawn, row, samples)
    # The first row of every source, then the second ones, until there are enough.
    numbered = ((rank, order, row) for rows in drawn.values() for rank, (order, row) in enumerate(rows))
    facts.samples = [row for _, _, row in heapq.nsmallest(samples, numbered, key=lambda item: item[:2])]
    return facts


def _draw(drawn: dict[str, list[tuple[str, ShareGptRow]]], row: ShareGptRow, samples: int) -> None:
    """Keep at most `samples` rows of each of at most `samples` sources: those with the lowest hash of identity."""
    order = hashlib.blake2b(row.id.encode(), digest_size=8).hexdigest()
    if row.source not in drawn and len(drawn) == samples:
        last = max(drawn, key=lambda source: drawn[source][0][0])
        if order > drawn[last][0][0]:
            return
        del drawn[last]
    rows = drawn.setdefault(row.source, [])
    rows.append((order, row))
    rows.sort(key=lambda pair: pair[0])
    del rows[samples:]


def _row_charts(facts: Mapping[str, RowFacts]) -> list[Chart | None]:
    def series(measure: str) -> dict[str, Histogram]:
        return {name: getattr(of_file, measure) for name, of_file in facts.items()}

    return [
        integer_chart("Turns of a row", "turns, without that of system", series("turns")),
        integer_chart("Scores of the answers", "score, 0 to 10", series("scores"), range(11)),
        wide_chart("Text of a row", "characters, all turns together", series("characters")),
        wide_chart("Text of an answer", "characters of a gpt turn", series("answers")),
    ]


def _longer_sides(manifest: Path) -> Histogram:
    """Count the usable pictures of an image manifest by their longer side, in pixels."""
    sides = Histogram()
    with Progress(f"reading {manifest}", count_lines(manifest), "pictures") as progress:
        for entry in read_picture_manifest(manifest):
            if entry.reason is None:
                sides.add(max(size_of(entry)))
            progress.advance()
    return sides


@dataclass
class Near:
    """The near-duplicates of the test split.

    pictures, questions: the numbers of both kinds. rows: train rows that name these pictures. same: the number of these
    with a question of the test split. nearest: the first ones to show.
    """

    pictures: int = 0
    rows: int = 0
    same: int = 0
    questions: int = 0
    nearest: list[NearDuplicate] = field(default_factory=list)


def _near(file: Path) -> Near:
    def order(pair: NearDuplicate) -> tuple[int, int]:
        return pair.distance, -pair.same_questions

    near = Near(nearest=heapq.nsmallest(PAIRS_SHOWN, lines_of(file, NearDuplicate), key=order))
    for pair in lines_of(file, NearDuplicate):
        if pair.kind == "question":
            near.questions += 1
        else:
            near.pictures += 1
            near.rows += pair.rows
            near.same += pair.same_questions
    return near


def _first_rejects(quarantine: Path) -> dict[str, list[QuarantinedRow]]:
    """Return the first rejected rows of every reason; reads all lines.

    Raises VlmflowError if a line is not a rejected row.
    """
    first: dict[str, list[QuarantinedRow]] = {}
    for row in lines_of(quarantine, QuarantinedRow):
        rows = first.setdefault(row.reason, [])
        if len(rows) < REJECTS_PER_REASON:
            row.raw = row.raw.copy()  # otherwise the whole line would stay in memory
            rows.append(row)
    return first


QUALITY = 82

RGB_BYTES = 4
"""The most bytes per pixel of a rewritten copy on the disk: three, and PNG's overhead."""


def thumbnail(picture: Path, side: int, limits: PictureLimits) -> str | None:
    """Return a picture, scaled down to at most `side` pixels, as the data URL of a JPEG without metadata.

    limits: those with which it was checked. The file may have changed since, so it is checked again; returns None if it
    cannot be shown.
    """
    max_bytes = max(limits.max_bytes, RGB_BYTES * limits.max_pixels)
    content = read_picture(os.path.realpath(picture), max_bytes)
    if isinstance(content, Unusable):
        return None
    rgb = plain_picture(content, limits)
    if isinstance(rgb, Unusable):
        return None
    small = io.BytesIO()
    rgb.thumbnail((side, side))
    rgb.info.clear()  # drop comments, profiles and EXIF blocks of other people
    rgb.save(small, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(small.getvalue()).decode()
