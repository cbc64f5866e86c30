"""Which rows are evaluated: those with feedback and a donor, drawn by picture."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from vlmflow.evaluation.accounts import LeftOut
from vlmflow.rows.chat import Turn, dialogue_start
from vlmflow.rows.data_rows import Row
from vlmflow.rows.raw_text import SINGLE_TURN

ATTEMPT = re.compile(r"-a(\d+)$")
"""The attempt at the end of an id in the timestep form (`forms.fire.timestep_rows`)."""


@dataclass(frozen=True)
class Case:
    """A row that can be evaluated.

    group: the digest of its picture, or without one of its question. pictures: the SHA-256 of its pictures.
    """

    row: Row
    group: str
    pictures: tuple[str, ...] = ()

    @property
    def turns(self) -> list[Turn]:
        """The dialogue, without a turn from system."""
        return self.row.conversations[dialogue_start(self.row.conversations) :]

    @property
    def system(self) -> list[Turn]:
        """The turn from system, if there is one."""
        return self.row.conversations[: dialogue_start(self.row.conversations)]

    @property
    def feedback(self) -> list[str]:
        """The human's turns after the question: one on each answer but the last."""
        return [turn.value for turn in self.turns[2::2]]

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.turns[-1].value

    @property
    def score(self) -> float | None:
        """The score on which the last feedback comments; None if the row has none."""
        return self.row.scores[-2] if len(self.row.scores) > 1 else None


def read_case(row: Row, pictures: Mapping[str, str]) -> Case:
    """Return a row with its group. pictures: the SHA-256 of every picture, by its name in the store."""
    digests = tuple(pictures[name] for name in row.images)
    question = " ".join(row.conversations[dialogue_start(row.conversations)].value.split()).casefold()
    content = "\0".join(digests) if digests else question
    return Case(row, hashlib.sha256(content.encode()).hexdigest()[:16], digests)


def without_single_turns(cases: Sequence[Case]) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows of whole trajectories, and those that repeat one of their answers (`single_turn`) as left out."""
    again = [
        LeftOut(case.row.id, "single_turn", "the row of its trajectory has this question and answer")
        for case in cases
        if case.row.id.endswith(SINGLE_TURN)
    ]
    return [case for case in cases if not case.row.id.endswith(SINGLE_TURN)], again


def last_attempts(cases: Sequence[Case]) -> tuple[list[Case], list[LeftOut]]:
    """Return the last row of every trajectory of the timestep form, and the earlier ones as left out.

    A trajectory of that form is one row per attempt. Their last answers are right only in the last row.
    """
    newest: dict[str, tuple[int, Case]] = {}
    for case in cases:
        found = ATTEMPT.search(case.row.id)
        number, trajectory = (int(found[1]), case.row.id[: found.start()]) if found else (0, case.row.id)
        if trajectory not in newest or number > newest[trajectory][0]:
            newest[trajectory] = number, case
    kept = {case.row.id for _, case in newest.values()}
    earlier = [
        LeftOut(case.row.id, "earlier_attempt", "the trajectory has a row with a later attempt")
        for case in cases
        if case.row.id not in kept
    ]
    return [case for case in cases if case.row.id in kept], earlier


def draw(cases: Iterable[Case], rows: int, seed: int, key: str) -> tuple[list[Case], list[LeftOut]]:
    """Draw whole groups until there are at least `rows` rows, or all; returns the others as left out.

    key: the one of the configuration that says how many rows, for the reason. The drawn rows are in the order of
    `cases`. With the same seed more rows include the fewer.
    """
    cases = list(cases)
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.group].append(case)
    names = sorted(groups)
    Random(seed).shuffle(names)  # noqa: S311 (drawn, not secret)
    drawn: set[str] = set()
    count = 0
    for name in names:
        if count >= rows:
            break
        drawn.add(name)
        count += len(groups[name])
    others = [
        LeftOut(case.row.id, "not_drawn", f"{rows} rows were to be drawn ({key})")
        for case in cases
        if case.group not in drawn
    ]
    return [case for case in cases if case.group in drawn], others
