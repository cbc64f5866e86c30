"""Show what trains on this machine, and what runs in Slurm and Kubernetes: make status."""

from vlmflow.remote.status import main
from vlmflow.supervisor.progress import local_runs

if __name__ == "__main__":
    main(local_runs)
