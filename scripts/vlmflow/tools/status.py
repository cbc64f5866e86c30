"""The trainings of this machine. The library finds them; here they are shown.

Shows what runs now: `make status`.

It asks this machine for its trainings, Slurm for this user's jobs if its commands are here, and Kubernetes for the
Jobs of the namespace if a cluster is configured. One line for each: what it runs, its state, its age, where, and its
progress or why it waits.

Show what trains on this machine, and what runs in Slurm and Kubernetes: make status.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vlmflow.config.model import errors_in_words, settings_of, tool_parser
from vlmflow.core.progress import clock
from vlmflow.remote.status import has_slurm, in_columns, of_kubernetes, of_slurm
from vlmflow.supervisor.progress import local_runs


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


def main(local_runs: Callable[[Path], Sequence[Training]]) -> None:
    """Print the trainings of this machine, Slurm's jobs, and the Jobs of the namespace of the command line.

    local_runs: returns the trainings of this machine. It takes the folder of all run folders (stores.runs).
    """
    parser = tool_parser(__doc__)
    parser.add_argument("namespace")
    given = parser.parse_args()
    with errors_in_words():
        settings = settings_of(given.configfile)
    store = given.directory / settings.stores.runs
    _show(lines(local_runs(store)) or [f"this machine trains nothing in {store.absolute()}"])
    with_slurm = has_slurm()
    if with_slurm:
        _show(of_slurm(given.directory))
    _show(of_kubernetes(given.namespace, settings.cluster.multi_node, optional=with_slurm))


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main(local_runs)
