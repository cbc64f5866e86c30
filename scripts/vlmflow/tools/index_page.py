"""The index of a working directory, reports/index.html: all runs, with what each has made and its pages."""

import time
from pathlib import Path

from vlmflow.config.model import settings_of
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.core.files import write_text
from vlmflow.reports.former_trainings import to_train
from vlmflow.reports.overview import index_page


def main(files: list[Path], folder: Path) -> Path:
    """Write the page, and return its place.

    files: as for snakemake's --configfile; the runs that they name are listed also before they have begun.
    folder: the working directory.

    Raises VlmflowError if the configuration is refused, or the folder does not exist.
    """
    if not folder.is_dir():
        raise VlmflowError(f"{folder} is not a folder", "name the working directory by --directory")
    settings = settings_of(files)
    named = read_layers(files).get("runs", {})
    configured = {
        name: to_train(settings.models[run.model].source, run.dataset, run)
        for name, run in settings.runs.items()
        if name in named
    }
    page = folder / "reports" / "index.html"
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    html, runs = index_page(folder, folder / settings.stores.runs, page, configured, now)
    write_text(page, html)
    none = "; name the working directory by --directory" if not runs else ""
    print(f"{page}: {counted(runs, 'run')}{none}")
    return page
