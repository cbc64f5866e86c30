"""Writes a run's page into its run folder while the training runs."""

import logging
import time

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.files import whole_file
from vlmflow.core.progress import LOG_INTERVAL
from vlmflow.in_trainer.messages import new_events
from vlmflow.reports.run_history import RunHistory
from vlmflow.reports.run_page import live_page
from vlmflow.supervisor.progress import doing
from vlmflow.supervisor.run_folder import RunFolder

log = logging.getLogger("vlmflow")

MOST_TIME = 0.01
"""The share of the time that writing the page may take: a page that takes long is written less often."""


class LivePage:
    """The page of one training; `refresh` is its onlooker (`supervisor.watch`).

    run: the run's name. stage: "smoke" or "full". settings: the training's. every: seconds between two pages.
    """

    def __init__(self, run: str, stage: str, settings: TrainSettings, every: float = LOG_INTERVAL) -> None:
        self._run, self._stage, self._settings, self._every = run, stage, settings, every
        self._history = RunHistory()
        self._read = 0
        self._sessions: int | None = None
        self._due = 0.0
        self._failed = False

    def refresh(self, folder: RunFolder, runs: bool) -> None:
        """Write the page, if it is time to, or the trainers ended (runs is False).

        A page that cannot be made or written is reported once, as a warning; it ends no training.
        """
        begun = time.monotonic()
        if runs and begun < self._due:
            return
        try:
            self._write(folder, runs)
        except Exception as error:
            if not self._failed:
                log.warning(f"{folder.page} cannot be written, the training goes on: {type(error).__name__}: {error}")
            self._failed = True
        self._due = time.monotonic() + max(self._every, (time.monotonic() - begun) / MOST_TIME)

    def _write(self, folder: RunFolder, runs: bool) -> None:
        self._take_new_events(folder)
        newest = self._history.newest
        if self._sessions is None:
            self._sessions = newest.sessions
        now = doing(newest, self._settings, folder.output, runs, begun=newest.sessions > self._sessions)
        if not runs:
            self._sessions = None
        written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        with whole_file(folder.page, "w") as file:
            file.write(live_page(self._run, self._stage, self._history, now, written, max(1, round(self._every))))

    def _take_new_events(self, folder: RunFolder) -> None:
        """Read what the trainers have written since the last page: the file of a long training is large."""
        if not folder.progress.exists():
            return
        with folder.progress.open("rb") as lines:
            lines.seek(self._read)
            for event in new_events(lines):
                self._history.take(event)
            self._read = lines.tell()
