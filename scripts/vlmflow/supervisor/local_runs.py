"""The trainings that run on this machine, from their run folders."""

import socket
from dataclasses import dataclass
from pathlib import Path

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.in_trainer.events import new_events
from vlmflow.supervisor.doing import Doing, doing
from vlmflow.supervisor.newest import Newest, report_line
from vlmflow.supervisor.run_folder import JOB, RunFolder


@dataclass(frozen=True)
class LocalRun:
    """One training. stage: "smoke" or "full". holder: its process. since: when that began, in seconds since 1970."""

    run: str
    stage: str
    folder: RunFolder
    holder: str
    since: float
    doing: Doing
    newest: Newest

    @property
    def progress(self) -> str:
        """One line of its newest figures; "" before the first loss."""
        return report_line(self.newest)


def local_runs(store: Path) -> list[LocalRun]:
    """Return the trainings whose run folder a process of this machine holds, by run and stage.

    On file systems whose locks hold between machines, those of others are left out by what is written in the lock.

    store: the folder of all run folders (stores.runs).
    """
    folders = [RunFolder(lock.parent) for lock in sorted(store.glob("*/*/*/lock"))]
    held = [(folder, holder) for folder in folders if (holder := folder.holder()) is not None]
    here = socket.gethostname()
    return [_run_in(folder, holder) for folder, holder in held if holder.partition(" on ")[2] in ("", here)]


def _run_in(folder: RunFolder, holder: str) -> LocalRun:
    run, stage = folder.path.parts[-3:-1]
    since, newest, begun = folder.held_since(), Newest(), False
    if folder.progress.exists():
        with folder.progress.open("rb") as lines:
            newest = Newest.of(new_events(lines))
        # Events older than the holder are those of an earlier session.
        begun = newest.sessions > 0 and folder.progress.stat().st_mtime > since
    settings = _settings(folder)
    if settings:
        now = doing(newest, settings, folder.output, runs=True, begun=begun)
    else:
        now = "training" if begun else "starting"
    return LocalRun(run, stage, folder, holder, since, now, newest)


def _settings(folder: RunFolder) -> TrainSettings | None:
    """Return the training's settings; None if they are not written yet, are damaged, or another version wrote them."""
    try:
        return TrainSettings.model_validate(read_json(folder.path / JOB)["settings"])
    except (VlmflowError, ValueError, KeyError, TypeError, RecursionError):
        return None
