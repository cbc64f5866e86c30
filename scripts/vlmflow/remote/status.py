"""Shows what runs now: `make status`.

It asks this machine for its trainings, Slurm for this user's jobs if its commands are here, and Kubernetes for the
Jobs of the namespace if a cluster is configured. One line for each: what it runs, its state, its age, where, and its
progress or why it waits.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from vlmflow.config.command_line import errors_in_words, settings_of, tool_parser
from vlmflow.remote import training
from vlmflow.remote.cluster.group_kinds import KINDS
from vlmflow.remote.kubernetes import status as kubernetes
from vlmflow.remote.slurm import status as slurm


def main(local_runs: Callable[[Path], Sequence[training.Training]]) -> None:
    """Print the trainings of this machine, Slurm's jobs, and the Jobs of the namespace of the command line.

    local_runs: returns the trainings of this machine. It takes the folder of all run folders (stores.runs).
    """
    parser = tool_parser(__doc__)
    parser.add_argument("namespace")
    given = parser.parse_args()
    with errors_in_words():
        settings = settings_of(given.configfile)
    store = given.directory / settings.stores.runs
    _show(training.lines(local_runs(store)) or [f"this machine trains nothing in {store.absolute()}"])
    with_slurm = slurm.is_here()
    if with_slurm:
        _show(slurm.lines(given.directory))
    _show(kubernetes.lines(given.namespace, KINDS[settings.cluster.multi_node], optional=with_slurm))


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
