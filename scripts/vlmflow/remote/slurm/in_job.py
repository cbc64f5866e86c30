"""What runs in a job of Slurm for its stage: its Snakemake passes signals on, and lets the job come again.

Before a job's time limit, and when another job takes its place, Slurm sends SIGTERM. On clusters with control groups
only the first process of the job's step gets it. That is Snakemake, which would wait until its stage ends.

On several nodes, each runs `python -m vlmflow.remote.slurm.in_job RUNS THREADS COMMAND…`. RUNS: the folder with the run
folders of a run. THREADS: cores of a node. COMMAND: the job's Snakemake, which runs on the first node. Every other node
runs the training's agent, which waits for that one's launch file.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmflow.remote.job import NO_MEMORY, memory_kills
from vlmflow.remote.library import ATTEMPT, NODE_0, NOT_AGAIN, OTHER_NODE, PORT, PORT_OF, SAVED, VERDICT, tell_stages
from vlmflow.remote.slurm.queue import WHY, SlurmError, ask, read_verdict, seconds

ENDS = "VLMFLOW_SLURM_ENDS"
"""The variable with the folder in which stages leave their verdicts; only a job of our executor has it."""

TRAINERS = "torch.distributed.run"
"""A word in the command line of the child of a stage that starts the trainers, and ends with them."""

SIGNAL_EARLY = 60
"""Seconds by which Slurm may send a signal earlier than it was asked to (sbatch(1), --signal)."""

MOST_RESTARTS = 20
"""How often a job may come again that did not save anything before it lost its place."""

UNTIL_REQUEUED = 60.0
"""Seconds to wait for Slurm's signals after it took a job back."""

PORTS = 10_000
"""Jobs of different numbers may share a node; each meets at a port of its own."""


def become_node() -> None:
    """Become the program of this node of a job on several."""
    runs, threads, *command = sys.argv[1:]
    job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURM_PROCID"]
    # A job that Slurm lets come again keeps its number.
    attempt = f"slurm-{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    os.environ |= {
        ATTEMPT: attempt,
        # Of the first node: the batch script runs there.
        NODE_0: os.environ["SLURM_LAUNCH_NODE_IPADDR"],
        PORT_OF: str(PORT + int(job) % PORTS),
    }
    if node != "0":
        command = [sys.executable, "-m", OTHER_NODE, runs, attempt, node, threads]
    os.execvp(command[0], command)


def verdict_file(folder: Path, job: str) -> Path:
    """Return the file with the verdict of a job's stage."""
    return folder / f"{job}.json"


def install(workflow: Any, on_sigterm: Callable[[Callable[[], None]], None]) -> None:
    """Pass SIGTERM on to a stage that saves when it is told, and ask Slurm at the end to let its job come again.

    on_sigterm: `harness.patches.on_sigterm`.
    """
    job, told, killed = os.environ["SLURM_JOB_ID"], [], memory_kills()
    file = verdict_file(Path(os.environ[ENDS]), job)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # that of an earlier start
    os.environ[VERDICT] = str(file)

    def warning() -> int:
        """Return how many seconds before its end this job is told; 0 if it saves nothing."""
        return max((int(job.resources.get("warning_seconds") or 0) for job in workflow.dag.jobs), default=0)

    def tell() -> None:
        if warning():
            told.append(True)
            threading.Thread(target=tell_trainers, daemon=True).start()

    def end(*signal_and_frame: Any) -> None:  # before Snakemake has a scheduler
        told.append(True)
        sys.exit(1)

    def come_again() -> None:
        failed = workflow.scheduler is None or workflow.scheduler.failed
        if failed and killed():
            file.write_text(json.dumps({**read_verdict(file), NO_MEMORY: True}))
        if told and failed:
            saved = read_verdict(file).get(SAVED) is True
            if why := requeue(job, saved, warning()):
                file.write_text(json.dumps({**NOT_AGAIN, WHY: why}))
                print(why, file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, end)
    on_sigterm(tell)
    atexit.register(come_again)


def tell_trainers() -> None:
    """Tell each stage to save and end, as soon as its trainers run; it never returns.

    At other times SIGTERM would end the stage without a word of what it saved. After its trainers have ended, it may
    well put their result in place before the job must end.
    """
    tell_stages(lambda stage: any(TRAINERS in child.cmdline() for child in stage.children()))


def requeue(job: str, saved: bool, warning: int) -> str:
    """Ask Slurm to let a job come again that was told to end; returns why it does not, "" if it does.

    A job that saved nothing since it started comes again only if another one took its place, and not for ever. One that
    a person cancelled never does: it is COMPLETING by then, and before a limit or at a preemption still RUNNING.

    saved: whether it saved progress. warning: how many seconds before its time limit it is told.
    """
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    try:
        state, left = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T|%L").strip().split("|")
        if state != "RUNNING":
            return f"it was {state} after the signal"
        remains = seconds(left)
        if not saved and remains is not None and remains < warning + SIGNAL_EARLY:
            return "it saved nothing within its time limit: raise its runtime, or warning_seconds"
        if not saved and restarts >= MOST_RESTARTS:
            return f"it lost its place {restarts} times and saved nothing"
        ask("scontrol", "requeue", job)
    except (SlurmError, ValueError) as error:
        return f"Slurm does not let it come again: {error}"
    time.sleep(UNTIL_REQUEUED)  # Slurm ends us; a step that ended by itself would be a failed job
    return ""


if __name__ == "__main__":
    become_node()
