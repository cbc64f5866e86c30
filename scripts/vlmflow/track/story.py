"""What is sent to trackers, and the account of what they got (`tracked/RUN.json`).

Reads what a run has recorded, and tells it in the form of trackers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.config.run_blocks import flat
from vlmflow.config.settings import is_name
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import AnswerReport, EvaluatedModel, EvaluationReport, Interval, MarginFigures
from vlmflow.evaluation.verdict import REPORT
from vlmflow.fetch.placed import PROVENANCE
from vlmflow.in_trainer.messages import PROGRESS, Begin, Event, Log, read_events
from vlmflow.reports.provenance import Provenance, published_weights
from vlmflow.supervisor.report import TrainingReport


class Point(msgspec.Struct, frozen=True):
    """A figure of a step. seconds: since the training began, without pauses between its sessions."""

    key: str
    step: int
    value: float
    seconds: float


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers show it.

    digest: identifies the run: SHA-256 of its name and its training's digest. content: SHA-256 of everything below.
    ended: when its training ended, in seconds since 1970. seconds: how long it trained.
    settings: the run's settings, flat. facts: digests, versions and verdicts, as texts. points: the figures of steps.
    results: figures of the whole run. evaluated: those of its evaluations, which may come later.
    """

    run: str
    digest: str
    content: str
    ended: float
    seconds: float
    settings: dict[str, Any]
    facts: dict[str, str]
    points: list[Point]
    results: dict[str, float]
    evaluated: dict[str, float]


class Turn(msgspec.Struct, frozen=True):
    """What a model was asked in a row, and what it answered; or the gold answer, of which it gave the loss.

    name: "gold answer", or "after 1 round(s)". answer: what the model said; null if it was not asked. scores: by name;
    losses and margins are in nats per token.
    """

    name: str
    prompt: str
    answer: str | None
    scores: dict[str, float]
    facts: dict[str, str]


class RowTrace(msgspec.Struct, frozen=True):
    """One row and one model. identity: it is the same at every sending: run, split, row and model.

    model: "base" or "tuned". pictures: their SHA-256 digests, in the row's order. at: when the training ended, in
    seconds since 1970: reports of evaluations have no time, so that equal ones are equal files.
    """

    identity: str
    run: str
    split: str
    row: str
    source: str
    model: str
    pictures: list[str]
    at: float
    turns: list[Turn]


class Sent(msgspec.Struct, frozen=True):
    """What a tracker has of a run. where: address, project or folder. name: the run's name there.

    new: whether it was sent now; otherwise the tracker had it. figures: steps' figures, or spans.
    """

    where: str
    name: str
    new: bool
    figures: int


class Tracked(msgspec.Struct, frozen=True):
    """The content of `tracked/RUN.json`. digest, content: as in `Story`. sent: by tracker; null: not asked for."""

    run: str
    digest: str
    content: str
    mlflow: Sent | None = None
    wandb: Sent | None = None
    otlp: Sent | None = None


OF_TRAINING = ("loss", "learning_rate", "grad_norm", "epoch", "tokens", "waited", "memory")
"""The figures of a step (`in_trainer.messages.Log`) that trackers get as train/NAME."""


OF_REPORT = ("steps", "target", "sessions", "seconds", "tokens")
"""The figures of a whole training that its report has by these names."""


class _Tuned(msgspec.Struct, frozen=True):
    """The used part of both reports: which weights were evaluated, or asked."""

    tuned: EvaluatedModel


def story_of(full: Path, merged: Path, evaluated: Sequence[Path], answered: Sequence[Path]) -> Story:
    """Return a finished run's story.

    full: checkpoints/RUN/full. merged: merged/RUN. evaluated, answered: eval/RUN/SPLIT and answers/RUN/SPLIT.

    Raises VlmflowError if a file is missing or damaged, or belongs to another training or other weights.
    """
    report = read_account(full / "report.json", TrainingReport)
    facts = read_account(merged / PROVENANCE, Provenance)
    _refuse_other_names(facts, merged)
    if facts.training.digests != report.digests:
        raise VlmflowError(
            f"{merged}: its weights come from another training than {full}",
            f"make them again: vlmflow run … merged/{facts.run}",
        )
    again = f"remove {full}, and make it again"
    try:
        progress = sha256_of(full / PROGRESS)
    except OSError as error:
        raise VlmflowError(f"{full / PROGRESS}: {error.strerror}", again) from None
    if progress != report.digests.progress:
        raise VlmflowError(f"{full / PROGRESS}: it is not what the training wrote", again)
    for folder in [*evaluated, *answered]:
        if not of_weights(folder, merged):
            raise VlmflowError(
                f"{folder}: it is of other weights than those in {merged}",
                f"remove {folder} and run the same command again",
            )
    figures: dict[str, float] = {}
    verdicts = {}
    for folder in evaluated:
        evaluation = read_account(folder / REPORT, EvaluationReport)
        if evaluation.dataset != facts.data.dataset:
            raise VlmflowError(
                f"{folder / REPORT}: dataset is {evaluation.dataset!r}, but the weights in {merged} are of data set "
                f"{facts.data.dataset!r}",
                f"remove {folder}, and make it again",
            )
        verdicts[f"evaluate.{evaluation.split}"] = f"{evaluation.verdict}: {evaluation.sentence}"
        at = f"evaluate/{evaluation.split}"
        figures |= _of_margins(at, evaluation.figures.all)
        for part in ("with_echo", "without_echo", "with_gold", "without_gold"):
            if some := getattr(evaluation.figures, part):
                figures |= _of_margins(f"{at}/{part}", some)
    for folder in answered:
        figures |= _of_answers(read_account(folder / REPORT, AnswerReport))
    events = read_events(full / PROGRESS)
    points = list(_points(events))
    settings = flat(report.settings) | {
        "tuner": report.tuner,
        "strategy": report.strategy,
        "device": report.device,
        "processes": report.world_size,
    }
    texts = _facts(facts, sha256_of(merged / PROVENANCE)) | verdicts
    results = _results(report)
    told = [settings, texts, results, figures, msgspec.to_builtins(points)]
    return Story(
        run=facts.run,
        digest=_digest([facts.run, report.digests.job, report.digests.progress]),
        content=_digest(told),
        ended=_end_of(events) or (full / PROGRESS).stat().st_mtime,
        seconds=max((point.seconds for point in points), default=0.0),
        settings=settings,
        facts=texts,
        points=points,
        results=results,
        evaluated=figures,
    )


