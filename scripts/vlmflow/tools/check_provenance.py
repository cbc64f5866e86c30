"""Check published weights against everything they were made of, as far as it is there.

make verify RUN=my-run                                              merged/my-run of this folder
make verify RUN=qwen3vl-fire ARGS="--directory runs/demo"           a run of another working directory
PYTHONPATH=scripts python -m vlmflow.tools.check_provenance FOLDER [--directory RUNS]   a copy, on any machine

One line for each link of the chain from the raw files to the weights: ok, not here, or DIFFERS with file, expected and
found digest. Ends with code 0 only if nothing differs and the weights were there and checked.
"""

import argparse
import os
import sys
from pathlib import Path

from vlmflow.core.errors import VlmflowError, printable, printable_lines
from vlmflow.reports.chain import Link, check_chain
from vlmflow.serving.finished_run import published

NAMED = 10
"""Differing files that are printed for a link, at most, and missing ones."""


def main(folder: Path, directory: Path | None) -> bool:
    """Print the chain of a published folder; return whether nothing differs.

    directory: the working directory; None: that of FOLDER, if it is DIRECTORY/merged/RUN.
    """
    if directory is None and folder.absolute().parent.name == "merged":
        directory = folder.absolute().parents[1]
    good = True
    for link in check_chain(folder, directory, len(os.sched_getaffinity(0))):
        print("\n".join(map(printable, lines_of(link))), flush=True)
        good = good and not link.differences
    return good


def lines_of(link: Link) -> list[str]:
    """Return a link as lines for people."""
    verdict = "DIFFERS" if link.differences else "ok" if link.here else "not here"
    lines = [f"{verdict:<8}  {link.name}: {link.detail}"]
    lines += [
        f"          {difference.file}: expected {difference.expected}, found {difference.actual}"
        for difference in link.differences[:NAMED]
    ]
    if len(link.differences) > NAMED:
        lines.append(f"          and {len(link.differences) - NAMED:,} more")
    if link.here and link.missing:
        lines += [f"          not here: {name}" for name in link.missing[:NAMED]]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("folder", type=Path, nargs="?", help="merged/RUN, or a copy of it")
    which.add_argument("--run", help="a run of the working directory, instead of FOLDER")
    parser.add_argument("--directory", type=Path, help="the working directory, as for snakemake")
    given = parser.parse_args()
    try:
        folder = given.folder or published(given.directory or Path(), given.run)
        sys.exit(0 if main(folder, given.directory) else 1)
    except VlmflowError as error:
        sys.exit(printable(error.cause) + "\n  what to do: " + printable_lines(error.next_step))
