"""The tests' Slurm by hand: `python -m slurm COMMAND …` runs a command, or a shell, while it is up."""

import signal
import subprocess
import sys

from slurm.slurm_cluster import SlurmCluster
from vlmflow.core.processes import bound_to_this_process

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with SlurmCluster() as slurm:
        words, ends_with_us = sys.argv[1:] or ["bash"], bound_to_this_process()
        sys.exit(subprocess.run(words, env=slurm.environment, preexec_fn=ends_with_us, check=False).returncode)
