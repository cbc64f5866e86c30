"""Runs a training from its first step, or from its newest checkpoint, to its target, and reports it."""

import importlib.metadata
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vlmflow.config.run_settings import experiments
from vlmflow.core.errors import InterruptedTrainingError, PassingError, VlmflowError, counted, log
from vlmflow.core.files import sha256_of
from vlmflow.core.patience import RunningTime
from vlmflow.in_trainer.messages import Begin, End, Model, logged, read_events
from vlmflow.supervisor.failures import (
    MachineFaultError,
    OutOfGpuMemoryError,
    ResumableError,
    refuse_bad_step,
    resume_once,
)
from vlmflow.supervisor.group import group_of
from vlmflow.supervisor.launch import refuse_small_shared_memory
from vlmflow.supervisor.plan import kept_plan, read_plan
from vlmflow.supervisor.progress import Newest, last_step
from vlmflow.supervisor.report import (
    Best,
    EndedEarly,
    TrainingDigests,
    TrainingReport,
    digests_of,
    refuse_other_adapter,
)
from vlmflow.supervisor.run_folder import (
    Checkpoint,
    ForeignCodeError,
    RunFolder,
    newest_whole_checkpoint,
    read_checkpoint,
)
from vlmflow.supervisor.watch import Launcher, Onlooker, nobody
from vlmflow.swift.arguments import Training

PACKAGES = ("torch", "ms-swift", "transformers", "peft", "accelerate")


class TrainingFailedError(VlmflowError):
    """The training itself failed, with its data and settings; neither this machine nor somebody's signal ended it."""


class TooLargeError(TrainingFailedError):
    """A GPU ran out of memory in a training that is not resumed."""


class OutOfHoursError(VlmflowError):
    """The trainers saved and ended because their hours were over (`Training.hours`)."""


@dataclass(frozen=True)
class Trained:
    """A finished training: its run folder, the last checkpoint, and the best one by validation loss."""

    folder: RunFolder
    last: Checkpoint
    best: Checkpoint


def train(
    training: Training, runs: Path, threads: int, label: str, resumes: bool = True, onlooker: Onlooker = nobody
) -> Trained:
    """Train `training` in its run folder under `runs` (`runs/DIGEST`), and return the result.

    A run folder with complete checkpoints of the same data and settings is resumed from the newest; a finished one is
    used as it is.

    label: the stage and run, for messages. threads: cores for all processes of this machine together. resumes: whether
    a training that runs out of GPU memory, or hangs, is resumed, once from the same checkpoint. onlooker: who looks at
    the training while it runs.

    Raises TrainingFailedError if the trainers fail, or a step has spoiled the training (TooLargeError if a GPU ran out
    of memory, and it is not resumed); OutOfHoursError if they ended because their hours were over, or have none to
    begin with; InterruptedTrainingError if they saved and ended before their target; PassingError if they ended without
    saving (TrainersDiedError if nobody asked them to); VlmflowError if this machine cannot train, or a checkpoint
    cannot be read.
    """
    refuse_slow_torch(importlib.metadata.version("torch"))
    folder = RunFolder(runs / training.digest())
    with folder.held(training.describe()) as lock:
        plan = kept_plan(training, folder, label)
        training = replace(training, passes=plan.passes) if plan else training
        with group_of(training, folder, threads) as group:
            loaders = training.ranks if group.is_local else training.processes
            refuse_small_shared_memory(training.settings, loaders, plan.picture_tokens if plan else None)
            return _train(training, Launcher(folder, lock, group, label, onlooker), resumes)


def _train(training: Training, launcher: Launcher, resumes: bool) -> Trained:
    patience, folder, label = training.settings.early_stop_after, launcher.folder, launcher.label
    with _failures_of_the_training():
        refuse_bad_step(folder, training.data.train, label)
    begun = last = _newest(training, folder)
    over = training.hours is not None and training.hours <= 0
    if last is not None and last.ended(patience, training.stop_at):
        log.info(f"{label}: already trained to step {last.step} ({folder.path})")
    elif not over:
        if last is not None:
            lost = max(0, last_step(folder.progress) - last.step)
            again = f"; lost since then, and trained again: {counted(lost, 'step')}" if lost else ""
            log.info(f"{label}: resuming from step {last.step} of {last.target} ({last.folder}){again}")
        with _failures_of_the_training():
            left = _launch(training, launcher, last, resumes)
            over = left is not None and left <= 0
            refuse_bad_step(folder, training.data.train, label)
        last = _newest(training, folder)
    log.debug(f"{label}: the trainer's own log is {folder.trainer_log}")
    if last is None or not last.ended(patience, training.stop_at):
        if over:
            at = f"step {last.step} of {last.target}" if last else "no checkpoint"
            raise OutOfHoursError(f"{label}: its hours are over, with {at}", "give it more hours: it resumes there")
        if last is None:
            raise InterruptedTrainingError(
                f"{label}: the training was interrupted before its first checkpoint",
                "run the same command again: it trains from step 0",
                saved=False,
            )
        raise InterruptedTrainingError(
            f"{label}: the training was interrupted, with step {last.step} of {last.target}",
            "run the same command again: it resumes there",
            saved=begun is None or last.step > begun.step,
        )
    if last.best is None:
        raise TrainingFailedError(
            f"{label}: no evaluation up to step {last.step} gave a finite validation loss",
            f"lower runs.NAME.train.learning_rate, remove {folder.path} and run the same command again",
        )
    if last.ended_early(patience):
        log.info(
            f"{label}: ended early at step {last.step} of {last.target}: {counted(patience or 0, 'evaluation')} "
            f"without a lower validation loss than step {last.best.name.rpartition('-')[2]}'s (early_stop_after)"
        )
    best = read_checkpoint(last.best, training.ranks, training.strategy, training.tuner)
    if best is None:
        raise VlmflowError(
            f"{last.best}: the best checkpoint can no longer be read",
            f"remove {folder.path} and run the same command again",
        )
    if training.tuner.trains_adapter:
        refuse_other_adapter(best.folder, training.settings.lora)
    return Trained(folder, last, best)


