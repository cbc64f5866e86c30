"""Asks the study program, and adds the results of a step to its study.

The study's journal is kept as an ordinary file of one writer: copy, extend, rename.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs

from vlmflow.config.search_settings import Objective, SearchLimits, SearchSettings, dimensions
from vlmflow.core.child_programs import ask as ask_program
from vlmflow.core.child_programs import python_of
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import sha256_of, whole_file
from vlmflow.search.study import Asked, EmptySlots, Study, TrialResult, cost, with_step

PROGRAM = "vlmflow.search.study_program"

TOLD = {"done": "done", "failed": "failed", "stopped": "ended", "left": "ended", "waiting": "running"}
"""The program's state of a trial, by that of the study."""


def new_trials(
    before: Path | None, journal: Path, name: str, search: SearchSettings, number: int, own: Mapping[str, Any] | None
) -> list[tuple[int, dict[str, Any]] | None]:
    """Ask for the new trials of a round, and write the journal with them.

    before: the journal so far; None for the first trials. name: the search's. number: of the round.
    own: the run's own settings, which are the first trial, one more; None in later rounds.

    Returns number and settings of each; None where every combination was asked before. Raises VlmflowError if the
    environment `search` is missing, or the program fails.
    """
    # 32 bits of a digest, since neighbouring seeds should not draw alike.
    seed = int.from_bytes(hashlib.sha256(f"{search.seed} {number}".encode()).digest()[:4])
    space = [asdict(dimension) for dimension in dimensions(search.space)]
    wanted = {"count": search.together, "space": space, "own": own}
    answer = _ask(before, journal, name, {"seed": seed, "tell": [], "ask": wanted})
    return [trial and (trial["number"], trial["settings"]) for trial in answer["asked"]]


def _ask(before: Path | None, journal: Path, search: str, question: dict[str, Any]) -> Any:
    # In a folder of this process: the storage makes its lock beside the journal, and some shared folders have none.
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "journal"
        if before:
            shutil.copyfile(before, work)
        python_of("search")  # it says what to install
        try:
            answer = ask_program(
                "search", PROGRAM, {"importances": False, **question, "journal": str(work), "study": search}
            )
        except PassingError:
            raise  # the journal is good: the program was killed
        except VlmflowError as error:
            raise VlmflowError(
                f"{before or 'the study program'}: {error.cause}",
                f"remove search/{search}, and run the same command again: what is trained is kept",
            ) from None
        with whole_file(journal) as file:
            file.write(work.read_bytes())
    return answer


def tell(
    plan: Asked,
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
    step = f"{plan.round}/{plan.rung}"
    empty = list(before.empty) if before else []
    if plan.empty is not None:
        empty.append(EmptySlots(plan.round, plan.rung, plan.trials.count(None), plan.empty))
    study = Study(
        search=plan.search,
        objective=objective,
        last=(plan.round, plan.rung),
        trials=with_step(before, plan, list(results.values()), rungs, limits),
        empty=empty,
        importances=None,
        digests=(before.digests if before else {}) | {f"{step}/{file.name}": sha256_of(file) for file in results},
    )
    known = before.trials if before else []
    new = [
        {
            "number": trial.number,
            "state": TOLD[trial.state],
            "value": cost(objective, trial.value) if trial.state == "done" and trial.value is not None else None,
            "losses": [] if trial.state == "failed" else [cost(objective, value) for _, value in trial.rungs],
            "constraints": trial.above(limits),
        }
        for trial in study.trials
        if trial not in known
    ]
    answer = _ask(*journals, plan.search, {"seed": 0, "tell": new, "ask": None, "importances": True})
    return structs.replace(study, importances=answer["importances"])
