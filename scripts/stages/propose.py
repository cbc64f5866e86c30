"""Choose the trials of one step of a search: new ones that Optuna proposes, or the best third of the rung before."""

from pathlib import Path
from typing import Any

from vlmflow.config.run_settings import RunSettings
from vlmflow.config.search_settings import Objective, SearchSettings
from vlmflow.config.settings import PartOf, Settings
from vlmflow.core.account import read_account, refuse_other_rows, write_account
from vlmflow.core.errors import counted, log
from vlmflow.core.files import count_lines
from vlmflow.evaluation.report import CHOICE, Choice
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import ACCOUNT
from vlmflow.search.best import refuse_too_few_to_recommend
from vlmflow.search.propose import Schedule, hours_of_run, propose, refuse_equal_rungs, refuse_too_much
from vlmflow.search.study import Study


class PlanBlock(Settings):
    """What is compared with the budget, and the GPU product that the run names."""

    rounds: int
    gpu: str | None


def main(
    *,
    rows: Path,
    estimate: Path,
    smoke: list[Path],
    study: list[Path],
    journal: list[Path],
    asked: Path,
    asked_journal: Path,
    settings: PartOf[SearchSettings],
    run: PartOf[RunSettings],
    planned: PlanBlock | None,
    own: dict[str, Any] | None,
    chosen: Path,
    require: Objective,
) -> None:
    """Choose the trials of one step.

    rows: the run's rows that fit (fitted/RUN). estimate: of the run (estimates/RUN.json). smoke: the smoke run
    (checkpoints/RUN/smoke), if only that tells how long a training takes: [] otherwise.
    study, journal: account and journal of the step before; [] for the first.
    asked: the account to write (search/NAME/ROUND/RUNG/asked.json). asked_journal: the journal to write beside it.
    settings: those of the search. run: those of its run. planned: for the first step of a search with a budget; null
    otherwise. own: the run's own values of the searched keys, for the first step; null otherwise.
    chosen: the rows of val that can judge (chosen/RUN/val). require: the search's objective, which they must tell.
    """
    name, number, rung = asked.parts[-4], int(asked.parts[-3]), int(asked.parts[-2])
    search = SearchSettings.model_validate(settings.model_dump() | ({"rounds": planned.rounds} if planned else {}))
    ranks = run.nodes * run.processes
    lengths = rows / "train.lengths.jsonl"
    refuse_other_rows(rows / ACCOUNT, [lengths])
    schedule = Schedule(run.train, count_lines(lengths), ranks)
    if own is not None:
        refuse_equal_rungs(name, search, schedule, own)
        refuse_too_few_to_recommend(name, read_account(chosen / CHOICE, Choice), require)
    if planned:
        hours = hours_of_run(estimate, smoke[0] if smoke else None, planned.gpu)
        refuse_too_much(name, search, hours, ranks, schedule.fewest_stops(search))
    before = read_account(study[0], Study) if study else None
    plan = propose(
        *(search, before, journal[0] if journal else None, asked_journal, schedule, ranks),
        step=(name, number, rung),
        own=own,
    )
    write_account(asked, plan)
    trials = [trial for trial in plan.trials if trial]
    listed = ", ".join(f"trial {trial.number} to step {trial.steps}: {trial.settings}" for trial in trials)
    empty = f"empty: {counted(len(plan.trials) - len(trials), 'slot')}: {plan.empty}" if plan.empty else ""
    log.info(f"search {name}, round {number}, rung {rung}: {'; '.join(filter(None, [listed, empty]))}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
