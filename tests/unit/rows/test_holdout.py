"""Rows with several pictures: who is held out takes along what is connected with it."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.rows.holdout import held_out, hold_out
from vlmflow.rows.row_check import CheckedRows


def of_rows(rows: list[set[int]]) -> Any:
    """Return the groups of rows with these pictures, as `CheckedRows` has them."""
    made = SimpleNamespace(groups=Counter(), several={})
    for row in rows:
        parts = [bytes([number]) for number in sorted(row)]
        group = b"+".join(parts)
        made.groups[group] += 1
        if len(parts) > 1:
            made.several[group] = parts
    return made


def left_out(made: Any, chosen: frozenset[bytes]) -> int:
    """Return how many rows are in no split."""
    parts = CheckedRows.parts_of(made, chosen)
    return sum(made.groups[group] for group in CheckedRows.groups_with(made, parts) - chosen)


@given(st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=40))
def test_groups_are_connected_that_have_a_picture_in_common(rows: list[set[int]]) -> None:
    """Compared with a plain search."""
    made = of_rows(rows)
    connected = CheckedRows.connected(made)
    for row in rows:
        reached, before = set(row), None
        while reached != before:
            before = set(reached)
            reached.update(*(other for other in rows if not reached.isdisjoint(other)))
        group = b"+".join(bytes([number]) for number in sorted(row))
        together = {b"+".join(bytes([n]) for n in sorted(other)) for other in rows if other <= reached}
        assert set(connected.get(group, [group])) == together


def test_no_row_is_lost_where_few_are_connected() -> None:
    """As in pairs of pictures before and after a change, each pair asked about three times."""
    rows = [pair for n in range(60) for pair in ({3 * n % 180, 3 * n % 180 + 1}, {3 * n % 180 + 1, 3 * n % 180 + 2})]
    made = of_rows(rows)
    alone = hold_out(made.groups, 0.1, "1", frozenset())
    together = hold_out(made.groups, 0.1, "1", frozenset(), CheckedRows.connected(made))
    assert left_out(made, alone) > 0
    assert left_out(made, together) == 0
    assert sum(made.groups[group] for group in together) == pytest.approx(12, abs=2)


def test_what_is_still_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Six rows, each with two of three pictures: any in val leaves others in no split."""
    checked, made = object.__new__(CheckedRows), of_rows([{n % 3, (n + 1) % 3} for n in range(6)])
    checked.groups, checked.several, checked.questions = made.groups, made.several, {}
    held = held_out({"train": checked}, frozenset(), frozenset(), 0.0, 0.4, 1, lambda _: {})
    assert len(held.val) == 2
    assert "2 of 6 rows have a picture of val beside others, and are in no split" in caplog.text


def test_where_all_are_connected_the_share_is_kept() -> None:
    draw = Random(1)
    made = of_rows([set(draw.sample(range(40), 3)) for _ in range(200)])
    chosen = hold_out(made.groups, 0.1, "1", frozenset(), CheckedRows.connected(made))
    assert sum(made.groups[group] for group in chosen) == pytest.approx(20, abs=2)
