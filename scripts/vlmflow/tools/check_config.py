"""Checks configuration files over config.yaml without Snakemake: every fault in a line, or the configured runs."""

import json
import sys
from pathlib import Path

from vlmflow.config.model import settings_of
from vlmflow.config.tables import read_sources
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError


def main(files: list[Path], as_json: bool = False) -> None:
    """Print what the files configure.

    as_json: print `runs`, `notes` and `errors` (each with `cause` and `next_step`) as JSON, and end with 1 after an
    error.

    Raises VlmflowError with a line per fault: file, line and column, or key and value, and what is allowed.
    """
    runs: list[str] = []
    notes: list[str] = []
    errors: list[dict[str, str]] = []
    try:
        settings = settings_of(files)
        read_sources(settings.picture_sources)
        runs = [run for run in read_layers(files).get("runs") or {} if run in settings.runs] or list(settings.runs)
        models = {name: settings.models[name] for name in dict.fromkeys(settings.runs[run].model for run in runs)}
        untested = [f"models.{name}.{model.untested}" for name, model in models.items() if model.untested]
        notes = [*settings.former_names, *untested]
    except VlmflowError as error:
        if not as_json:
            raise
        errors = [{"cause": error.cause, "next_step": error.next_step}]
    if as_json:
        print(json.dumps({"runs": runs, "notes": notes, "errors": errors}, indent=1))
        sys.exit(bool(errors))
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{', '.join(map(str, files))}: no errors; runs: {', '.join(runs)}")
