"""The course of a training, from its events: the newest figures, and the curves of a run's page."""

from msgspec import UNSET

from vlmflow.in_trainer.messages import Begin, Event, Log
from vlmflow.reports.curve import Curve
from vlmflow.reports.line_chart import LineChart, line_chart
from vlmflow.supervisor.progress import Newest


class RunHistory:
    """The course of a training, updated from one event at a time; steps that a resumed training repeats count once.

    speed: tokens per second of each step. waiting: the share of a step's time in which rank 0 waited for data.
    """

    def __init__(self) -> None:
        self.newest = Newest()
        self.loss, self.eval_loss = Curve(), Curve()
        self.learning_rate, self.grad_norm = Curve(), Curve()
        self.speed, self.waiting = Curve(), Curve()
        self._tokens = 0

    def take(self, event: Event) -> None:
        """Add one more event."""
        if isinstance(event, Begin):
            self._tokens = event.tokens
            for curve in (self.loss, self.eval_loss, self.learning_rate, self.grad_norm, self.speed, self.waiting):
                curve.cut(event.step)
        elif isinstance(event, Log):
            self._log(event)
        self.newest.take(event)

    def _log(self, event: Log) -> None:
        if event.eval_loss is not UNSET:
            self.eval_loss.add(event.step, event.eval_loss)
        if event.loss is not UNSET:
            self.loss.add(event.step, event.loss)
            seconds = event.time - self.newest.time
            if seconds > 0:
                self.speed.add(event.step, (event.tokens - self._tokens) / seconds)
            if seconds > 0 and event.waited is not UNSET:
                share = (event.waited - (self.newest.waited or 0.0)) / seconds
                self.waiting.add(event.step, min(1.0, max(0.0, share)))
        if event.learning_rate is not UNSET:
            self.learning_rate.add(event.step, event.learning_rate)
        if event.grad_norm is not UNSET:
            self.grad_norm.add(event.step, event.grad_norm)
        self._tokens = event.tokens

    def charts(self) -> list[LineChart]:
        """Return the charts of all figures that have a value."""
        steps = self.newest.target
        charts = [
            line_chart("Loss", "nats per token", {"train": self.loss, "val": self.eval_loss}, steps),
            line_chart("Learning rate", "learning rate", {"train": self.learning_rate}, steps),
            line_chart("Gradient norm", "norm before clipping", {"train": self.grad_norm}, steps),
            line_chart("Speed", "tokens per second, of all processes", {"train": self.speed}, steps),
            line_chart("Waiting for data", "share of a step's time", {"train": self.waiting}, steps, "{:.0%}".format),
        ]
        return [chart for chart in charts if chart]
