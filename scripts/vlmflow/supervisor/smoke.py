"""The short training before the full one: its rows, its passes, the verdict on it, and what it says of the full run.

It trains on the longest rows, which determine memory, and a sample. Where the settings say `auto`, smoke runs on the
GPU at hand find how large micro-batches may be and whether to compute activations again.

The estimate of the full run gives each step a time, and each token of it one. One mean speed is wrong for rows of
another length: a smoke run has the longest rows, and the time of a step does not grow in proportion to its tokens.
"""

import hashlib
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import UNSET, structs

from vlmflow.config.model_types import model_types
from vlmflow.config.run_settings import SmokeSettings
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.files import whole_file
from vlmflow.core.progress import clock
from vlmflow.in_trainer.messages import Event, Log
from vlmflow.lengths.count import LengthAccount, RowLength, lines_of
from vlmflow.lengths.steps import (
    AND_AGAIN,
    FIRST,
    FORWARD_AND_BACKWARD,
    NUMBERS,
    Plan,
    Steps,
    data_parallel_ranks,
    evaluations_of,
    rows_left_over,
    schedule_in_words,
    size_of,
)
from vlmflow.lengths.summary import FittedSplit
from vlmflow.supervisor.plan import describe, described_epochs, passes_per_step, plan_of
from vlmflow.supervisor.report import Check, FullRun, Gate, Pace, PlannedMerge, TrainingReport
from vlmflow.supervisor.train import TooLargeError
from vlmflow.swift.arguments import Passes, Training
from vlmflow.swift.model_layers import Layers, share_without_adapter

FEWEST_STEPS = 4
"""The fewest steps of a smoke run."""

HALVINGS = 3
"""So often a number is halved after a GPU ran out of memory."""

STEPS = 100
"""The steps of the plan by which numbers are compared."""

QUANTISED = "Linear4bit"
"""The class of bitsandbytes' layers: two weights in a byte."""

LEAST_FALL = 1e-4
"""The share by which the loss must fall at least: less is rounding, of a training that changes nothing."""

SINGLE_STEPS = 8
"""With fewer steps than this, a quarter of them is a single step."""

NAMED = 20
"""The most rows left over that are named: a run of a few steps leaves nearly all."""

WARM_UP = 1
"""The first steps of a session, which also load kernels and reserve memory, do not count."""

Fits = Callable[[int, bool], bool]

Smoke = TypeVar("Smoke")

Timed = tuple[int, float]
"""The tokens of a step or an evaluation, and the seconds that it took."""


@dataclass(frozen=True)
class SmokeRows:
    """The rows that a smoke run trains on (`train`) and evaluates (`val`)."""

    train: list[RowLength]
    val: list[RowLength]


def capped(smoke: SmokeSettings, full: Training, rows: int) -> SmokeSettings:
    """Return the smoke run's settings, with at most as many steps as the full run.

    It keeps FEWEST_STEPS: fewer do not show whether the loss falls. rows: those of the full run's train split.
    """
    steps = max(FEWEST_STEPS, Steps.of(rows, full.settings, full.ranks).total)
    if steps >= smoke.steps:
        return smoke
    longest = min(smoke.longest, steps * full.rows_per_step)
    log.info(f"the full run has at most {steps} steps: the smoke run takes {steps}, not smoke.steps = {smoke.steps}")
    return smoke.model_copy(update={"steps": steps, "longest": longest})


def choose_rows(train: list[RowLength], val: list[RowLength], full: Training, smoke: SmokeSettings) -> SmokeRows:
    """Return the longest rows of both splits by tokens, and a sample of the train split, drawn with the run's seed.

    train, val: the lengths of all rows. The steps limit the sample: each chosen row is trained on at least once.
    With micro-batches, the first steps of the smoke run are those of the full run that need the most memory.

    Raises VlmflowError if the steps are not enough for the longest rows alone.
    """
    settings = full.settings
    rows = full.rows_per_step
    room = smoke.steps * rows - smoke.longest
    if room < 0:
        raise VlmflowError(
            f"smoke.steps = {smoke.steps} steps of {counted(rows, 'row')} do not reach smoke.longest = {smoke.longest}",
            f"set smoke.steps to {math.ceil(smoke.longest / rows)} or more",
        )
    by_length = sorted(train, key=_longest_first)
    others = by_length[smoke.longest :]
    sample = random.Random(settings.seed).sample(others, min(smoke.sample, room, len(others)))  # noqa: S311
    chosen = by_length[: smoke.longest] + sample
    if full.micro_batch_tokens is not None:
        chosen = _dearest_steps_first(train, chosen, full, smoke.steps)
    return SmokeRows(chosen, sorted(val, key=_longest_first)[: smoke.longest])


