"""Finished evaluations: reads them for the card, and decides whether weights may be published."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmflow.config.chosen_by import ChosenBy
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import AlsoChose, EvaluationReport
from vlmflow.evaluation.verdict import TOO_FEW, Verdict, falls_short
from vlmflow.merging.proof import Proof, proven_digest
from vlmflow.supervisor.accounts import TrainingReport

REPORT = "report.json"
"""The report in a folder eval/RUN/SPLIT."""


def also_chose(full: Path, chosen_by: ChosenBy | None) -> AlsoChose:
    """Return by what all rows of val chose a model. full: its training (checkpoints/RUN/full). chosen_by: the run's.

    A search that kept the run's own settings, which is its trial 0, chose none.
    """
    trained = read_account(full / "report.json", TrainingReport)
    return AlsoChose(len(trained.eval_losses), chosen_by.trials if chosen_by and chosen_by.trial else 1)


def with_how_val_was_used(verdict: Verdict, chose: AlsoChose | None, left_out: Mapping[str, int]) -> str:
    """Return a verdict's sentence with what val was used for besides, if that matters.

    chose: what all of its rows also chose; None if they did not. left_out: how many rows are out, by reason.
    """
    others = left_out.get("other_half", 0)
    if chose:
        return f"{verdict.sentence} {chose.in_words}"
    if verdict.name == TOO_FEW and others:
        return f"{verdict.sentence} Val's other {others:,} rows chose the checkpoint, so they cannot judge it."
    return verdict.sentence


def read_evaluations(folders: Sequence[Path], proof: Proof) -> dict[str, EvaluationReport]:
    """Return the reports of a run's evaluations by split.

    folders: eval/RUN/SPLIT. proof: that of the weights to publish.

    Raises VlmflowError if an evaluation is of other weights.
    """
    found = {}
    for folder in folders:
        report = read_account(folder / REPORT, EvaluationReport)
        if report.tuned.digest != proven_digest(proof):
            raise VlmflowError(
                f"{folder}: it evaluated other weights than those in verified/{report.run}",
                f"remove {folder} and run the same command again",
            )
        found[report.split] = report
    return found


def refuse_unless_shown(evaluations: Mapping[str, EvaluationReport], require: str | None) -> None:
    """Refuse weights whose evaluation on val falls short. require: runs.NAME.evaluate.require; None accepts all.

    Raises VlmflowError with the reason, and the figures on which it rests.
    """
    if require is None:
        return
    val = evaluations.get("val")
    if val is None:
        raise VlmflowError(
            f"runs.NAME.evaluate.require: {require} is judged on val, which was not evaluated",
            "add val to runs.NAME.evaluate.splits",
        )
    if reason := falls_short(require, Verdict(val.verdict, val.costs_first_answers, val.sentence), val.figures.all):
        raise VlmflowError(
            f"eval/{val.run}/val: runs.NAME.evaluate.require: {require}, but {reason}. {val.sentence}",
            f"look at reports/eval-{val.run}.html; take more rows (few show nothing), train with other settings, or "
            f"remove runs.NAME.evaluate.require. The weights stay in verified/{val.run}",
        )
