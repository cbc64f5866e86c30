"""The near-duplicates on the data page: their number, and the nearest of them in pairs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count
from pathlib import Path

from vlmflow.config.settings import NearDuplicates, PictureLimits
from vlmflow.reports.thumbnails import Shown, thumbnail
from vlmflow.rows.near_duplicates import NearDuplicate
from vlmflow.rows.sharegpt import lines_of

SHOWN = 12
THUMBNAIL = 240
"""Pixels of the longer side."""

QUESTION_SHOWN = 300
"""Characters."""


@dataclass(frozen=True)
class Pair:
    """A near-duplicate on the page. pictures: those of train and of test; none for two questions.

    names: those of pictures or rows, with their split. question: the beginning of the common question.
    """

    pictures: list[Shown]
    distance: int
    rows: int
    same_questions: int
    names: list[tuple[str, str]]
    question: str


@dataclass
class LookAlikes:
    """All near-duplicates.

    distance, dropped: near_duplicates.picture_distance and drop. looked: whether pictures were compared.
    pictures, questions: the numbers of both kinds. rows: train rows that name these pictures. same: the number of these
    with a question of the test split. nearest: the first ones to show.
    """

    distance: int
    dropped: bool
    looked: bool
    pictures: int = 0
    rows: int = 0
    same: int = 0
    questions: int = 0
    nearest: list[Pair] = field(default_factory=list)


def look_alikes(pairs: Path, store: Path, limits: PictureLimits, settings: NearDuplicates, looked: bool) -> LookAlikes:
    """Collect the page's facts about near-duplicates.

    pairs: the file of `find_near_duplicates`. store: the data set's picture store. limits: those of its pictures.
    settings: how they were searched, and whether their train rows were rejected.
    looked: whether pictures were compared.
    """
    found = LookAlikes(settings.picture_distance, settings.drop, looked)

    def counted() -> Iterator[NearDuplicate]:
        for pair in lines_of(pairs, NearDuplicate):
            if pair.kind == "question":
                found.questions += 1
            else:
                found.pictures += 1
                found.rows += pair.rows
                found.same += pair.same_questions
            yield pair

    numbers = count()
    nearest = nsmallest(SHOWN, counted(), key=lambda pair: (pair.distance, -pair.same_questions, next(numbers)))
    found.nearest = [_pair(pair, store, limits) for pair in nearest]
    return found


def _pair(pair: NearDuplicate, store: Path, limits: PictureLimits) -> Pair:
    names = [("train", pair.train), ("test", pair.test)]
    pictures = [] if pair.kind == "question" else [thumbnail(store / name, THUMBNAIL, limits) for _, name in names]
    shown = [Shown(url, name) for url, (_, name) in zip(pictures, names, strict=False)]
    return Pair(shown, pair.distance, pair.rows, pair.same_questions, names, (pair.question or "")[:QUESTION_SHOWN])
