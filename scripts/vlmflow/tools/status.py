"""What runs now: this machine's trainings, Slurm's jobs of this user, and the Jobs of a namespace of Kubernetes.

One line for each: what it runs, its state, its age, where, and its progress or why it waits.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path

from vlmflow.config.model import settings_of
from vlmflow.core.progress import clock
from vlmflow.remote.status import Running, has_slurm, of_kubernetes, of_slurm
from vlmflow.supervisor.progress import local_runs


def main(files: list[Path], folder: Path, namespace: str, as_json: bool = False) -> None:
    """Print what runs.

    files: as for snakemake's --configfile. folder: the working directory. namespace: of Kubernetes. as_json: print
    `here`, `slurm` and `kubernetes`, each with `jobs`, and with `none`, what to say if there is none.
    """
    settings = settings_of(files)
    store = folder / settings.stores.runs
    here = [
        {
            "job": f"{run.run} {run.stage}",
            "state": run.doing,
            "age": clock(time.time() - run.since),
            "where": run.holder,
            "detail": run.progress,
        }
        for run in local_runs(store)
    ]
    running = {"here": Running(here, f"this machine trains nothing in {store.absolute()}")}
    with_slurm = has_slurm()
    if with_slurm:
        running["slurm"] = of_slurm(folder)
    running["kubernetes"] = of_kubernetes(namespace, settings.cluster.multi_node, optional=with_slurm)
    if as_json:
        print(json.dumps({where: asdict(jobs) for where, jobs in running.items()}, indent=1))
    for line in [] if as_json else [line for jobs in running.values() for line in jobs.lines]:
        print(line, flush=True)