def _refuse_other_names(facts: Provenance, merged: Path) -> None:
    """Raise VlmflowError if a name in a run's provenance, which becomes part of paths, is not the one it must be."""
    file = merged / PROVENANCE
    if facts.run != (name := merged.absolute().name):
        raise VlmflowError(
            f"{file}: run is {facts.run!r}, but its folder is {name!r}",
            f"rename the folder as its run, or remove it and make it again: vlmflow run … merged/{name}",
        )
    if not is_name(facts.data.dataset):
        raise VlmflowError(
            f"{file}: data.dataset is {facts.data.dataset!r}, which is no name of a data set",
            f"remove {merged}, and make it again",
        )


def of_weights(folder: Path, merged: Path) -> bool:
    """Return whether an evaluation, or answers, are of a run's published weights.

    folder: eval/RUN/SPLIT or answers/RUN/SPLIT. merged: merged/RUN.

    Raises VlmflowError if one of them cannot be read.
    """
    return read_account(folder / REPORT, _Tuned).tuned.digest == published_weights(merged)


def _end_of(events: Sequence[Event]) -> float | None:
    """Return when a training ended, in seconds since 1970; None if it did not record when it began.

    A file's own time is no such record: object stores and copies give it that of the copy.
    """
    begun = end = None
    for event in events:
        if isinstance(event, Begin):
            begun = end = None if event.at is UNSET else event.at
        if isinstance(event, Log) and begun is not None:
            end = begun + event.time
    return end


def _points(events: Sequence[Event]) -> Iterator[Point]:
    """Yield the figures of every step. A step that a resumed training repeated has those of its last time."""
    points: dict[tuple[str, int], Point] = {}
    before = session = 0.0
    for event in events:
        if isinstance(event, Begin):
            before, session = before + session, 0.0
            points = {at: point for at, point in points.items() if point.step <= event.step}
        if isinstance(event, Log):
            session = max(session, event.time)
            for key, value in _figures(event):
                points[key, event.step] = Point(key, event.step, value, before + event.time)
    yield from points.values()


def _figures(event: Log) -> Iterator[tuple[str, float]]:
    if event.eval_loss is not UNSET:
        yield "eval/loss", event.eval_loss
        return
    for name in OF_TRAINING:
        if (value := getattr(event, name)) is not UNSET:
            yield f"train/{name}", float(value)


def _of_margins(at: str, figures: MarginFigures) -> Iterator[tuple[str, float]]:
    yield f"{at}/rows", float(figures.rows)
    losses = {f"loss_{context}": compared for context, compared in figures.losses.items()}
    for name, figure in (figures.shares | losses).items():
        yield from _intervals(
            f"{at}/{name}", {"base": figure.base, "tuned": figure.tuned, "difference": figure.difference}
        )


def _of_answers(report: AnswerReport) -> Iterator[tuple[str, float]]:
    for after in report.all:
        at = f"answer/{report.split}/after_{after.rounds}"
        for model in ("base", "tuned"):
            figures = getattr(after, model)
            yield from _intervals(f"{at}/{model}", {"right": figures.right, "anls": figures.anls})
            for name in ("exact_match", "token_f1", "relaxed_accuracy", "words"):
                yield f"{at}/{model}/{name}", getattr(figures, name)
        yield from _intervals(at, {"difference_right": after.right, "difference_anls": after.anls})


def _intervals(at: str, intervals: Mapping[str, Interval | None]) -> Iterator[tuple[str, float]]:
    for name, interval in intervals.items():
        if interval is not None:
            ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
            yield from ((f"{at}/{name}{end}", value) for end, value in ends.items() if value is not None)


def _results(report: TrainingReport) -> dict[str, float]:
    results = {
        "best/step": float(report.best.step),
        "best/eval_loss": report.best.eval_loss,
        **{name: float(getattr(report, name)) for name in OF_REPORT},
    }
    if report.tokens_per_second is not None:
        results["tokens_per_second"] = report.tokens_per_second
    if report.peak_memory:
        results["peak_memory"] = float(max(report.peak_memory))
    return results


def _facts(facts: Provenance, digest: str) -> dict[str, str]:
    """Return the run's origin. digest: SHA-256 of provenance.json."""
    texts = {
        "provenance": digest,
        "git_commit": facts.git_commit,
        # Not a setting: MLflow never lets one change, and the same files may come from another source.
        "base_model": facts.base_model.source,
        "dataset": facts.data.dataset,
        "base_model.revision": facts.base_model.revision,
        "base_model.digest": facts.base_model.digest,
        "base_model.dequantized_from": of_fp8.digest if (of_fp8 := facts.base_model.dequantized_from) else None,
        "data.digest": facts.training.digests.data,
        "training.digest": facts.training.digests.job,
    }
    texts |= {f"version.{name}": version for name, version in facts.training.versions.items()}
    return {key: value for key, value in texts.items() if value is not None}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
