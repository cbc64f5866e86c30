"""The two halves of val: the rows of one choose, those of the other judge what was chosen.

Who compares many checkpoints or trials by some rows, and keeps the best, has picked its luck on these rows, too. Of 20
equal models the best one is called better than another by the rows that chose it several times as often as by others
(`tests/unit/rows/test_halves.py`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

from vlmflow.rows.chat import dialogue_start
from vlmflow.rows.sharegpt import ShareGptRow

Part = Literal["chooses", "judges"]
"""chooses: by its validation loss a training keeps its best checkpoint, and by it a search ranks its trials. judges:
on it the evaluation of a run, and the comparison of a search's best trial with the run's own settings, rest."""

FEWEST_TO_HALVE = 200
"""With fewer groups all rows do both: half of them would be too few for an interval (`evaluation.accounts`)."""


def group_of(row: ShareGptRow, pictures: Mapping[str, str], one_prompt: bool = False) -> str:
    """Return the digest of the set of a row's pictures, or without one of its question: rows with the same are alike.

    pictures: the SHA-256 of every picture, by its name in the store. one_prompt: all questions are the same, so the
    first answer belongs to it.
    """
    start = dialogue_start(row.conversations)
    asked = " ".join(turn.value for turn in row.conversations[start : start + 1 + one_prompt])
    question = " ".join(asked.split()).casefold()
    content = "\0".join(sorted({pictures[name] for name in row.images})) if row.images else question
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def half_of(groups: Iterable[str], part: Part) -> frozenset[str] | None:
    """Return the groups of val whose rows choose, or judge; None if there are too few: then all rows do both.

    groups: those of all rows of val. They are digests, so the lower half of them in order is a random one. It is the
    same for all runs on a data set: no run has chosen by what judges another.
    """
    names = sorted(set(groups))
    if len(names) < FEWEST_TO_HALVE:
        return None
    middle = len(names) // 2
    return frozenset(names[:middle] if part == "chooses" else names[middle:])
