"""The trainings of this machine. The library finds them; here they are shown."""

import time
from collections.abc import Sequence
from typing import Protocol

from vlmflow.core.progress import clock
from vlmflow.remote.columns import in_columns


class Training(Protocol):
    """A training that a process of this machine runs (`vlmflow.supervisor.progress`)."""

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


def lines(trainings: Sequence[Training]) -> list[str]:
    """Return a line for each training, in columns: run and stage, what it does, its age, its process, its progress."""
    return in_columns(
        [
            [f"{one.run} {one.stage}", one.doing, clock(time.time() - one.since), one.holder, one.progress]
            for one in trainings
        ]
    )
