"""Compares the estimate of a run with what its trainings measured."""

import logging

import msgspec

from vlmflow.estimate.accounts import Estimate, NoEstimate, Result
from vlmflow.supervisor.accounts import TrainingReport

log = logging.getLogger("vlmflow")


class Compared(msgspec.Struct, frozen=True):
    """One figure. unit: of both values ("bytes", "steps", "tokens/s", "hours").

    estimated: null where nothing was estimated. up_to: the upper end, where the estimate is a range. measured: null
    where nothing was measured.
    """

    name: str
    unit: str
    estimated: float | None
    measured: float | None
    up_to: float | None = None

    @property
    def error(self) -> float | None:
        """The estimate relative to what was measured, less 1; of a range, its distance. Null where one is missing."""
        if self.estimated is None or not self.measured:
            return None
        return nearest(self.measured, self.estimated, self.up_to) / self.measured - 1


def nearest(measured: float, estimated: float, up_to: float | None) -> float:
    """Return the estimate, or of a range up to `up_to` the value that is nearest to what was measured."""
    return min(max(measured, estimated), estimated if up_to is None else up_to)


def compare(estimate: Estimate, report: TrainingReport) -> list[Compared]:
    """Return the figures of a run's estimate beside those of one of its trainings, the smoke run or the full run.

    Speed and hours are compared if the run names its GPU product; steps and hours only with a training of all steps.
    """
    on_gpu = report.device != "cpu"
    found = []
    if on_gpu:
        peak = max(report.peak_memory, default=None)
        found.append(Compared("memory of one GPU", "bytes", estimate.memory.total, peak))
    on = estimate.on(estimate.gpu) if on_gpu else None
    if on:
        slow, fast = (estimate.tokens / times.seconds for times in (on.slow, on.fast))
        found.append(Compared("speed of all GPUs", "tokens/s", slow, report.tokens_per_second, fast))
    if report.target == estimate.steps:
        found.append(Compared("optimizer steps", "steps", estimate.steps, report.steps))
        if on:
            hours = report.seconds / 3600
            found.append(Compared("training and evaluations", "hours", on.fast.hours, hours, on.slow.hours))
    return found


def log_compared(estimate: Result, report: TrainingReport, run: str) -> None:
    """Log each figure of a run's estimate that a training has measured."""
    for one in [] if isinstance(estimate, NoEstimate) else compare(estimate, report):
        if one.error is not None:
            log.info(
                f"{run}: {one.name}: measured {one.measured:,.4g} {one.unit}, the estimate is {one.error:+.0%} off"
            )
