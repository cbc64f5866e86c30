"""The page of a search: its trials, their curves, what mattered, and what the best settings change."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmflow.config.search_settings import SearchLimits
from vlmflow.reports.curve import Curve
from vlmflow.reports.line_chart import LineChart, line_chart
from vlmflow.reports.page import Tile, render
from vlmflow.search.study import STATES, Study, StudyTrial

OBJECTIVES = {
    "eval_loss": "validation loss",
    "learned": "learned to use feedback",
    "uses_feedback": "use of feedback",
}
LIMITS = {"mem_mb": ("peak memory", "MB"), "hours": ("hours", "h")}


@dataclass(frozen=True)
class TrialRow:
    """A row of the table of trials, as texts. mark: "good", "maybe" or "bad"; note: why it is no result."""

    number: int
    round: int
    settings: list[str]
    value: str
    steps: str
    memory: str
    hours: str
    mark: str
    state: str
    note: str
    best: bool


@dataclass(frozen=True)
class Difference:
    """A searched key: the run's own value, and that of the best trial. importance: 0 to 1; None if unknown."""

    key: str
    own: str
    best: str
    changed: bool
    importance: float | None


@dataclass(frozen=True)
class LimitRow:
    """A limit, and how many trials are above it."""

    name: str
    limit: str
    above: int


@dataclass(frozen=True)
class SearchPage:
    """The page's facts. good: whether there is a best trial."""

    title: str
    subtitle: str
    verdict: str
    good: bool
    tiles: list[Tile]
    keys: list[str]
    trials: list[TrialRow]
    differences: list[Difference]
    importances: bool
    limits: list[LimitRow]
    empty: list[str]
    chart: LineChart | None
    objective: str
    rungs: bool


def search_page(study: Study, run: str, limits: SearchLimits, own: Mapping[str, Any]) -> str:
    """Return the page. limits: the search's. own: the values that its run itself has for the searched keys."""
    best = study.best(limits)
    trials = sorted(study.trials, key=lambda trial: _order(trial, limits))
    page = SearchPage(
        title=f"{study.search}: search for the settings of {run}",
        subtitle=f"By {OBJECTIVES[study.objective]}, the lower the better. {len(study.trials)} trial(s) in "
        f"{study.last[0] + 1} round(s).",
        verdict=_verdict(study, best),
        good=best is not None,
        tiles=_tiles(study, limits, best),
        keys=list(own),
        trials=[_row(trial, limits, list(own), trial is best) for trial in trials],
        differences=[_difference(key, value, best, study.importances) for key, value in own.items()],
        importances=study.importances is not None,
        limits=_limits(study, limits),
        empty=[f"Round {one.round}, rung {one.rung}: {one.slots} slot(s): {one.reason}." for one in study.empty],
        chart=_chart(study, best),
        objective=OBJECTIVES[study.objective],
        rungs=any(trial.state == "left" for trial in study.trials),
    )
    return render("search.html.jinja", page)


def _order(trial: StudyTrial, limits: SearchLimits) -> tuple[bool, bool, int, float, int]:
    """Return what sorts trials: results first, the best of them first; then those that came to the highest rung."""
    value = float("inf") if trial.value is None else trial.value
    return trial.state != "done", not trial.within(limits), -trial.rung, value, trial.number


def _verdict(study: Study, best: StudyTrial | None) -> str:
    if best is None:
        counts = Counter(STATES[trial.state] for trial in study.trials)
        said = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trial was asked"
        return f"No trial trained to its end within the limits: {said}."
    return f"Trial {best.number} is the best: {OBJECTIVES[study.objective]} {best.value:.5g} at step {best.steps:,}."


def _tiles(study: Study, limits: SearchLimits, best: StudyTrial | None) -> list[Tile]:
    states = Counter(trial.state for trial in study.trials)
    ended = ", ".join(f"{count} {STATES[state]}" for state, count in states.items() if state != "done")
    budget = f"of {limits.gpu_hours:g} allowed" if limits.gpu_hours is not None else "of all trials; no limit"
    tiles = [
        Tile("trials to the end", f"{states['done']:,} of {len(study.trials):,}", ended or "no other"),
        Tile("GPU-hours", f"{study.gpu_hours:,.3g}", budget),
    ]
    if best:
        tiles.insert(0, Tile(OBJECTIVES[study.objective], f"{best.value:.4g}", f"trial {best.number}"))
    return tiles


def _row(trial: StudyTrial, limits: SearchLimits, keys: list[str], best: bool) -> TrialRow:
    above = [LIMITS[name][0] for name, value in trial.above(limits).items() if value > 0]
    mark = {"done": "good", "failed": "bad"}.get(trial.state, "maybe")
    return TrialRow(
        number=trial.number,
        round=trial.round,
        settings=[_text(trial.settings.get(key)) for key in keys],
        value="–" if trial.value is None else f"{trial.value:.5g}",
        steps=f"{trial.steps:,}",
        memory="–" if trial.mem_mb is None else f"{trial.mem_mb:,.0f}",
        hours=f"{trial.hours:,.3g}",
        mark="bad" if above else mark,
        state=f"above its limit: {', '.join(above)}" if above else STATES[trial.state],
        note=trial.reason or "",
        best=best,
    )


def _difference(key: str, own: Any, best: StudyTrial | None, importances: dict[str, float] | None) -> Difference:
    found = best.settings.get(key) if best else None
    importance = (importances or {}).get(key)
    return Difference(key, _text(own), _text(found), best is not None and found != own, importance)


def _limits(study: Study, limits: SearchLimits) -> list[LimitRow]:
    rows = []
    for key, (name, unit) in LIMITS.items():
        limit = getattr(limits, key)
        if limit is not None:
            above = sum(trial.above(limits)[key] > 0 for trial in study.trials)
            rows.append(LimitRow(f"{name} of a trial", f"{limit:,g} {unit}", above))
    return rows


def _chart(study: Study, best: StudyTrial | None) -> LineChart | None:
    """Return the validation losses of all trials; the best is drawn last, over the others."""
    curves: dict[str, Curve] = {}
    for trial in sorted(study.trials, key=lambda one: one is best):
        curve = Curve()
        for step, loss in trial.curve:
            curve.add(step, loss)
        curves[f"{'best ' if trial is best else ''}trial {trial.number}"] = curve
    last = max((step for trial in study.trials for step, _ in trial.curve), default=0)
    return line_chart("Validation loss", "nats per token", curves, last, "{:.4g}".format)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
