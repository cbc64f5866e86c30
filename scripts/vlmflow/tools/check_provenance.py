"""Published weights against everything they were made of, as far as it is there.

Each link of the chain from the raw files to the weights is ok, not here, or DIFFERS with file, expected and found
digest.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from vlmflow.core.errors import printable
from vlmflow.reports.chain import Link, check_chain

NAMED = 10
"""Differing files that are printed for a link, at most, and missing ones."""


def main(folder: Path, directory: Path | None, as_json: bool = False) -> bool:
    """Print the chain of a published folder; return whether nothing differs.

    directory: the working directory; None: that of FOLDER, if it is DIRECTORY/merged/RUN. as_json: print
    one JSON text at the end.
    """
    if directory is None and folder.absolute().parent.name == "merged":
        directory = folder.absolute().parents[1]
    links = []
    for link in check_chain(folder, directory, len(os.sched_getaffinity(0))):
        links.append(link)
        if not as_json:
            print("\n".join(map(printable, lines_of(link))), flush=True)
    good = not any(link.differences for link in links)
    if as_json:
        print(json.dumps({"good": good, "links": [asdict(link) for link in links]}, indent=1))
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