def _dearest_steps_first(
    train: list[RowLength], others: list[RowLength], full: Training, steps: int
) -> list[RowLength]:
    """Return the rows of the dearest steps of the full run, then others, in the order of a file.

    The order is such that the smoke run's sampler draws these steps first; a plan depends on lengths alone, so it cuts
    them into the same micro-batches. Steps of two epochs may share rows, which then stand there twice.
    """
    plan = plan_of(full)
    dearest: dict[str, tuple[int, list[int]]] = {}
    for rows in chain.from_iterable(map(plan.rows, described_epochs(full, plan))):
        for batch in (batch for batches in plan.planner.step(rows) for batch in batches):
            needs = {
                "tokens": plan.planner.tokens(batch),
                "trained tokens": sum(train[row].trained_tokens for row in batch),
                "picture tokens": sum(train[row].picture_tokens for row in batch),
            }
            for quantity, need in needs.items():
                if need > dearest.get(quantity, (-1, []))[0]:
                    dearest[quantity] = need, rows
    once = {tuple(sorted(rows)) for _, rows in dearest.values()}
    whole_first = sorted(once, key=lambda rows: (-len(rows), rows))
    first = [row for rows in whole_first for row in rows]
    starts = {train[row].start for row in first}
    wanted = [train[row] for row in first] + [row for row in others if row.start not in starts]
    wanted = wanted[: steps * full.rows_per_step]
    smaller = replace(plan, planner=replace(plan.planner, sizes=[0] * len(wanted)))
    drawn = [row for rows in smaller.rows(0) for row in rows]
    placed = sorted(zip(drawn, wanted, strict=False), key=itemgetter(0))
    return [row for _, row in placed]


def _longest_first(row: RowLength) -> tuple[int, int]:
    return -row.tokens, row.start


def smoke_training(full: Training, chosen: SmokeRows, smoke: SmokeSettings, folder: Path) -> Training:
    """Return the full run's training reduced to the smoke run: the same settings, fewer rows and steps.

    folder: the rows are written below it, in a folder named after their digest.
    """
    lines = {"train": lines_of(full.data.train, chosen.train), "val": lines_of(full.data.val, chosen.val)}
    digest = hashlib.sha256(b"\0".join(lines.values())).hexdigest()
    files = {split: folder / "rows" / digest[:16] / f"{split}.jsonl" for split in lines}
    data = replace(full.data, train=files["train"], val=files["val"], digest=digest + full.data.digest)
    for split, file in files.items():
        with whole_file(file) as target, whole_file(data.lengths(split)) as lengths:
            target.write(lines[split])
            lengths.writelines(msgspec.json.encode(row) + b"\n" for row in getattr(chosen, split))
    changes = {
        "max_steps": smoke.steps,
        "checkpoint_steps": (smoke.steps + 1) // 2,
        "evaluation_steps": (smoke.steps + 1) // 2,
        "early_stop_after": None,
        "micro_batch_tokens": full.micro_batch_tokens,
        "gradient_checkpointing": full.gradient_checkpointing,
    }
    return replace(full, data=data, passes=None, settings=full.settings.model_copy(update=changes))


def find_passes(full: Training, fits: Fits | None, smoke: Callable[[Training], Smoke]) -> tuple[Training, Smoke]:
    """Return the training with the passes that its smoke run trained with, and that smoke run.

    full: its settings have `auto`. fits: whether a number of tokens fits a GPU by the estimate, with or without
    gradient_checkpointing; None without an estimate. smoke: trains the smoke run of a training, and raises
    TooLargeError if a GPU runs out of memory.

    Raises TooLargeError if the smoke run does not fit after HALVINGS.
    """
    largest = _largest_by_estimate(full, fits)
    plan = plan_of(replace(full, passes=Passes(FIRST, gradient_checkpointing=True)))
    halvings = 0
    while True:
        (time, best), *others = sorted((_fastest(plan, *choice) for choice in largest.items()), key=itemgetter(0))
        beside = [f"; next best: {_in_words(passes)}, {longer / time:.2f} times the time" for longer, passes in others]
        log.info(f"auto: {_in_words(best)}{''.join(beside)}")
        chosen = replace(full, passes=best)
        try:
            return chosen, smoke(chosen)
        except TooLargeError:
            again, number = best.gradient_checkpointing, best.micro_batch_tokens // 2
            largest[again] = number
            if number < NUMBERS[0]:
                del largest[again]
            if halvings == HALVINGS or not largest:
                raise
            halvings += 1
            log.warning(f"auto: {_in_words(best)} did not fit the GPU; trying less")


def _in_words(passes: Passes) -> str:
    again = "with" if passes.gradient_checkpointing else "without"
    return f"micro-batches of {passes.micro_batch_tokens:,} tokens {again} gradient_checkpointing"


