"""The newest figures of a training, from its events: for the console, the pages and `make status`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypeVar

from msgspec import UNSET, UnsetType

from vlmflow.core.progress import clock
from vlmflow.in_trainer.events import Begin, End, Event, Log

T = TypeVar("T")


@dataclass
class Newest:
    """The figures after some events; units as in `in_trainer.events`.

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
            self._begin(event)
        elif isinstance(event, Log):
            self._log(event)
        elif isinstance(event, End):
            self.ended = True

    def _begin(self, event: Begin) -> None:
        self.sessions += 1
        self.begun_at, self.target, self._tokens_before = event.step, event.target, event.tokens
        self.time, self.ended, self.waited = 0.0, False, None
        self.eval_losses = {step: loss for step, loss in self.eval_losses.items() if step <= event.step}

    def _log(self, event: Log) -> None:
        self.seconds += event.time - self.time
        self.tokens += event.tokens - self._tokens_before
        self.time, self.target, self._tokens_before = event.time, event.target, event.tokens
        self.loss = _newer(event.loss, self.loss)
        self.learning_rate = _newer(event.learning_rate, self.learning_rate)
        self.grad_norm = _newer(event.grad_norm, self.grad_norm)
        self.waited = _newer(event.waited, self.waited)
        self.memory = _newer(event.memory, self.memory)
        if event.eval_loss is not UNSET:
            self.eval_losses[event.step] = event.eval_loss

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
        return None if (each := self.seconds_per_step) is None else each * (self.target - self.step)


def _newer(value: T | UnsetType, before: T | None) -> T | None:
    return before if value is UNSET else value


def report_line(newest: Newest) -> str:
    """Return one line of progress: step, losses, speed, time left; "" before the first loss."""
    if newest.loss is None:
        return ""
    parts = [f"step {newest.step}/{newest.target}", f"loss {newest.loss:.3f}"]
    if newest.eval_loss is not None:
        parts.append(f"val {newest.eval_loss:.3f}")
    if (each := newest.seconds_per_step) is not None:
        parts.append(f"{each:.2f} s/step")
        left = newest.target - newest.step
        parts.append(f"{clock(each * left)} left" if left else "evaluating and saving")
    return " · ".join(parts)
