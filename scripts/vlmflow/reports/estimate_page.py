"""The estimate page: the memory, time, price and disk that a run needs, and what would make it fit."""

from vlmflow.config.gpus import GPUS
from vlmflow.config.run_blocks import EstimateBlock
from vlmflow.estimate.account import NoEstimate, Result
from vlmflow.estimate.changes import FITS, REFUSED, parts_of, spread_of
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.reports.page import render


def estimate_page(run: str, result: Result, settings: EstimateBlock) -> str:
    """Return `reports/estimate-RUN.html`. result: the estimate, or why there is none. settings: those of the run."""
    if isinstance(result, NoEstimate):
        return render("estimate.html.jinja", run=run, estimate=None, reason=result.reason)
    return render(
        "estimate.html.jinja",
        run=run,
        estimate=result,
        settings=settings,
        spread=spread_of(result),
        schedule=schedule_in_words(result.steps, result.evaluations),
        parts=parts_of(result.memory),
        gpus=GPUS,
        colour_of=_colour_of,
    )


def _colour_of(memory_share: float) -> str:
    """Return the class of a product by the share of its memory that is needed."""
    return "good" if memory_share <= FITS else "maybe" if memory_share <= REFUSED else "bad"
