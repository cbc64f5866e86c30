"""The halves of val: each row is in one of them, all rows of a picture in the same, and small splits have none."""

from made_cases import row
from training_rows import made_row
from vlmflow.evaluation.report import FEWEST_GROUPS
from vlmflow.rows.chat import Turn
from vlmflow.rows.holdout import FEWEST_TO_HALVE, group_of, half_of

GROUPS = [group_of(row(number, "c"), {}) for number in range(301)]


def test_each_group_is_in_one_half() -> None:
    chooses, judges = half_of(GROUPS, "chooses"), half_of(GROUPS, "judges")
    assert chooses is not None
    assert judges is not None
    assert chooses | judges == set(GROUPS)
    assert not chooses & judges
    assert (len(chooses), len(judges)) == (150, 151)


def test_the_halves_depend_on_the_groups_alone() -> None:
    """Neither on the order of rows, nor on how many a picture has."""
    assert half_of(GROUPS[::-1] + GROUPS[:50], "judges") == half_of(GROUPS, "judges")
    first = half_of(GROUPS, "judges") or frozenset()
    assert 50 < sum(group in first for group in GROUPS[:150]) < 100, "not the first rows, nor the last ones"


def test_a_small_split_is_not_halved() -> None:
    """A half must be large enough for an interval."""
    assert FEWEST_TO_HALVE == 2 * FEWEST_GROUPS
    assert half_of(GROUPS[: FEWEST_TO_HALVE - 1], "judges") is None
    assert len(half_of(GROUPS[:FEWEST_TO_HALVE], "judges") or []) == FEWEST_GROUPS


def test_rows_of_the_same_picture_or_question_are_one_group() -> None:
    same = {"a.jpg": "1" * 64, "copy.jpg": "1" * 64, "b.jpg": "2" * 64}
    a, copy, b = (group_of(row(number, "c", images=[name]), same) for number, name in enumerate(same))
    assert a == copy != b
    both, turned = (group_of(row(1, "c", images=names), same) for names in (["a.jpg", "b.jpg"], ["b.jpg", "copy.jpg"]))
    assert both == turned not in {a, b}, "the set of a row's pictures counts, as in the splits"
    assert group_of(row(1, "c"), {}) == group_of(row(1, "d"), {}) != group_of(row(2, "c"), {})


def test_rows_that_all_have_one_prompt_are_told_apart_by_their_answers() -> None:
    """As the splits do: every row of `kind: text` has the same question."""
    asked = [
        made_row(f"t-{number}", [Turn("human", "Continue."), Turn("gpt", f"Text {number}.")], "s")
        for number in range(3)
    ]
    assert len({group_of(row, {}) for row in asked}) == 1
    assert len({group_of(row, {}, one_prompt=True) for row in asked}) == 3