def trained_before(training: Training, runs: Path) -> Trained | None:
    """Return what a finished training left in its run folder under `runs`; None if it is not there any more."""
    folder = RunFolder(runs / training.digest())
    last = _newest(training, folder)
    if last is None or last.best is None or not last.ended(training.settings.early_stop_after, training.stop_at):
        return None
    best = read_checkpoint(last.best, training.ranks, training.strategy, training.tuner)
    return Trained(folder, last, best) if best else None


@contextmanager
def _failures_of_the_training() -> Iterator[None]:
    """Tell what ends the trainers from what the machines lack, and from a checkpoint that they must not load."""
    try:
        yield
    except (PassingError, MachineFaultError, ForeignCodeError, TrainingFailedError):
        raise
    except VlmflowError as error:
        raise TrainingFailedError(error.cause, error.next_step) from None


def _launch(training: Training, launcher: Launcher, last: Checkpoint | None, resumes: bool) -> float | None:
    """Start the trainers; if a GPU runs out of memory, or they hang, start them once more from each checkpoint.

    Returns the hours that are left to them then; None without a limit.
    """
    left = training.hours
    with closing(RunningTime()) as running:
        while True:
            try:
                launcher.launch(replace(training, hours=left), last.folder if last else None)
                return _left(training.hours, running)
            except ResumableError as error:
                if not resumes and isinstance(error, OutOfGpuMemoryError):
                    raise TooLargeError(error.cause, error.next_step) from None
                left = _left(training.hours, running)
                last = _newest(training, launcher.folder) if resumes else None
                begin = 0 if resumes and error.begins_again else None
                mark = resume_once(launcher.folder, last.step if last else begin, error)
                log.warning(f"{error.cause} (after step {mark.step}): resuming once from step {mark.checkpoint}")


def _left(hours: float | None, running: RunningTime) -> float | None:
    return None if hours is None else max(0.0, hours - running.seconds() / 3600)


def _newest(training: Training, folder: RunFolder) -> Checkpoint | None:
    return newest_whole_checkpoint(folder.output, training.ranks, training.strategy, training.tuner)


def refuse_slow_torch(version: str) -> None:
    """Refuse PyTorch 2.9, which runs Qwen3-VL's vision tower 10 to 20 times slower (pytorch#174051)."""
    if version.startswith("2.9."):
        raise VlmflowError(
            f"torch {version} runs Qwen3-VL's vision tower 10 to 20 times slower than other versions",
            "install the pinned packages: envs/train.lock, in a clone by rm .venv/train.stamp && make env",
        )


def report(training: Training, trained: Trained) -> TrainingReport:
    """Return the machine-readable report of a finished training.

    Raises VlmflowError if its progress file is missing or empty, or has a line of another form.
    """
    events = read_events(trained.folder.progress)
    begins = [event for event in events if isinstance(event, Begin)]
    ends = [event for event in events if isinstance(event, End)]
    if not begins:
        raise VlmflowError(
            f"{trained.folder.progress}: no session begins in it",
            f"restore the file; or remove {trained.folder.path} and run the same command again: it trains from step 0",
        )
    models = [event for event in events if isinstance(event, Model)]
    newest = Newest.of(events)
    state = trained.last.state
    best = Best(trained.best.step, math.nan if state.best_metric is None else state.best_metric)
    patience = training.settings.early_stop_after
    early = EndedEarly(patience, best.step, best.eval_loss) if patience and trained.last.ended_early(patience) else None
    evaluation = next(entry for entry in reversed(state.log_history) if "eval_loss" in entry)
    return TrainingReport(
        steps=trained.last.step,
        target=trained.last.target,
        ended_early=early,
        sessions=newest.sessions,
        world_size=begins[-1].world_size,
        parallel_mode=begins[-1].parallel_mode,
        device=begins[-1].device,
        seconds=round(newest.seconds, 2),
        tokens=newest.tokens,
        tokens_per_second=round(newest.tokens / newest.seconds, 1) if newest.seconds else None,
        peak_memory=ends[-1].peak_memory if ends else [],
        layers=models[-1].layers if models else [],
        losses=logged(state.log_history, "loss"),
        eval_losses=logged(state.log_history, "eval_loss"),
        eval_rows=evaluation["eval_rows"],
        eval_tokens=evaluation["eval_tokens"],
        best=best,
        settings=training.settings.model_dump(mode="json"),
        tuner=training.tuner.name,
        strategy=training.strategy.name,
        deepspeed=training.strategy.deepspeed,
        plan=read_plan(trained.folder),
        experimental=experiments(training.tuner.name, training.strategy.name, training.settings),
        digests=TrainingDigests(
            job=training.digest(),
            data=training.data.digest,
            model=training.model.digest,
            released=digests_of(trained.best.folder, training.tuner),
            progress=sha256_of(trained.folder.progress),
        ),
        versions={package: importlib.metadata.version(package) for package in PACKAGES},
        run_folder=str(trained.folder.path),
    )


def draw_losses(report: TrainingReport, title: str, picture: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file, and mark the best checkpoint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*(report.losses or []), strict=True), color="0.6", linewidth=1, label="train")
    if report.eval_losses:
        axes.plot(*zip(*report.eval_losses, strict=True), "o-", color="C0", label="val")
        axes.plot(report.best.step, report.best.eval_loss, "*", color="C3", markersize=14, label="best checkpoint")
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
