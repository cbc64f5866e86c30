"""One link of the chain of digests from raw files to published weights: recorded files, and what is there of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.core.integrity import read_files


@dataclass(frozen=True)
class Difference:
    """A file that is not as recorded. found: its SHA-256, or what is wrong with it."""

    file: str
    expected: str
    found: str


@dataclass(frozen=True)
class Link:
    """One link of the chain. name: for people. detail: what was compared, or where it should be.

    here: whether there was something to compare. differences: [] if all of it is as recorded. missing: names of
    recorded files that are not here.
    """

    name: str
    detail: str
    here: bool
    differences: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether every recorded file is here and as recorded."""
        return self.here and not self.differences and not self.missing


def compared(name: str, folder: Path, digests: Mapping[str, str]) -> Link:
    """Read files of a folder and compare them. name: the link's. digests: SHA-256 by the files' names in the folder.

    Raises PassingError if a file cannot be read.
    """
    found = read_files(f"reading {name}", "files", folder, sorted(digests))
    differences = [
        Difference(str(folder / file), digests[file], seen.sha256)
        for file, seen in found.items()
        if seen.sha256 != digests[file]
    ]
    missing = [str(folder / file) for file in sorted(digests) if file not in found]
    return Link(
        name, f"{len(found)} of {len(digests)} files" if found else str(folder), bool(found), differences, missing
    )
