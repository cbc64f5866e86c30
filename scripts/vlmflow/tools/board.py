"""TensorBoard over all trainings of a working directory, on this machine alone, until Ctrl-C.

A training is named RUN/smoke or RUN/full; one with earlier data or settings has its digest behind the name. New ones
appear by themselves.
"""

import tempfile
import time
from pathlib import Path

from vlmflow.config.model import settings_of
from vlmflow.core.errors import VlmflowError
from vlmflow.track.send import EventFolders

RELOAD = 5
"""Seconds between two looks at the files."""


def main(files: list[Path], folder: Path, port: int) -> None:
    """Serve until Ctrl-C.

    files: as for snakemake's --configfile. folder: the working directory. port: on the loopback address; 0: a free one.

    Raises VlmflowError if the folder with the trainings does not exist, or the port is in use.
    """
    store = folder / settings_of(files).stores.runs
    if not store.is_dir():
        raise VlmflowError(
            f"no training has begun: {store.absolute()} does not exist",
            "name your configuration and the working directory: vlmflow board my-run.yaml --directory …",
        )
    with tempfile.TemporaryDirectory(prefix="vlmflow-board-") as links:
        trainings = EventFolders(store, Path(links))
        _say(trainings.update())
        print(f"TensorBoard: {_serve(links, port)} (Ctrl-C ends it)", flush=True)
        while True:
            time.sleep(RELOAD)
            _say(trainings.update())


def _serve(links: str, port: int) -> str:
    """Start TensorBoard in a thread of this process; return its address."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(logdir=links, host="127.0.0.1", port=port, reload_interval=RELOAD)
    try:
        address: str = board.launch()
    except program.TensorBoardServerException as error:
        raise VlmflowError(f"TensorBoard: {error.msg}", "choose another --port, or none for a free one") from None
    return address


def _say(names: list[str]) -> None:
    for name in names:
        print(f"  {name}", flush=True)
