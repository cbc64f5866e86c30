"""The lines of `make status` for Slurm, one for each job of this user that vlmflow submitted and that has not ended."""

import getpass
import re
import shutil
from datetime import datetime
from pathlib import Path

from vlmflow.core.printable import printable
from vlmflow.core.progress import clock
from vlmflow.remote.columns import in_columns
from vlmflow.remote.slurm.commands import SlurmError, ask
from vlmflow.remote.slurm.queue import QueuedJob, jobs
from vlmflow.remote.slurm.waiting import explain, starts_by_itself
from vlmflow.remote.stage_log import last_lines, newest_progress

STATES = {
    "PENDING": "waiting",
    "CONFIGURING": "starting",
    "COMPLETING": "ending",
    "STAGE_OUT": "ending",
    "SIGNALING": "running",
    "RESIZING": "running",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "held",
    "RESV_DEL_HOLD": "held",
    "SPECIAL_EXIT": "held",
}
"""Slurm's words for a job that has not ended, in ours; the others are the same in small letters."""


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def lines(folder: Path) -> list[str]:
    """Return a line for each job, in columns, or one line that says why there is none.

    folder: the working directory of Snakemake; of a job of another one the folder is shown, too.
    """
    try:
        ours = [job for job in jobs().values() if job.words and job.is_active]
        places = _places() if ours else {}
        rows = [_row(job, *places.get(job.id, ("", "")), folder) for job in sorted(ours, key=lambda job: job.submitted)]
    except SlurmError as error:
        return [f"Slurm does not answer: {printable(error.cause)}"]
    return in_columns(rows) or ["Slurm has no job of vlmflow"]


def _places() -> dict[str, tuple[str, str]]:
    """Return when Slurm expects each job of this user to start, as Slurm writes it, and the job's folder, by id."""
    said = ask("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%S|%Z")
    found = (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {job.strip(): (start, where) for job, start, where in found}


def _row(job: QueuedJob, start: str, where: str, folder: Path) -> list[str]:
    state = STATES.get(job.state, job.state.lower())
    rule, _, wildcards = job.name.partition(":")
    if job.where:
        age = clock(job.used)
        detail = _progress(job.id)
    else:
        submitted = _time(job.submitted)
        age = clock((datetime.now() - submitted).total_seconds()) if submitted else "-"
        detail = explain(job.reason)
        expected = _time(start)
        if expected and starts_by_itself(job.reason):
            detail += f"; Slurm expects to start it at {expected:%Y-%m-%d %H:%M}"
    if where and Path(where) != folder.resolve():
        detail = f"in {where}: {detail}" if detail else f"in {where}"
    cells = [f"{rule} {wildcards}".strip(), state, age, job.where or "-", job.id, detail]
    return list(map(printable, cells))


def _time(text: str) -> datetime | None:
    """Read a time of Slurm, which is this machine's, without a zone; None for N/A."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _progress(job: str) -> str:
    """Return the newest line of progress in the log of a job; "" if there is none yet, or the job has ended."""
    try:
        shown = ask("scontrol", "show", "job", job)
    except SlurmError as error:
        if error.outage:
            raise
        return ""
    log = re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE)
    return newest_progress(last_lines(Path(log[1]))) if log else ""
