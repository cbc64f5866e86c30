"""What this package knows of a training that runs elsewhere than in a cluster; the library fills it in."""

from typing import Protocol


class Training(Protocol):
    """A training that a process of this machine runs (`vlmflow.training.local_runs`)."""

    @property
    def run(self) -> str:
        """The run's name."""

    @property
    def stage(self) -> str:
        """Smoke or full."""

    @property
    def doing(self) -> str:
        """What it does now, in a word."""

    @property
    def holder(self) -> str:
        """The process that runs it, in words."""

    @property
    def since(self) -> float:
        """When that began, in seconds since 1970."""

    @property
    def progress(self) -> str:
        """Its newest step and figures, in a line; "" before the first loss."""
