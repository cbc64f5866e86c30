"""Check configuration files over config.yaml without Snakemake; print each fault on a line, or the configured runs."""

import argparse
import sys
from pathlib import Path

from vlmflow.config.model import CONFIG, errors_in_words, settings_of
from vlmflow.config.tables import read_sources
from vlmflow.config.yaml_file import read_layers


def main(files: list[Path], only_yaml: bool) -> None:
    """Print what the files configure; with `only_yaml` just read them, since more of a call may complete them.

    Raises VlmflowError with a line per fault: file, line and column, or key and value, and what is allowed.
    """
    if only_yaml:
        read_layers(files)
        return
    settings = settings_of(files)
    read_sources(settings.picture_sources)
    for line in settings.former_names:
        print(line, file=sys.stderr)
    runs = [run for run in read_layers(files).get("runs") or {} if run in settings.runs] or list(settings.runs)
    for name in dict.fromkeys(settings.runs[run].model for run in runs):
        if note := settings.models[name].untested:
            print(f"models.{name}.{note}", file=sys.stderr)
    print(f"{', '.join(map(str, files)) or CONFIG}: no errors; runs: {', '.join(runs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="as for snakemake's --configfile; later files take precedence"
    )
    parser.add_argument("--only-yaml", action="store_true", help="check only that each file is YAML with keys")
    with errors_in_words():
        main(**vars(parser.parse_args()))
