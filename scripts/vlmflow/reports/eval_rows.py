"""The rows behind an evaluation: those in which the tuned model and its base differ most, with what they read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmflow.config.settings import PictureLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.choice import Case, read_case, with_right_last
from vlmflow.evaluation.report import OTHER, OWN, QUESTION, AnsweredRow, AnsweredTurn, EvaluatedRow, Margin
from vlmflow.evaluation.verdict import row_shares
from vlmflow.reports.data_page import CHARACTERS_SHOWN, THUMBNAIL, Text
from vlmflow.reports.eval_figures import names_of
from vlmflow.reports.thumbnails import Shown, thumbnail
from vlmflow.rows.chat import FIRST_LINE
from vlmflow.rows.sharegpt import ShareGptRow, lines_of

ROWS_SHOWN = 6
"""Rows that gained most, and as many that lost most."""


@dataclass(frozen=True)
class Pictures:
    """Where pictures are, and their limits. store: None if rows have none."""

    store: Path | None
    limits: PictureLimits

    def shown(self, names: Sequence[str]) -> list[Shown]:
        """Return small copies of some pictures."""
        if self.store is None:
            return []
        return [Shown(thumbnail(self.store / name, THUMBNAIL, self.limits), name) for name in names]


@dataclass(frozen=True)
class ShownRow:
    """An evaluated row.

    change: `change_of`. turns: speaker and text of what stands before the scored answers; without feedback all turns.
    right, wrong: the scored answers. margins: of each context the name, and the margins of base and tuned.
    other_feedback, other_pictures: the controls. answers: what both models answered at each turn; [] if not asked.
    """

    id: str
    source: str
    change: float
    pictures: list[Shown]
    turns: list[tuple[str, Text]]
    right: Text | None
    wrong: Text | None
    margins: list[tuple[str, float, float]]
    other_feedback: Text | None
    other_pictures: list[Shown]
    answers: list[AnsweredTurn]


@dataclass(frozen=True)
class ChangedRows:
    """Rows in which the models differ, one way. count: how many there are. shown: those that changed most."""

    count: int
    shown: list[ShownRow]


def changed_rows(
    rows: Iterable[EvaluatedRow], file: Path, answers: Mapping[str, AnsweredRow], pictures: Pictures
) -> tuple[ChangedRows, ChangedRows]:
    """Return the rows in which the tuned model does better than its base, and those in which it does worse.

    file: the split of the data set. answers: of rows about which both models were asked, by id.

    Raises VlmflowError if a row is not in the file as it was evaluated.
    """
    different = sorted((row for row in rows if _differs(row)), key=_order)
    gained = [row for row in different if change_of(row) > 0]
    lost = [row for row in different[::-1] if change_of(row) < 0]
    most = [*gained[:ROWS_SHOWN], *lost[:ROWS_SHOWN]]
    cases = _cases(most, file)
    gains, losses = (
        ChangedRows(len(some), [_shown(row, cases, answers, pictures) for row in some[:ROWS_SHOWN]])
        for some in (gained, lost)
    )
    return gains, losses


def change_of(row: EvaluatedRow) -> float:
    """Return by how much a row speaks for the tuned model, in nats per token.

    It is what the own feedback adds to the margin, compared with another row's; tuned minus base. Without feedback it
    is what the log-probability of the answers gained.
    """

    def shown_by(margins: dict[str, Margin]) -> float:
        return margins[OWN].value - margins[OTHER].value if OTHER in margins else margins[QUESTION].value

    return shown_by(row.tuned) - shown_by(row.base)


def _differs(row: EvaluatedRow) -> bool:
    """Return whether the models differ in the row's part of the figure on which the verdict rests."""
    base, tuned = (row_shares(margins).get("uses_feedback") for margins in (row.base, row.tuned))
    return change_of(row) != 0 if base is None else base != tuned


def _order(row: EvaluatedRow) -> tuple[float, str]:
    return -change_of(row), row.id


def _cases(rows: Sequence[EvaluatedRow], file: Path) -> dict[str, Case]:
    """Return rows, and those that give their controls, as they were evaluated."""
    names = {name for row in rows for name in (row.id, row.donor, row.picture_donor) if name}
    feedback = any(row.donor for row in rows)
    found = {}
    for row in lines_of(file, ShareGptRow):
        if row.id in names:
            case = read_case(row, dict.fromkeys(row.images, ""))  # digests only tell its group
            cut = with_right_last(case) if feedback else case
            if isinstance(cut, Case):
                found[row.id] = cut
    if missing := sorted(names - found.keys()):
        raise VlmflowError(
            f"{file}: it has no row {missing[0]} as it was evaluated",
            "the data set has changed since: run the same command again, and the run is made and evaluated again",
        )
    return found


def _shown(
    row: EvaluatedRow, cases: Mapping[str, Case], answers: Mapping[str, AnsweredRow], pictures: Pictures
) -> ShownRow:
    case = cases[row.id]
    turns = [*case.system, *case.turns]
    names = names_of(row.base)
    return ShownRow(
        id=row.id,
        source=row.source,
        change=change_of(row),
        pictures=pictures.shown(row.images),
        turns=[(turn.speaker, _beginning(turn.value)) for turn in (turns if row.right is None else turns[:-1])],
        right=None if row.right is None else _beginning(row.right),
        wrong=None if row.wrong is None else _beginning(row.wrong),
        margins=[(names[name], row.base[name].value, row.tuned[name].value) for name in row.base],
        other_feedback=_beginning("\n".join(cases[row.donor].feedback)) if row.donor else None,
        other_pictures=pictures.shown(cases[row.picture_donor].row.images) if row.picture_donor else [],
        answers=answers[row.id].turns if row.id in answers else [],
    )


def _beginning(text: str) -> Text:
    return Text.beginning(text.removeprefix(FIRST_LINE), CHARACTERS_SHOWN)
