"""The page of a search: its trials, their curves, what mattered, and what the best settings change."""

from collections import Counter
from typing import Any

from vlmflow.config.search_settings import SearchLimits
from vlmflow.reports.charts import Curve, LineChart, line_chart
from vlmflow.reports.page import render
from vlmflow.search.study import MEANINGS, NAMES, OWN, STATES, Judged, Study, StudyTrial, cost, shown


def search_page(study: Study, judged: Judged, run: str, limits: SearchLimits, device: str) -> str:
    """Return the page. judged: what became of the best trial. run, limits: those of the search. device: of its run."""
    return render(
        "search.html.jinja",
        study=study,
        judged=judged,
        run=run,
        limits=limits,
        device=device,
        own=study.trial(OWN),
        best=None if judged.best is None else study.trial(judged.best),
        trials=sorted(study.trials, key=lambda trial: _order(trial, study, limits)),
        ended=Counter(trial.state for trial in study.trials),
        above=Counter(limit for trial in study.trials for limit, by in trial.above(limits).items() if by > 0),
        chart=_chart(study, judged),
        states=STATES,
        objective=NAMES[study.objective],
        meaning=MEANINGS[study.objective],
        value_of=lambda trial: "–" if trial.value is None else shown(study.objective, trial.value),
        text_of=_text,
    )


def _order(trial: StudyTrial, study: Study, limits: SearchLimits) -> tuple[bool, bool, int, float, int]:
    """Return what sorts trials: results first, the best of them first; then those that came to the highest rung."""
    value = float("inf") if trial.value is None else cost(study.objective, trial.value)
    return trial.state != "done", not trial.within(limits), -trial.rung, value, trial.number


def _chart(study: Study, judged: Judged) -> LineChart | None:
    """Return the validation losses of all trials; the best is drawn last, over the others."""
    curves: dict[str, Curve] = {}
    for trial in sorted(study.trials, key=lambda trial: trial.number == judged.best):
        curve = Curve()
        for step, loss in trial.curve:
            curve.add(step, loss)
        curves[f"{'best ' if trial.number == judged.best else ''}trial {trial.number}"] = curve
    last = max((step for trial in study.trials for step, _ in trial.curve), default=0)
    return line_chart("Validation loss", "nats per token", curves, last, "{:.4g}".format)


def _text(value: Any) -> str:
    """Return a setting for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
