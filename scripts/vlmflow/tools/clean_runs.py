"""Lists what a working directory no longer needs, with sizes; asks; deletes it.

Never listed: the adapter, the run folder, verified/RUN and merged/RUN of a finished run; any training of an unfinished
run; fetched pictures; stores outside of the working directory, and what a link leads to. A store inside it is assumed
to belong to this directory alone. Models, rows and pictures are listed only with a configuration, which shows which of
them are still in use.
"""

import os
import sys
from pathlib import Path

from vlmflow.config.model import Config, settings_of
from vlmflow.config.tables import PINS, read_pins
from vlmflow.core.account import RECORDS, RECORDS_FOLDER
from vlmflow.core.files import remove
from vlmflow.core.progress import agrees, amount
from vlmflow.harness import patches
from vlmflow.leftovers import Leftover, find_leftovers, size_of
from vlmflow.supervisor.run_folder import RunFolder


def main(files: list[Path], folder: Path, yes: bool) -> None:
    """List, ask and delete.

    files: as for snakemake's --configfile. folder: the working directory. yes: delete without asking.

    Raises VlmflowError if Snakemake is running there, a trainer holds a run folder, or a store is inside another one.
    """
    settings = settings_of(files)
    os.chdir(folder)
    with patches.alone():
        _clean(settings, yes, stores=bool(files))


def _clean(settings: Config, yes: bool, stores: bool) -> None:
    os.environ.setdefault(RECORDS, str(Path(settings.stores.pictures).absolute() / RECORDS_FOLDER))
    leftovers, notes = find_leftovers(Path(), settings, read_pins(PINS), stores)
    sizes = {leftover.path: size_of(leftover.path) for leftover in leftovers}
    for leftover in leftovers:
        print(f"{amount(sizes[leftover.path], 'bytes'):>12}  {leftover.path}\n{'':>14}{leftover.why}")
    for note in notes:
        print(f"not deleted: {note}")
    if not leftovers:
        return print("nothing to delete")
    print(f"total: {len(leftovers)}, {amount(sum(sizes.values()), 'bytes')}")
    if not yes and not sys.stdin.isatty():
        print("nothing deleted: there is no terminal to ask on; add --yes to delete what is listed")
    elif yes or agrees("Delete all of it?"):  # the answer may take an hour: that is why the directory stays locked
        for leftover in leftovers:
            _delete(leftover)
        print("deleted")
    else:
        print("nothing deleted")


def _delete(leftover: Leftover) -> None:
    if leftover.is_run_folder:
        with RunFolder(leftover.path).held({}, patience=0):
            pass  # no trainer holds it, on this machine or another one
    remove(leftover.path)
