"""Shows what runs now: `make status`.

It asks this machine for its trainings, Slurm for this user's jobs if its commands are here, and Kubernetes for the
Jobs of the namespace if a cluster is configured. One line for each: what it runs, its state, its age, where, and its
progress or why it waits.

Show what trains on this machine, and what runs in Slurm and Kubernetes: make status.
"""

import time

from vlmflow.config.model import errors_in_words, settings_of, tool_parser
from vlmflow.core.progress import clock
from vlmflow.remote.status import has_slurm, in_columns, of_kubernetes, of_slurm
from vlmflow.supervisor.progress import local_runs


def main() -> None:
    """Print the trainings of this machine, Slurm's jobs, and the Jobs of the namespace of the command line."""
    parser = tool_parser(__doc__)
    parser.add_argument("namespace")
    given = parser.parse_args()
    with errors_in_words():
        settings = settings_of(given.configfile)
    store = given.directory / settings.stores.runs
    trainings = [
        [f"{run.run} {run.stage}", run.doing, clock(time.time() - run.since), run.holder, run.progress]
        for run in local_runs(store)
    ]
    _show(in_columns(trainings) or [f"this machine trains nothing in {store.absolute()}"])
    with_slurm = has_slurm()
    if with_slurm:
        _show(of_slurm(given.directory))
    _show(of_kubernetes(given.namespace, settings.cluster.multi_node, optional=with_slurm))


def _show(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
