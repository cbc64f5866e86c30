"""The verdict on a smoke run, and the estimate of the full run.

The estimate gives each step a time, and each token of it one. One mean speed is wrong for rows of another length: a
smoke run has the longest rows, and the time of a step does not grow in proportion to its tokens.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from msgspec import UNSET, structs

from vlmflow.config.model_types import model_types
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.core.progress import clock
from vlmflow.in_trainer.messages import Event, Log
from vlmflow.lengths.accounts import FittedSplit
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.micro_batches import size_of
from vlmflow.lengths.steps import Steps, data_parallel_ranks, evaluations_of, rows_left_over, schedule_in_words
from vlmflow.lengths.token_counts import LengthAccount
from vlmflow.supervisor.accounts import Check, FullRun, Gate, Pace, PlannedMerge, TrainingReport
from vlmflow.supervisor.plan import describe, passes_per_step, plan_of
from vlmflow.supervisor.smoke import SmokeRows
from vlmflow.swift.arguments import Training
from vlmflow.swift.model_layers import Layers, share_without_adapter

QUANTISED = "Linear4bit"
"""The class of bitsandbytes' layers: two weights in a byte."""

LEAST_FALL = 1e-4
"""The share by which the loss must fall at least: less is rounding, of a training that changes nothing."""

NAMED = 20
"""The most rows left over that are named: a run of a few steps leaves nearly all."""

SINGLE_STEPS = 8
"""With fewer steps than this, a quarter of them is a single step."""


def judge(
    report: TrainingReport,
    events: Sequence[Event],
    chosen: SmokeRows,
    train: list[RowLength],
    val: list[RowLength],
    full: Training,
    fitted: dict[str, FittedSplit],
    merge: PlannedMerge,
) -> Gate:
    """Return the verdict: each check with its outcome, the measured figures, the estimate of the full run.

    report, events: those of the smoke run, which trained and evaluated the rows `chosen`.
    train, val: the lengths of all rows. full: the full run. fitted, merge: see `Gate`.
    """
    ranks = full.ranks
    losses = [loss for _, loss in report.losses or []]
    checks = [
        Check("every loss is a finite number", _finite(losses), _span(losses)),
        Check("the loss falls", *_falls(losses, [loss for _, loss in report.eval_losses])),
        Check("every tensor of the best checkpoint can be read", True, f"step {report.best.step}"),
        Check("validation loss is a finite number", _finite([report.best.eval_loss]), ""),
        Check(
            f"{counted(ranks, 'process')} train together" if ranks > 1 else "1 process trains",
            report.world_size == ranks,
            report.parallel_mode,
        ),
        Check("no row is longer than max_length", True, f"longest {max(row.tokens for row in train + val)} tokens"),
        *_checks_of_layers(report.layers, full),
    ]
    return Gate(
        passed=all(check.passed for check in checks),
        checks=checks,
        peak_memory=report.peak_memory,
        tokens_per_second=report.tokens_per_second,
        lengths=LengthAccount.of(train).describe(),
        full_run=estimate(train, val, full, pace_of(report, events, chosen.val, full)),
        fitted=fitted,
        merge=merge,
        passes=full.found,
        plan=None if full.micro_batch_tokens is None else describe(full),
        without_adapter=round(share_without_adapter(report.layers), 4) if full.tuner.trains_adapter else None,
    )


def refuse_failed(gate: Gate, what: str) -> None:
    """Raise VlmflowError with the failed checks, if any."""
    failed = [f"not so: {check.check} ({check.detail})" for check in gate.checks if not check.passed]
    if failed:
        raise VlmflowError(
            f"{what}: the gate is closed: " + "; ".join(failed),
            "change runs.NAME.train.learning_rate (lower if the loss rises, higher if it hardly moves), or check the "
            "data; the full training has not begun",
        )


def with_passes(full: Training, gate: Gate, what: str) -> Training:
    """Return the full run with what its smoke run found for `auto`.

    Raises VlmflowError if the gate is one of before and does not say: the run would train as with null.
    """
    if full.settings.micro_batch_tokens == "auto" and gate.passes is None:
        raise VlmflowError(
            f"{what}: the smoke run's gate.json does not say what micro_batch_tokens: auto is",
            "another version of vlmflow may have written it: remove the smoke run's folder and run the same command "
            "again, or set runs.NAME.train.micro_batch_tokens to a number or null",
        )
    return replace(full, found=gate.passes)


def pace_of(report: TrainingReport, events: Sequence[Event], val: Sequence[RowLength], full: Training) -> Pace:
    """Return the time of a step from a training's events, with the cost of its evaluations.

    val: the rows of each evaluation. Without a step that counts, time is in proportion to tokens.
    """
    pace = fitted_pace(timed_steps(events)) or Pace(0.0, report.seconds / max(report.tokens, 1), 0)
    as_trained = _seconds_of_batches(val, pace, full)
    seconds = list(evaluation_seconds(events))
    if not seconds or not as_trained:
        return pace
    return structs.replace(pace, evaluation_cost=statistics.fmean(seconds) / as_trained)


