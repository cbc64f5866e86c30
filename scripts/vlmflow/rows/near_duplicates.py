"""Finds pictures and questions of train rows that are nearly the same as in the test split, but not exactly."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.pictures.look_alikes import LookAlike, find_look_alikes, read_hashes
from vlmflow.pictures.manifest import name_and_digest, read_picture_manifest
from vlmflow.rows.chat import turn_texts
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.row_check import question_key, question_of
from vlmflow.rows.sharegpt import ShareGptRow, lines_of


class SearchedRow(ConvertedRow, kw_only=True, gc=False):
    """A converted row, or a validated one of a mixture, which has no facts about a raw row."""

    raw_row: int = 0
    score_field_differs: bool = False


class NearDuplicate(msgspec.Struct):
    """One line of near_duplicates.jsonl.

    kind: "picture": a picture of train rows looks like one of the test split; "question": a train row without a
    picture asks the same as a test row without one.
    train, test: the pictures' names in the store; for questions the rows' ids.
    distance: the number of the 64 bits in which the pictures' hashes differ; 0 for questions.
    rows: the number of train rows with the picture; 1 for questions.
    same_questions: how many of these rows ask the same as a row of the test picture.
    question: the first such question, normalised; null if there is none.
    """

    kind: Literal["picture", "question"]
    train: str
    test: str
    distance: int
    rows: int = 1
    same_questions: int = 0
    question: str | None = None


@dataclass
class Found:
    """The number of near-duplicates: pictures of train rows, and train rows without a picture."""

    pictures: int = 0
    rows: int = 0


def find_near_duplicates(
    train: Path,
    test: Path,
    manifests: list[Path],
    tables: Iterable[Path],
    distance: int,
    pairs: Path,
    one_prompt: bool = False,
) -> Found:
    """Write a NearDuplicate for every near picture, then for every near question, in the order of the train rows.

    train: converted rows, or the train rows of a mixture, which name pictures by the paths in the first of `manifests`.
    test: validated rows, which name them as the store does. manifests: train's first. tables: the tables of the
    pictures' hashes.
    distance: the largest distance of near pictures, in bits. pairs: the JSON lines to write.
    one_prompt: all questions are the same, so rows are compared by question and answer.

    A train row without a picture whose question is exactly in the test split is not listed: it is a test row itself, or
    `validate_sharegpt` rejected it. Memory grows with the pictures, the test rows and the near-duplicates, not with the
    train rows.

    Raises VlmflowError if a line of an input is damaged.
    """
    digests, names = _pictures(manifests)
    test_pictures = {digests[name] for row in lines_of(test, ShareGptRow) for name in row.images if name in digests}
    alike = find_look_alikes(read_hashes(tables), test_pictures, distance)
    named = (entry for manifest in manifests[:1] for entry in read_picture_manifest(manifest))
    paths = {entry.path: digests[name_and_digest(entry)[0]] for entry in named if entry.reason is None}
    wanted = {near.sha256 for near in alike.values()}
    by_picture, alone, known = _test_questions(test, digests, wanted, one_prompt)
    pictures: dict[bytes, NearDuplicate] = {}
    questions: list[NearDuplicate] = []
    for row in lines_of(train, SearchedRow):
        to_the_letter, question = _asked(row, one_prompt)
        if not row.images:
            same = alone.get(question_key(question))
            if same is not None and question_key(to_the_letter) not in known:
                questions.append(NearDuplicate("question", row.id, same, 0, 1, 1, question))
        for digest in dict.fromkeys(map(paths.get, row.images)):
            if digest in alike:
                _count(pictures, digest, alike[digest], names, question, by_picture)
    with whole_file(pairs) as file:
        file.write(msgspec.json.Encoder().encode_lines([*pictures.values(), *questions]))
    return Found(len(pictures), len(questions))


def _asked(row: ShareGptRow, one_prompt: bool) -> tuple[str, str]:
    return question_of(turn_texts(row.conversations), one_prompt)


def _pictures(manifests: list[Path]) -> tuple[dict[str, bytes], dict[bytes, str]]:
    """Return the SHA-256 of the usable pictures by their names in the store, and the first name by SHA-256."""
    digests: dict[str, bytes] = {}
    names: dict[bytes, str] = {}
    for manifest in manifests:
        for entry in read_picture_manifest(manifest):
            if entry.reason is None:
                name, sha256 = name_and_digest(entry)
                digests[name] = bytes.fromhex(sha256)
                names.setdefault(digests[name], name)
    return digests, names


def _test_questions(
    test: Path, digests: dict[str, bytes], wanted: set[bytes], one_prompt: bool
) -> tuple[dict[bytes, set[bytes]], dict[bytes, str], set[bytes]]:
    """Return the keys (`question_key`) of the test rows' questions.

    digests: SHA-256 of the pictures by name. wanted: the pictures to collect questions about, by SHA-256.

    Returns three: normalised questions by picture; normalised questions of rows without a picture, with the id of the
    first such row; and the exact questions of these rows.
    """
    by_picture: dict[bytes, set[bytes]] = {}
    alone: dict[bytes, str] = {}
    known: set[bytes] = set()
    for row in lines_of(test, ShareGptRow):
        to_the_letter, question = _asked(row, one_prompt)
        key = question_key(question)
        if not row.images:
            alone.setdefault(key, row.id)
            known.add(question_key(to_the_letter))
        for digest in wanted.intersection(map(digests.get, row.images)):
            by_picture.setdefault(digest, set()).add(key)
    return by_picture, alone, known


def _count(
    pictures: dict[bytes, NearDuplicate],
    digest: bytes,
    alike: LookAlike,
    names: dict[bytes, str],
    question: str,
    by_picture: dict[bytes, set[bytes]],
) -> None:
    pair = pictures.get(digest)
    if pair is None:
        pair = pictures[digest] = NearDuplicate("picture", names[digest], names[alike.sha256], alike.distance, 0)
    pair.rows += 1
    if question_key(question) in by_picture[alike.sha256]:
        pair.same_questions += 1
        pair.question = pair.question or question
