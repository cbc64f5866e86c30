"""Tells an Optuna study results and asks it for trials: a program of the environment `search` (`core/child_programs`).

Its question, as JSON: journal (the file of a JournalStorage; made if missing), study (its name), seed (of the sampler),
tell (results: number, state, value, losses, constraints), ask (null, or count, space and own: the settings of a first
trial besides, or null), importances (whether to compute them). Its answer: asked (number and settings of each new
trial; null where every combination was asked before), importances (share by key; null without enough results).
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import OptunaError
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from vlmflow.core.child_programs import answer_with
from vlmflow.core.errors import VlmflowError

STARTUP = 5
"""Results that the sampler needs before it learns from them; until then trials are drawn at random."""

TRIES, RANDOM_TRIES = 10, 100
"""How often a trial is drawn again that was asked before: by the sampler, then at random."""

FEW, MOST_COMBINATIONS = 10, 100_000
"""With so few combinations of lists left, one of them is drawn: the sampler would repeat those that it likes. How many
are looked at."""

STATES = {"done": TrialState.COMPLETE, "failed": TrialState.PRUNED, "ended": TrialState.PRUNED}
"""The states that a result may have besides `running`. ended: before its last step, but not by a failure. The sampler
does not read trials in Optuna's state FAIL: it would ask for more of those that fail. One that was pruned without a
loss counts as the worst (optuna 5.0, samplers/_tpe/sampler.py, `_get_pruned_trial_score`)."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer one question; the journal is then extended.

    Raises VlmflowError if Optuna cannot read the journal, or does not know what it is told.
    """
    try:
        return _answer(question)
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError, AssertionError, OptunaError) as error:
        raise VlmflowError(f"Optuna: {type(error).__name__}: {error}", "ask again from the first round") from None


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(question["journal"])),
        study_name=question["study"],
        sampler=TPESampler(seed=question["seed"], n_startup_trials=STARTUP),
        direction="minimize",
        load_if_exists=True,
    )
    for result in question["tell"]:
        _tell(study, result)
    ask = question["ask"]
    return {
        "asked": _ask(study, ask, question["seed"]) if ask else [],
        "importances": _importances(study) if question["importances"] else None,
    }


def _tell(study: optuna.Study, result: dict[str, Any]) -> None:
    known = study.get_trials(deepcopy=False)[result["number"]]
    if known.state == TrialState.FAIL:  # it is outside the space (`_own`)
        return
    trial = optuna.trial.Trial(study, known._trial_id)
    for rung, loss in enumerate(result["losses"]):
        if rung not in known.intermediate_values:
            trial.report(loss, rung)
    if result["state"] == "running":
        return
    for name, value in result["constraints"].items():
        trial.set_constraint(name, value)
    study.tell(result["number"], result["value"], STATES[result["state"]])


def _ask(study: optuna.Study, ask: dict[str, Any], seed: int) -> list[dict[str, Any] | None]:
    space = {dimension["key"]: _distribution(dimension) for dimension in ask["space"]}
    before = [trial.params for trial in study.get_trials(deepcopy=False)]
    trials: list[dict[str, Any] | None] = []
    if ask["own"] is not None:
        trial = _own(study, space, ask["own"])
        before.append(trial.params)
        trials.append({"number": trial.number, "settings": ask["own"]})
    for _ in range(ask["count"]):
        trial = _new(study, space, before, seed)
        if trial:
            before.append(trial.params)
        trials.append({"number": trial.number, "settings": trial.params} if trial else None)
    return trials


def _own(study: optuna.Study, space: dict[str, BaseDistribution], own: dict[str, Any]) -> optuna.trial.Trial:
    """Ask for a trial with these settings.

    One that is outside the space has its number alone, and teaches nothing: the sampler reads no trial in Optuna's
    state FAIL.
    """
    if all(_has(space[key], value) for key, value in own.items()):
        study.enqueue_trial(own)
        return study.ask(space)
    trial = study.ask()
    study.tell(trial, state=TrialState.FAIL)
    return trial


def _has(values: BaseDistribution, value: Any) -> bool:
    if isinstance(values, CategoricalDistribution):
        return value in values.choices
    assert isinstance(values, IntDistribution | FloatDistribution)
    return bool(values.low <= value <= values.high)


def _new(
    study: optuna.Study, space: dict[str, BaseDistribution], before: list[dict[str, Any]], seed: int
) -> optuna.trial.Trial | None:
    """Ask for a trial with settings that none had before; None if there seem to be none."""
    if all(isinstance(distribution, CategoricalDistribution) for distribution in space.values()):
        left = [settings for settings in _combinations(space) if settings not in before]
        if not left:
            return None
        if len(left) <= FEW:
            drawn = int.from_bytes(hashlib.sha256(f"{seed} {len(before)}".encode()).digest()[:8])
            study.enqueue_trial(left[drawn % len(left)])
            return study.ask(space)
    sampler = study.sampler
    for number in range(TRIES + RANDOM_TRIES):
        if number == TRIES:
            study.sampler = RandomSampler(seed=seed)
        trial = study.ask(space)
        if trial.params not in before:
            study.sampler = sampler
            return trial
        study.tell(trial, state=TrialState.FAIL)
    study.sampler = sampler
    return None


def _combinations(space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    values = itertools.product(*(distribution.choices for distribution in space.values()))
    return itertools.islice((dict(zip(space, each, strict=True)) for each in values), MOST_COMBINATIONS)


def _distribution(dimension: dict[str, Any]) -> BaseDistribution:
    if dimension["choices"]:
        return CategoricalDistribution(dimension["choices"])
    if dimension["whole"]:
        return IntDistribution(dimension["low"], dimension["high"], log=dimension["log"])
    return FloatDistribution(dimension["low"], dimension["high"], log=dimension["log"])


def _importances(study: optuna.Study) -> dict[str, float] | None:
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len({trial.value for trial in done}) < STARTUP:
        return None
    return dict(optuna.importance.get_param_importances(study))


if __name__ == "__main__":
    answer_with(answer)
