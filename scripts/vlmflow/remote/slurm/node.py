"""One node of a job on several: python -m vlmflow.remote.slurm.node RUNS THREADS COMMAND…

RUNS: the folder with the run folders of a run. THREADS: cores of a node. COMMAND: the job's Snakemake, which runs on
the first node. Every other node runs the training's agent, which waits for that one's launch file.
"""

import os
import sys

from vlmflow.core.child_programs import ATTEMPT, NODE_0, OTHER_NODE, PORT, PORT_OF

PORTS = 10_000
"""Jobs of different numbers may share a node; each meets at a port of its own."""


def main() -> None:
    """Become this node's program."""
    runs, threads, *command = sys.argv[1:]
    job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURM_PROCID"]
    # A job that Slurm lets come again keeps its number.
    attempt = f"slurm-{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    os.environ |= {
        ATTEMPT: attempt,
        NODE_0: os.environ["SLURM_LAUNCH_NODE_IPADDR"],  # of the first node: the batch script runs there
        PORT_OF: str(PORT + int(job) % PORTS),
    }
    if node != "0":
        command = [sys.executable, "-m", OTHER_NODE, runs, attempt, node, threads]
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