def _largest_by_estimate(full: Training, fits: Fits | None) -> dict[bool, int]:
    """Return the largest number that fits, for each allowed value of gradient_checkpointing."""
    word = full.settings.gradient_checkpointing
    allowed = [True, False] if word == "auto" else [bool(word)]
    if fits is None:
        return {allowed[0]: FIRST}
    largest = {}
    for again in allowed:
        fitting = [number for number in NUMBERS if fits(number, again)]
        if fitting or again is allowed[0]:
            largest[again] = max(fitting, default=NUMBERS[0])
    return largest


def _fastest(plan: Plan, again: bool, most: int) -> tuple[float, Passes]:
    """Return the number up to `most` with the least predicted time, the smallest of equals; and that time.

    plan: of the full run, with any number.
    """
    work = AND_AGAIN if again else FORWARD_AND_BACKWARD
    tried = []
    for number in [*(number for number in NUMBERS if number < most), most]:
        planner = replace(plan.planner, most=number)
        steps = map(planner.step, islice(plan.rows(0), STEPS))
        cost = sum(planner.cost(together) for step in steps for together in zip(*step, strict=True))
        tried.append((float(cost * work), Passes(number, again)))
    return min(tried, key=itemgetter(0))


def gpu_memory() -> int:
    """Return the bytes of this machine's first GPU. A process of its own asks: the driver keeps memory for each.

    Raises VlmflowError if there is none.
    """
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise VlmflowError(
            f"no GPU that PyTorch can use: {done.stderr.strip().rpartition(chr(10))[2]}",
            "vlmflow doctor says what a machine lacks; or set runs.NAME.device: cpu",
        )
    return int(done.stdout)


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
    span = f"{len(losses)} steps, {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step was logged"
    together = f"{counted(ranks, 'process')} train together" if ranks > 1 else "1 process trains"
    checks = [
        Check("every loss is a finite number", _finite(losses), span),
        Check("the loss falls", *_falls(losses, [loss for _, loss in report.eval_losses])),
        Check("every tensor of the best checkpoint can be read", True, f"step {report.best.step}"),
        Check("validation loss is a finite number", _finite([report.best.eval_loss]), ""),
        Check(together, report.world_size == ranks, report.parallel_mode),
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
        passes=full.passes,
        plan=None if full.micro_batch_tokens is None else describe(full),
        without_adapter=round(share_without_adapter(report.layers), 4) if full.tuner.trains_adapter else None,
    )


def refuse_failed(gate: Gate, label: str) -> None:
    """Raise VlmflowError with the failed checks, if any."""
    failed = [f"not so: {each.check} ({each.detail})" for each in gate.checks if not each.passed]
    if failed:
        raise VlmflowError(
            f"{label}: the gate is closed: " + "; ".join(failed),
            "change runs.NAME.train.learning_rate (lower if the loss rises, higher if it hardly moves), or check the "
            "data; the full training has not begun",
        )


def with_passes(full: Training, gate: Gate, label: str) -> Training:
    """Return the full run with what its smoke run found for `auto`.

    Raises VlmflowError if the gate is one of before and does not say: the run would train as with null.
    """
    if full.settings.micro_batch_tokens == "auto" and gate.passes is None:
        raise VlmflowError(
            f"{label}: the smoke run's gate.json does not say what micro_batch_tokens: auto is",
            "another version of vlmflow may have written it: remove the smoke run's folder and run the same command "
            "again, or set runs.NAME.train.micro_batch_tokens to a number or null",
        )
    return replace(full, passes=gate.passes)


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
    frozen, model_type = full.settings.freeze, model_types()[full.model.model_type]
    trained_there = [layer for layer in layers if model_type.part_of(layer.name) in frozen and layer.trained]
    check = f"{', '.join(frozen) or 'no part'} of the model is frozen"
    checks = [Check(check, not trained_there, "; ".join(f"{layer.name} is trained" for layer in trained_there))]
    if full.tuner.quantises:
        language = [layer for layer in layers if model_type.part_of(layer.name) == "language_model"]
        linear = [layer for layer in language if layer.kind.startswith("Linear")]
        packed = [layer for layer in linear if layer.kind == QUANTISED and layer.bytes <= layer.parameters * 0.51]
        others = [layer.name for layer in linear if layer not in packed and not layer.name.endswith("lm_head")]
        count, total = sum(layer.count for layer in packed), sum(layer.bytes for layer in packed)
        detail = f"{count} layers in 4 bit, {total / 1e6:,.1f} MB" + (f"; not: {', '.join(others)}" if others else "")
        checks.append(Check("the base is quantised", bool(packed) and not others, detail))
    return checks


def _finite(values: list[float]) -> bool:
    return bool(values) and all(math.isfinite(value) for value in values)


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