def estimate(train: list[RowLength], val: list[RowLength], full: Training, pace: Pace) -> FullRun:
    """Estimate steps, tokens and seconds of the full run from the time of the smoke run's steps.

    train, val: the lengths of all rows, in the order of their files.
    """
    settings, processes = full.settings, full.ranks
    lengths = [row.tokens for row in train]
    count = Steps.of(len(lengths), settings, processes)
    left_over = rows_left_over(lengths, settings, processes)
    mean = sum(lengths) / len(lengths)
    steps = count.total
    tokens = round(steps / count.per_epoch * count.rows * mean)
    evaluations = evaluations_of(steps, settings)
    evaluating = pace.evaluation_cost * _seconds_of_batches(val, pace, full)
    seconds = round(steps * pace.step_seconds + tokens * pace.token_seconds + evaluations * evaluating)
    at_most = "at most " if settings.early_stop_after else ""
    untrained = f"; {len(left_over):,} of {len(train):,} rows left over, not trained" if left_over else ""
    return FullRun(
        steps=steps,
        left_over=[train[row].id for row in left_over[:NAMED]],
        rows_left_over=len(left_over),
        evaluations=evaluations,
        tokens=tokens,
        evaluated_tokens=evaluations * sum(row.tokens for row in val),
        seconds=seconds,
        readable=f"{at_most}{schedule_in_words(steps, evaluations)}; {tokens:,} tokens, {clock(seconds)}{untrained}",
        pace=pace,
    )


def _seconds_of_batches(rows: Sequence[RowLength], pace: Pace, full: Training) -> float:
    """Return how long some rows would take as batches of a training."""
    settings = full.settings
    if full.micro_batch_tokens is None:
        batches = math.ceil(len(rows) / (data_parallel_ranks(settings, full.ranks) * settings.per_device_batch_size))
        of_a_step: float = settings.gradient_accumulation_steps
    else:
        plan = plan_of(full)
        planner = replace(plan.planner, sizes=[size_of(row) for row in rows])
        batches = len(planner.step(range(len(rows)))[0])
        of_a_step = passes_per_step(plan)
    tokens = sum(row.tokens for row in rows)
    return batches * pace.step_seconds / of_a_step + tokens * pace.token_seconds


def _checks_of_layers(layers: list[Layers], full: Training) -> list[Check]:
    """Check that frozen parts of the model are not trained, and that a quantised base is in memory as such."""
    frozen, kind = full.settings.freeze, model_types()[full.model.model_type]
    trained_there = [each for each in layers if kind.part_of(each.name) in frozen and each.trained]
    what = f"{', '.join(frozen) or 'no part'} of the model is frozen"
    checks = [Check(what, not trained_there, "; ".join(f"{each.name} is trained" for each in trained_there))]
    if full.tuner.quantises:
        language = [each for each in layers if kind.part_of(each.name) == "language_model"]
        linear = [each for each in language if each.kind.startswith("Linear")]
        packed = [each for each in linear if each.kind == QUANTISED and each.bytes <= each.parameters * 0.51]
        others = [each.name for each in linear if each not in packed and not each.name.endswith("lm_head")]
        count, total = sum(each.count for each in packed), sum(each.bytes for each in packed)
        detail = f"{count} layers in 4 bit, {total / 1e6:,.1f} MB" + (f"; not: {', '.join(others)}" if others else "")
        checks.append(Check("the base is quantised", bool(packed) and not others, detail))
    return checks


def _finite(values: list[float]) -> bool:
    return bool(values) and all(math.isfinite(value) for value in values)


def _span(losses: list[float]) -> str:
    return f"{len(losses)} steps, {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step was logged"


def _falls(losses: list[float], eval_losses: list[float]) -> tuple[bool, str]:
    """Compare the means of the first and the last quarter, because the losses of single steps depend on their rows.

    If a quarter is a single step, the validation loss decides: it always has the same rows.
    """
    if not _finite(losses):
        return False, "not all losses are numbers"
    if len(losses) < SINGLE_STEPS and len(eval_losses) > 1:
        first, last = eval_losses[0], eval_losses[-1]
        return last < (1 - LEAST_FALL) * first, f"validation loss {first:.3f}, then {last:.3f}"
    quarter = max(1, len(losses) // 4)
    first, last = statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
    return last < (1 - LEAST_FALL) * first, f"mean of the first {quarter} steps {first:.3f}, of the last {last:.3f}"


Timed = tuple[int, float]
"""The tokens of a step or an evaluation, and the seconds that it took."""

WARM_UP = 1
"""The first steps of a session, which also load kernels and reserve memory, do not count."""


def timed_steps(events: Sequence[Event]) -> list[Timed]:
    """Return tokens and seconds of each step, without the first of a session and those during which it saved."""
    steps = []
    since_begin = 0
    for before, event in pairwise(events):
        if not isinstance(before, Log):
            since_begin = 0
        if isinstance(event, Log) and event.loss is not UNSET:
            since_begin += 1
            if since_begin > WARM_UP and isinstance(before, Log) and before.loss is not UNSET:
                steps.append((event.tokens - before.tokens, event.time - before.time))
    return steps


def evaluation_seconds(events: Sequence[Event]) -> Iterator[float]:
    """Yield the seconds of each evaluation after a step."""
    for before, event in pairwise(events):
        if isinstance(before, Log) and isinstance(event, Log) and event.eval_loss is not UNSET:
            yield event.time - before.time


def fitted_pace(steps: Sequence[Timed]) -> Pace | None:
    """Return the line through the times of some steps; None without steps.

    The slope is the median of those between two steps (Theil and Sen), so that a single slow step does not count; it
    lies between that of a time that does not depend on tokens, and of one in proportion to them.
    """
    if not steps:
        return None
    tokens, seconds = (statistics.fmean(values) for values in zip(*steps, strict=True))
    slopes = [(late - early) / (more - few) for (few, early), (more, late) in combinations(steps, 2) if more != few]
    proportional = seconds / tokens if tokens else 0.0
    slope = min(max(statistics.median(slopes), 0.0), proportional) if slopes else proportional
    rest = statistics.median(took - slope * count for count, took in steps)
    return Pace(step_seconds=max(rest, 0.0), token_seconds=slope, steps=len(steps))
