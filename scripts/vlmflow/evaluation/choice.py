"""Which rows are evaluated: those with feedback and a donor, drawn by picture."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from vlmflow.config.settings import GOOD
from vlmflow.evaluation.report import LeftOut
from vlmflow.evaluation.scoring.stated import answer_in, normalised
from vlmflow.rows.chat import CALLS, Turn, dialogue_start
from vlmflow.rows.holdout import group_of
from vlmflow.rows.raw_text import SINGLE_TURN
from vlmflow.rows.sharegpt import ShareGptRow

ATTEMPT = re.compile(r"-a(\d+)$")
"""The attempt at the end of an id in the timestep form (`trajectories.timestep_rows`)."""

WRONG_TO = 5
"""The score up to which an attempt is wrong; from GOOD on it is right."""


@dataclass(frozen=True)
class Case:
    """A row that can be evaluated.

    group: see `halves.group_of`. pictures: the SHA-256 of its pictures. wrong: the answer with which its last, right
    one is compared (`with_right_last`); None if there is none.
    """

    row: ShareGptRow
    group: str
    pictures: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def turns(self) -> list[Turn]:
        """The dialogue, without a turn from system."""
        return self.row.conversations[dialogue_start(self.row.conversations) :]

    @property
    def system(self) -> list[Turn]:
        """The system prompt as a list of one turn; [] for a row without one."""
        return self.row.conversations[: dialogue_start(self.row.conversations)]

    @property
    def feedback(self) -> list[str]:
        """The human's turns after the question: one on each answer but the last. A row with calls has no feedback."""
        called = any(turn.speaker == CALLS for turn in self.turns)
        return [] if called else [turn.value for turn in self.turns[2::2]]

    @property
    def answer(self) -> str:
        """The text of the last turn, the answer that is scored."""
        return self.turns[-1].value


def read_case(row: ShareGptRow, pictures: Mapping[str, str], one_prompt: bool = False) -> Case:
    """Return a row with its group. pictures: the SHA-256 of every picture, by its name in the store; see `group_of`."""
    return Case(row, group_of(row, pictures, one_prompt), tuple(pictures[name] for name in row.images))


def with_right_last(case: Case) -> Case | LeftOut:
    """Return a row with feedback cut after its right answer, with the wrong one with which that is compared.

    right: the last answer that scored GOOD or more; it must follow feedback. wrong: the first before it that
    scored WRONG_TO or less. In a row without scores the last answer is right, and none is wrong.
    """
    scores = case.row.scores
    if not scores:
        return case
    answers = [turn.value for turn in case.turns[1::2]]
    said = [answer_in(text) for text in answers]
    right = max((place for place, score in enumerate(scores) if score >= GOOD and said[place]), default=0)
    if not right:
        return LeftOut(case.row.id, "no_right", f"scores {_listed(scores)}: none after feedback is {GOOD} or more")
    wrong = next((place for place, score in enumerate(scores[:right]) if score <= WRONG_TO and said[place]), None)
    if wrong is None:
        return LeftOut(case.row.id, "no_wrong", f"scores {_listed(scores)}: none before is {WRONG_TO} or less")
    if normalised(said[wrong]) == normalised(said[right]):
        return LeftOut(
            case.row.id, "no_wrong", f"the answer that scored {scores[wrong]:g} says the same as the right one"
        )
    row = case.row.until(len(case.system) + 2 * right + 2)
    return replace(case, row=row, pictures=case.pictures[: len(row.images)], wrong=answers[wrong])


def _listed(scores: Iterable[float]) -> str:
    return ", ".join(f"{score:g}" for score in scores)


def parted(
    cases: Sequence[Case], stays: Callable[[Case], bool], reason: str, detail: str
) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows that stay, and the others as left out. reason, detail: why (`LeftOut`)."""
    out = [LeftOut(case.row.id, reason, detail) for case in cases if not stays(case)]
    return [case for case in cases if stays(case)], out


def without_single_turns(cases: Sequence[Case]) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows of whole trajectories, and those that repeat one of their answers (`single_turn`) as left out."""
    why = "the row of its trajectory has this question and answer"
    return parted(cases, lambda case: not case.row.id.endswith(SINGLE_TURN), "single_turn", why)


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
    why = "the trajectory has a row with a later attempt"
    return parted(cases, lambda case: case.row.id in kept, "earlier_attempt", why)


def of_groups(cases: Sequence[Case], groups: frozenset[str]) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows of one half of val (`halves.half_of`), and the others as left out."""
    return parted(cases, lambda case: case.group in groups, "other_half", "one half of val chooses, the other judges")


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
    return parted(cases, lambda case: case.group in drawn, "not_drawn", f"{rows} rows were to be drawn ({key})")
