"""Adds the results of one step of a search to its study."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from vlmflow.config.search_settings import Objective, SearchLimits
from vlmflow.core.files import sha256_of
from vlmflow.search.accounts import Asked, TrialResult
from vlmflow.search.journal import told
from vlmflow.search.study import EmptySlots, Study, with_step


def tell(
    asked: Asked,
    results: Mapping[Path, TrialResult],
    before: Study | None,
    journals: tuple[Path, Path],
    how: tuple[Objective, int, SearchLimits],
) -> Study:
    """Return the study after one more step, and write its journal.

    results: of the step's slots, by file, in their order. before: the study so far. journals: the one that asked, and
    the one to write. how: the search's objective, rungs and limits.

    Raises VlmflowError if a result is not of what was asked, or the study program fails.
    """
    objective, rungs, limits = how
    step = f"{asked.round}/{asked.rung}"
    empty = list(before.empty) if before else []
    if asked.empty is not None:
        empty.append(EmptySlots(asked.round, asked.rung, asked.trials.count(None), asked.empty))
    study = Study(
        search=asked.search,
        objective=objective,
        last=(asked.round, asked.rung),
        trials=with_step(before, asked, list(results.values()), rungs, limits),
        empty=empty,
        importances=None,
        digests=(before.digests if before else {}) | {f"{step}/{file.name}": sha256_of(file) for file in results},
    )
    importances = told(*journals, asked.search, study.missing_from(before), limits, objective)
    return structs.replace(study, importances=importances)
