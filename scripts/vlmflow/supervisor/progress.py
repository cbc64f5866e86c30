"""What a training is doing, and its newest figures: for the console, the pages and `vlmflow status`."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from msgspec import UNSET

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.core.progress import clock
from vlmflow.in_trainer.messages import STATE, Begin, End, Event, Log, new_events, read_event, stalled
from vlmflow.supervisor.run_folder import JOB, RunFolder

Doing = Literal["starting", "training", "evaluating", "saving", "ended", "interrupted"]
"""ended: at its last step, or early by validation loss. interrupted: before that; the same command resumes it."""


@dataclass
class Newest:
    """The figures after some events; units as in `in_trainer.messages`.

    sessions: how often trainers began. begun_at: the step at which the newest session began, time: its seconds so far.
    ended: whether it ended by itself. seconds, tokens: of all sessions, including steps that a kill wasted.
    eval_losses: the validation losses by step; steps that a resumed training repeats count once.
    """

    sessions: int = 0
    begun_at: int = 0
    step: int = 0
    target: int = 0
    time: float = 0.0
    ended: bool = False
    seconds: float = 0.0
    tokens: int = 0
    loss: float | None = None
    eval_losses: dict[int, float] = field(default_factory=dict)
    learning_rate: float | None = None
    grad_norm: float | None = None
    waited: float | None = None
    memory: int | None = None
    _tokens_before: int = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Return the figures after these events."""
        newest = cls()
        for event in events:
            newest.take(event)
        return newest

    def take(self, event: Event) -> None:
        """Update the figures from one more event."""
        self.step = event.step
        if isinstance(event, Begin):
            self.sessions += 1
            self.begun_at, self.target, self._tokens_before = event.step, event.target, event.tokens
            self.time, self.ended, self.waited = 0.0, False, None
            self.eval_losses = {step: loss for step, loss in self.eval_losses.items() if step <= event.step}
        elif isinstance(event, Log):
            self.seconds += event.time - self.time
            self.tokens += event.tokens - self._tokens_before
            self.time, self.target, self._tokens_before = event.time, event.target, event.tokens
            for name in ("loss", "learning_rate", "grad_norm", "waited", "memory"):
                if (value := getattr(event, name)) is not UNSET:
                    setattr(self, name, value)
            if event.eval_loss is not UNSET:
                self.eval_losses[event.step] = event.eval_loss
        elif isinstance(event, End):
            self.ended = True

    @property
    def eval_loss(self) -> float | None:
        """The newest validation loss."""
        return self.eval_losses[max(self.eval_losses)] if self.eval_losses else None

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds for one step of the newest session, evaluations and checkpoints included; None before the first."""
        done = self.step - self.begun_at
        return self.time / done if done > 0 and self.time > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds up to the last step at the speed of the newest session; None before its first step."""
        return None if (seconds := self.seconds_per_step) is None else seconds * (self.target - self.step)


def newest_of(folder: RunFolder) -> Newest:
    """Return the figures of a run folder's training so far."""
    if not folder.progress.is_file():
        return Newest()
    with folder.progress.open("rb") as lines:
        return Newest.of(new_events(lines))


def report_line(newest: Newest) -> str:
    """Return one line of progress: step, losses, speed, time left; "" before the first loss."""
    if newest.loss is None:
        return ""
    parts = [f"step {newest.step}/{newest.target}", f"loss {newest.loss:.3f}"]
    if newest.eval_loss is not None:
        parts.append(f"val {newest.eval_loss:.3f}")
    if (seconds := newest.seconds_per_step) is not None:
        parts.append(f"{seconds:.2f} s/step")
        left = newest.target - newest.step
        parts.append(f"{clock(seconds * left)} left" if left else "evaluating and saving")
    return " · ".join(parts)


def last_step(progress: Path) -> int:
    """Return the last step that the trainer reported, or 0."""
    for line in reversed(progress.read_bytes().splitlines() if progress.is_file() else []):
        with suppress(ValueError):  # a cut line, or one of another version: it must not hide why the training failed
            return read_event(line).step
    return 0


def doing(newest: Newest, settings: TrainSettings, output: Path, runs: bool, begun: bool = True) -> Doing:
    """Return what a training is doing.

    newest: its newest figures. settings: the run's. output: the folder of its checkpoints. runs: whether trainers run;
    begun: whether these have written an event.
    """
    if not runs:
        return "ended" if is_over(newest, settings) else "interrupted"
    if not begun:
        return "starting"
    if newest.ended:
        return "saving"
    step = newest.step
    last = step >= newest.target
    if step and step not in newest.eval_losses and (last or step % settings.evaluate_every == 0):
        return "evaluating"
    saves = step and (last or step % settings.save_every == 0)
    if saves and not (output / f"checkpoint-{step}" / STATE).is_file():  # transformers writes this file last
        return "saving"
    return "training"


def is_over(newest: Newest, settings: TrainSettings) -> bool:
    """Return whether a training reached its last evaluation, or ended early because validation loss stopped falling."""
    history = [{"step": at, "eval_loss": loss} for at, loss in sorted(newest.eval_losses.items())]
    at_target = newest.step >= newest.target and newest.step in newest.eval_losses
    return at_target or stalled(history, settings.early_stop_after)


@dataclass(frozen=True)
class LocalRun:
    """One training. stage: "smoke" or "full". holder: its process. since: when that began, in seconds since 1970."""

    run: str
    stage: str
    folder: RunFolder
    holder: str
    since: float
    doing: Doing
    newest: Newest

    @property
    def progress(self) -> str:
        """One line of its newest figures; "" before the first loss."""
        return report_line(self.newest)


def local_runs(store: Path) -> list[LocalRun]:
    """Return the trainings whose run folder a process of this machine holds, by run and stage.

    On file systems whose locks hold between machines, those of others are left out by what is written in the lock.

    store: the folder of all run folders (stores.runs).
    """
    folders = [RunFolder(lock.parent) for lock in sorted(store.glob("*/*/*/lock"))]
    held = [(folder, holder) for folder in folders if (holder := folder.holder()) is not None]
    here = socket.gethostname()
    return [_run_in(folder, holder) for folder, holder in held if holder.partition(" on ")[2] in ("", here)]


def _run_in(folder: RunFolder, holder: str) -> LocalRun:
    run, stage = folder.path.parts[-3:-1]
    since, newest = folder.held_since(), newest_of(folder)
    # Events older than the holder are those of an earlier session.
    begun = newest.sessions > 0 and folder.progress.stat().st_mtime > since
    now: Doing = "training" if begun else "starting"
    if settings := _settings(folder):
        now = doing(newest, settings, folder.output, runs=True, begun=begun)
    return LocalRun(run, stage, folder, holder, since, now, newest)


def _settings(folder: RunFolder) -> TrainSettings | None:
    """Return the training's settings; None if they are not written yet, are damaged, or another version wrote them."""
    try:
        return TrainSettings.model_validate(read_json(folder.path / JOB)["settings"])
    except (VlmflowError, ValueError, KeyError, TypeError, RecursionError):
        return None
