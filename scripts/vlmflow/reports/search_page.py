"""The page of a search: its trials, their curves, what mattered, and what the best settings change."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vlmflow.config.search_settings import SearchLimits
from vlmflow.core.errors import counted
from vlmflow.reports.charts import Curve, LineChart, line_chart
from vlmflow.reports.page import Tile, render
from vlmflow.search.study import MEANINGS, NAMES, OWN, STATES, Judged, Study, StudyTrial, cost, shown

LIMITS = {"mem_mb": ("peak memory", "MB"), "hours": ("hours", "h")}


@dataclass(frozen=True)
class TrialRow:
    """A row of the table of trials, as texts.

    mark: "good", "maybe" or "bad". note: why it is no result. badges: whose settings the trial has, and whether
    `best.yaml` has them.
    """

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
    badges: list[str]


@dataclass(frozen=True)
class Difference:
    """A searched key: own value of the run, and that of the best trial. importance: 0 to 1; None if unknown."""

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
    """The page's facts.

    mark: "good" if best.yaml has other settings than the own ones, "quiet" if it keeps them, "bad" without a result.
    """

    title: str
    subtitle: str
    verdict: str
    mark: str
    tiles: list[Tile]
    keys: list[str]
    trials: list[TrialRow]
    differences: list[Difference]
    importances: bool
    limits: list[LimitRow]
    empty: list[str]
    chart: LineChart | None
    objective: str
    best: str
    rungs: bool


def search_page(study: Study, judged: Judged, run: str, limits: SearchLimits, device: str) -> str:
    """Return the page. judged: what became of the best trial. run, limits: those of the search. device: of its run."""
    best = None if judged.best is None else study.trial(judged.best)
    own = study.trial(OWN).settings
    trials = sorted(study.trials, key=lambda trial: _order(trial, study, limits))
    named = "best trial's" if best is None else f"trial {best.number}'s, the best by {NAMES[study.objective]}"
    page = SearchPage(
        title=f"{study.search}: search for the settings of {run}",
        subtitle=f"By {MEANINGS[study.objective]}. {counted(len(study.trials), 'trial')} in "
        f"{counted(study.last[0] + 1, 'round')}; trial {OWN} has the run's own settings.",
        verdict=_verdict(study, judged),
        mark="bad" if best is None else "quiet" if judged.chosen == OWN else "good",
        tiles=_tiles(study, judged, limits, device),
        keys=list(own),
        trials=[_row(trial, study, judged, limits) for trial in trials],
        differences=[_difference(key, value, best, study.importances) for key, value in own.items()],
        importances=study.importances is not None,
        limits=_limits(study, limits),
        empty=[
            f"Round {one.round}, rung {one.rung}: {counted(one.slots, 'slot')}: {one.reason}." for one in study.empty
        ],
        chart=_chart(study, judged),
        objective=NAMES[study.objective],
        best=named,
        rungs=any(trial.state == "left" for trial in study.trials),
    )
    return render("search.html.jinja", page)


def _order(trial: StudyTrial, study: Study, limits: SearchLimits) -> tuple[bool, bool, int, float, int]:
    """Return what sorts trials: results first, the best of them first; then those that came to the highest rung."""
    value = float("inf") if trial.value is None else cost(study.objective, trial.value)
    return trial.state != "done", not trial.within(limits), -trial.rung, value, trial.number


def _verdict(study: Study, judged: Judged) -> str:
    if judged.best is None:
        counts = Counter(STATES[trial.state] for trial in study.trials)
        said = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trial was asked"
        return f"No trial trained to its end within the limits: {said}."
    return judged.sentence


def _tiles(study: Study, judged: Judged, limits: SearchLimits, device: str) -> list[Tile]:
    states = Counter(trial.state for trial in study.trials)
    ended = ", ".join(f"{count} {STATES[state]}" for state, count in states.items() if state != "done")
    budget = f"of {limits.gpu_hours:g} allowed" if limits.gpu_hours is not None else "of all trials; no limit"
    tiles = [
        Tile("trials to the end", f"{states['done']:,} of {len(study.trials):,}", ended or "no other"),
        Tile("hours of trainers" if device == "cpu" else "GPU-hours", f"{study.gpu_hours:,.3g}", budget),
    ]
    for number in dict.fromkeys([judged.best, OWN]) if judged.best is not None else ():
        whose = "the run's own settings" if number == OWN else f"trial {number}, the best by it"
        tiles.insert(-2, Tile(NAMES[study.objective], _value(study, study.trial(number)), whose))
    return tiles


def _row(trial: StudyTrial, study: Study, judged: Judged, limits: SearchLimits) -> TrialRow:
    above = [LIMITS[name][0] for name, value in trial.above(limits).items() if value > 0]
    mark = {"done": "good", "failed": "bad"}.get(trial.state, "maybe")
    badges = ["the run's own"] if trial.number == OWN else []
    badges += ["in best.yaml"] if trial.number == judged.chosen else []
    return TrialRow(
        number=trial.number,
        round=trial.round,
        settings=[_text(trial.settings.get(key)) for key in study.trial(OWN).settings],
        value=_value(study, trial),
        steps=f"{trial.steps:,}",
        memory="–" if trial.mem_mb is None else f"{trial.mem_mb:,.0f}",
        hours=f"{trial.hours:,.3g}",
        mark="bad" if above else mark,
        state=f"above its limit: {', '.join(above)}" if above else STATES[trial.state],
        note=trial.reason or "",
        badges=badges,
    )


def _value(study: Study, trial: StudyTrial) -> str:
    return "–" if trial.value is None else shown(study.objective, trial.value)


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


def _chart(study: Study, judged: Judged) -> LineChart | None:
    """Return the validation losses of all trials; the best is drawn last, over the others."""
    curves: dict[str, Curve] = {}
    for trial in sorted(study.trials, key=lambda one: one.number == judged.best):
        curve = Curve()
        for step, loss in trial.curve:
            curve.add(step, loss)
        curves[f"{'best ' if trial.number == judged.best else ''}trial {trial.number}"] = curve
    last = max((step for trial in study.trials for step, _ in trial.curve), default=0)
    return line_chart("Validation loss", "nats per token", curves, last, "{:.4g}".format)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
