"""Finished evaluations: reads them for the card, and decides whether weights may be published."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import EvaluationReport
from vlmflow.evaluation.verdict import ACCEPTED, NOT_WORSE, shown_rises
from vlmflow.merging.proof import Proof, proven_digest

REPORT = "report.json"
"""The report in a folder eval/RUN/SPLIT."""


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
    """Refuse weights whose evaluation on val falls short. require: a key of ACCEPTED; None accepts all.

    Raises VlmflowError with the verdict, and the figures on which it rests; for NOT_WORSE also if a loss rose.
    """
    if require is None:
        return
    val = evaluations.get("val")
    if val is None:
        raise VlmflowError(
            f"runs.NAME.evaluate.require: {require} is judged on val, which was not evaluated",
            "add val to runs.NAME.evaluate.splits",
        )
    if val.verdict not in ACCEPTED[require]:
        raise VlmflowError(
            f"eval/{val.run}/val: verdict {val.verdict!r}; runs.NAME.evaluate.require: {require} accepts "
            f"{', '.join(repr(verdict) for verdict in sorted(ACCEPTED[require]))}. {val.sentence}",
            f"look at eval/{val.run}/val/report.json; take more rows (few show nothing), train with other settings, or "
            f"remove runs.NAME.evaluate.require. The weights stay in verified/{val.run}",
        )
    if require == NOT_WORSE and (rises := shown_rises(val.all)):
        raise VlmflowError(
            f"eval/{val.run}/val: runs.NAME.evaluate.require: {require} accepts no shown decline, but "
            f"{'; '.join(rises)}",
            f"look at reports/eval-{val.run}.html; train with other settings (a lower learning rate, fewer epochs), or "
            f"require what may cost this (uses_feedback, learned). The weights stay in verified/{val.run}",
        )
