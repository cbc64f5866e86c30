"""Collects the data page's facts from a data set's files, line by line, so that memory does not grow with the rows."""

import hashlib
import heapq
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress
from vlmflow.pictures.manifest import read_picture_manifest, size_of
from vlmflow.reports.charts import Histogram
from vlmflow.rows.chat import answers, said
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.rows.stats import QuarantinedRow

FILES = ("train", "val", "test")
"""The data files of a data set, without their suffix."""

SAMPLES = {"train": 9, "test": 3}
"""The number of conversations of a file that the page shows."""

REJECTS_PER_REASON = 3


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


def row_facts(rows: Path, samples: int) -> RowFacts:
    """Read one data file.

    samples: the number of sample rows, from as many sources as possible.

    Raises VlmflowError if a line is not a row.
    """
    facts = RowFacts()
    drawn: dict[str, list[tuple[str, ShareGptRow]]] = {}
    for row in lines_of(rows, ShareGptRow):
        facts.turns.add(len(said(row.conversations)))
        facts.characters.add(sum(len(turn.value) for turn in row.conversations))
        for answer in answers(row.conversations):
            facts.answers.add(len(answer))
        for score in row.scores:
            facts.scores.add(int(score))
        if samples:
            _draw(drawn, row, samples)
    facts.samples = _mixed(drawn, samples)
    return facts


def _draw(drawn: dict[str, list[tuple[str, ShareGptRow]]], row: ShareGptRow, samples: int) -> None:
    """Keeps at most `samples` rows of each of at most `samples` sources: those with the lowest hash of identity."""
    order = hashlib.blake2b(row.id.encode(), digest_size=8).hexdigest()
    if row.source not in drawn and len(drawn) == samples:
        last = max(drawn, key=lambda source: drawn[source][0][0])
        if order > drawn[last][0][0]:
            return
        del drawn[last]
    held = drawn.setdefault(row.source, [])
    held.append((order, row))
    held.sort(key=lambda pair: pair[0])
    del held[samples:]


def _mixed(drawn: dict[str, list[tuple[str, ShareGptRow]]], samples: int) -> list[ShareGptRow]:
    """Return the first row of every source, then the second ones, until there are enough."""
    ranked = ((rank, order, row) for held in drawn.values() for rank, (order, row) in enumerate(held))
    return [row for _, _, row in heapq.nsmallest(samples, ranked, key=lambda item: item[:2])]


def longer_sides(manifest: Path) -> Histogram:
    """Count the usable pictures of an image manifest by their longer side, in pixels."""
    sides = Histogram()
    with Progress(f"reading {manifest}", count_lines(manifest), "pictures") as progress:
        for entry in read_picture_manifest(manifest):
            if entry.reason is None:
                sides.add(max(size_of(entry)))
            progress.advance()
    return sides


def first_rejects(quarantine: Path) -> dict[str, list[QuarantinedRow]]:
    """Return the first rejected rows of every reason; reads all lines.

    Raises VlmflowError if a line is not a rejected row.
    """
    found: dict[str, list[QuarantinedRow]] = {}
    for row in lines_of(quarantine, QuarantinedRow):
        examples = found.setdefault(row.reason, [])
        if len(examples) < REJECTS_PER_REASON:
            row.raw = row.raw.copy()  # otherwise the whole line would stay in memory
            examples.append(row)
    return found
