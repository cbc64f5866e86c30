"""TensorBoard's event files of all trainings, under readable names."""

from pathlib import Path

EVENTS = "*.tfevents.*"
"""The files that transformers writes for TensorBoard, in `checkpoints/runs` of a run folder."""


class EventFolders:
    """A folder of links, one for each training: TensorBoard shows their names.

    The newest training of a stage is RUN/smoke or RUN/full, any other one RUN/STAGE-DIGEST, with the name of its run
    folder. A training keeps its name: TensorBoard would mix the figures of two.
    """

    def __init__(self, store: Path, links: Path) -> None:
        """Describe the links. store: the folder of all run folders (stores.runs). links: an empty folder for them."""
        self._store, self._links = store.absolute(), links
        self._named: dict[Path, Path] = {}

    def update(self) -> list[str]:
        """Make the missing links, remove those of deleted trainings; return the names of the new ones, sorted."""
        for folder, link in list(self._named.items()):
            if not folder.is_dir():
                link.unlink()
                del self._named[folder]
        new = [folder for folder in self._with_events() if folder not in self._named]
        return sorted(self._link(folder) for folder in sorted(new, key=_newest, reverse=True))

    def _with_events(self) -> list[Path]:
        folders = self._store.glob("*/*/*/checkpoints/runs")
        return [folder for folder in folders if folder.parts[-4] in ("smoke", "full") and any(folder.glob(EVENTS))]

    def _link(self, folder: Path) -> str:
        run, stage, digest = folder.parts[-5:-2]
        link = self._links / run / stage
        if link.is_symlink():
            link = self._links / run / f"{stage}-{digest}"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(folder)
        self._named[folder] = link
        return link.relative_to(self._links).as_posix()


def _newest(folder: Path) -> float:
    """Return when the newest event file was last written."""
    return max((file.stat().st_mtime for file in folder.glob(EVENTS)), default=0.0)
