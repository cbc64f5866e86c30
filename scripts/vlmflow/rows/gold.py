"""The right answers that raw rows have beside their turns; training rows do not have them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows.raw_text import SINGLE_TURN, row_id

ID = re.compile(rf"((train|val|test)-(\d+)-[0-9a-f]{{8}})(?:-a\d+|{SINGLE_TURN})?")
"""An id of `row_id`, and in the timestep form the attempt, or SINGLE_TURN."""


def gold_answers(
    ids: Iterable[str],
    raw: Mapping[str, Sequence[Path]],
    fixed_rows: Sequence[Path],
    gold: Callable[[bytes], str | None],
) -> dict[str, str]:
    """Return the right answers of training rows by their ids; rows without one are left out.

    raw: the raw files by split. fixed_rows: files of edited rows. gold: see `RawForm`.

    Raises VlmflowError if the raw row is another one than that from which the training row was made.
    """
    wanted: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for identity in ids:
        if found := ID.fullmatch(identity):
            wanted[found[2]].append((int(found[3]), found[1], identity))
    answers = {}
    for split, rows in wanted.items():
        if not raw.get(split):
            continue
        with open_rows(raw[split], split, fixed_rows) as raw_rows:
            for number, expected, identity in rows:
                row = raw_rows[number] if number < len(raw_rows) else b""
                if row_id(split, number, row) != expected:
                    raise VlmflowError(
                        f"{raw_rows}: row {number} is not the one from which row {identity} was made",
                        "the raw file has changed: remove the data set's folders in converted/ and data/, and run the "
                        "same command again",
                    )
                if (answer := gold(row)) is not None:
                    answers[identity] = answer
    return answers
