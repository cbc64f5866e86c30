"""The machine is the same after Slurm as before."""

import os
import signal
import subprocess
import sys

from cluster.machine import machine_state
from cluster.shell import wait_for
from slurm.slurm_cluster import FOLDER, LINK, SlurmCluster


def test_slurm_leaves_nothing_behind(own_slurm: SlurmCluster) -> None:
    own_slurm.down()
    before = machine_state()
    assert LINK not in before["links"]
    own_slurm.up()
    own_slurm.run("srun", "--gpus=1", "true")
    own_slurm.wait_for_job(own_slurm.submit("srun sleep 1000"), "RUNNING")
    assert machine_state() != before
    own_slurm.down()
    assert machine_state() == before
    assert not FOLDER.exists()


def test_what_a_killed_run_left_goes_with_the_next(own_slurm: SlurmCluster) -> None:
    own_slurm.down()
    before = machine_state()
    stays = [sys.executable, "-m", "slurm", "srun", "--gpus=1", "--mem=100", "sleep", "1000"]
    with subprocess.Popen(stays, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as run:
        wait_for("its job runs", lambda: any("job_1" in group for group in machine_state()["cgroups"]))
        run.send_signal(signal.SIGKILL)
    wait_for("its processes have ended", lambda: machine_state()["processes"] == before["processes"])
    assert machine_state() != before
    own_slurm.up()
    own_slurm.down()
    assert machine_state() == before
