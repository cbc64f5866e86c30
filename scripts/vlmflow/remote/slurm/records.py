"""Records, in the working directory, of which job of Slurm makes which stage: whoever calls, and whatever squeue shows.

A record is written before its job is submitted, so that a second person, or a call on another login node, submits no
second job for an output.
"""

import fcntl
import os
import platform
import pwd
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vlmflow.remote.library import VlmflowError
from vlmflow.remote.slurm import queue

FRESH = 600.0
"""Seconds for which a record without a job's number counts as a submission that goes on; it is renewed meanwhile."""


class Record(msgspec.Struct, frozen=True):
    """Which job makes a stage.

    job: its number, "" until Slurm gave one. comment: the job's. by: the user's name. host, process: of the call.
    """

    job: str
    comment: str
    by: str
    host: str
    process: int


class Records:
    """The records below a folder, which all nodes share: a file for each stage, named by the stage's digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self, comment: str) -> Record | None:
        """Claim the stages of a job that is about to be submitted; or return the record of this user's job for one.

        comment: that of the job, whose last words are the stages (`request.comment_of`).

        Raises VlmflowError if a job of somebody else, or a call that still submits, makes one of them, or if Slurm does
        not say whether it does.
        """
        stages = comment.split()[3:]
        with self._alone():
            for stage in stages:
                if record := self._active(stage):
                    return record
            self._write(stages, _record("", comment))
        return None

    def submitted(self, comment: str, job: str) -> None:
        """Note the job that makes the stages. job: its number; "" if it is not known yet, after another try."""
        with self._alone():
            self._write(comment.split()[3:], _record(job, comment))

    def ended(self, comment: str) -> None:
        """Remove this call's records of a job that has ended, or was not submitted; another call's stay."""
        own = _record("", comment)
        with self._alone():
            for stage in comment.split()[3:]:
                record = self._read(stage)
                if record and (record.host, record.process) == (own.host, own.process):
                    (self._folder / stage).unlink()

    def _active(self, stage: str) -> Record | None:
        """Return the record of this user's job that makes a stage; None if nothing does."""
        file = self._folder / stage
        if (record := self._read(stage)) is None:
            return None
        if not record.job:
            age = time.time() - file.stat().st_mtime
            ended = record.host == platform.node() and not Path(f"/proc/{record.process}").exists()
            if age < FRESH and not ended:
                raise VlmflowError(
                    f"{record.by} submits this stage now, on {record.host} ({file})",
                    "wait until that call ends; if there is none any more, remove this file",
                )
            return None
        if queue.state_of(record.job) not in queue.ACTIVE:
            return None
        if record.by != _me():
            raise VlmflowError(
                f"job {record.job} of {record.by} makes this stage in this folder",
                f"wait until it ends, or let {record.by} end it: scancel {record.job}",
            )
        return record

    def _read(self, stage: str) -> Record | None:
        """Return a stage's record; None if there is none, or a full disk cut it: then no job was submitted."""
        try:
            return msgspec.json.decode((self._folder / stage).read_bytes(), type=Record)
        except (OSError, ValueError):
            return None

    def _write(self, stages: Sequence[str], record: Record) -> None:
        for stage in stages:
            made = self._folder / f"{stage}.{os.getpid()}"
            made.write_bytes(msgspec.json.encode(record))
            made.replace(self._folder / stage)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        file = self._folder / "lock"
        if not file.exists():  # for everybody who may write into the working directory
            self._folder.mkdir(exist_ok=True)
            self._folder.chmod(self._folder.parent.stat().st_mode & 0o7777)
            file.touch()
            file.chmod(0o666)
        with file.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _record(job: str, comment: str) -> Record:
    return Record(job, comment, _me(), platform.node(), os.getpid())


def _me() -> str:
    """Return this user's name, whatever the shell says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
