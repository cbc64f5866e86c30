"""What the command lines of tools have in common: configuration, working directory, and how an error ends them."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmflow import CHECKOUT
from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import printable_lines

CONFIG = CHECKOUT / "config.yaml"


def tool_parser(text: str | None, *, run: str | None = None, configured: bool = True) -> argparse.ArgumentParser:
    """Return a parser of a tool's command line, with --directory.

    text: the tool's docstring. run: the folder or key under which the run stands that --run names; None: no --run.
    configured: whether it takes --configfile (`settings_of`).
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if run:
        parser.add_argument("--run", required=True, help=f"its name under {run}")
    if configured:
        words = "as for snakemake; later files take precedence"
        parser.add_argument("--configfile", nargs="+", type=Path, default=[], metavar="FILE", help=words)
    parser.add_argument("--directory", type=Path, default=Path(), help="the working directory, as for snakemake")
    return parser


def settings_of(files: list[Path]) -> Config:
    """Return the configuration of config.yaml and `files`, of which later ones take precedence.

    Raises VlmflowError with a line per fault: file, line and column, or key and value, and what is allowed.
    """
    return check_config(read_layers([CONFIG, *files]), [CONFIG, *files])


@contextmanager
def errors_in_words(interrupted: int = 130) -> Iterator[None]:
    """End the process with the cause and the next step of an error that is not a bug, and on Ctrl-C without words.

    interrupted: the exit code after Ctrl-C; 0 for what nothing else ends.
    """
    try:
        yield
    except KeyboardInterrupt:
        print()
        sys.exit(interrupted)
    except VlmflowError as error:
        sys.exit(printable_lines(str(error)))
