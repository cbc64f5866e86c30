"""What one row adds to the shares of an evaluation.

Pages and trackers read it, whose environment has no scipy: so it is not in `evaluation.margins`.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vlmflow.evaluation.accounts import OTHER, OTHER_PICTURE, OWN, QUESTION, Margin

Values = NDArray[np.float64]


def preferred(one: Values, other: Values | float) -> Values:
    """Return 1 where one is above the other, 0 where it is below, and one half where they are equal: a tie."""
    found: Values = (np.sign(one - other) + 1) / 2
    return found


def row_shares(margins: Mapping[str, Margin]) -> dict[str, float]:
    """Return what a row adds to each share that it can tell (`MarginFigures`): 1, 0, or one half for a tie.

    margins: those of one model, by context.
    """
    values = {context: np.array(margin.value) for context, margin in margins.items()}
    one_answer = any(margin.wrong is None for margin in margins.values())
    sides: dict[str, tuple[str, str | None]] = {
        "right_first": (QUESTION, None),
        "right_with_feedback": (OWN, None),
        "uses_feedback": (OWN, OTHER),
        "sees": (OWN if OWN in margins else QUESTION, OTHER_PICTURE),
    }
    found = {}
    for name, (context, other) in sides.items():
        if context in values and (other in values if other else not one_answer):
            found[name] = float(preferred(values[context], values[other] if other else 0.0))
    return found
