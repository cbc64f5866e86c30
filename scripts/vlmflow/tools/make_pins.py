"""Fills in the table of pins with the hub's values; never overwrites a value.

Fill in the empty values of pins.yaml: ask the hub for commit, size and digest of every row.
"""

import difflib
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.tables import Pin, read_pins, write_pins
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch import hub
from vlmflow.fetch.from_hub import bring, model_files
from vlmflow.fetch.hub import HubFile
from vlmflow.fetch.placed import FileRecord, digest_of
from vlmflow.harness.stage import run_stage

logger = logging.getLogger(__name__)


def fill_in(pins: Mapping[str, Pin]) -> tuple[dict[str, Pin], list[VlmflowError]]:
    """Return the table with the empty values of every row filled in, and the failures.

    A failed row stays as it is. Changes are logged.
    """
    filled, hindrances = {}, []
    # All in parallel: if the hub does not answer, the retries of the rows do not add up.
    with ThreadPoolExecutor(len(pins) or 1) as pool:
        running = {address: pool.submit(_filled, address, pin) for address, pin in pins.items()}
    for address, done in running.items():
        try:
            filled[address] = done.result()
        except VlmflowError as error:
            filled[address] = pins[address]
            hindrances.append(error)
            continue
        before, after = pins[address].model_dump(), filled[address].model_dump()
        changes = [f"{key} {value}" for key, value in after.items() if value != before[key]]
        logger.info("%s: %s", address, ", ".join(changes) or "unchanged")
    return filled, hindrances


def _filled(address: str, pin: Pin) -> Pin:
    source = parse_source(address)
    assert isinstance(source, HubSource), "read_pins refuses what is not on the hub"
    revision, files = _files_of(source, pin.revision)
    sha256 = _sha256_of(files)
    filled = Pin(
        revision=revision,
        size=sum(file.size for file in files),
        sha256=digest_of({file.path: FileRecord(bytes=file.size, sha256=sha256[file.path]) for file in files})
        if source.path is None
        else sha256[source.path],
    )
    for key, value in filled.model_dump().items():
        pinned = getattr(pin, key)
        # An empty revision means that the pin is being updated; its other values belong to the old revision.
        if pin.revision and pinned not in (None, value):
            raise VlmflowError(
                f"{address}: {key} is {value} on the hub, {pinned} in the table",
                "find out why before you use it; to accept the hub's value, empty its three values in pins.yaml "
                "and run `vlmflow pins` again",
            )
    return filled


def _files_of(source: HubSource, revision: str | None) -> tuple[str, list[HubFile]]:
    commit, files = hub.describe(source, revision)
    if source.path is None:
        return commit, model_files(source, commit)[0]
    wanted = [file for file in files if file.path == source.path]
    if not wanted:
        names = [file.path for file in files]
        nearest = difflib.get_close_matches(source.path, names, n=10, cutoff=0.3) or names[:10]
        raise VlmflowError(
            f"{source}: no such file at {commit}; the repository has {', '.join(nearest)}",
            "write the right name in pins.yaml and in the configuration",
        )
    return commit, wanted


def _sha256_of(files: list[HubFile]) -> dict[str, str]:
    """Return the SHA-256 by name; files outside LFS are fetched for it, since the hub does not report theirs."""
    with TemporaryDirectory() as folder:
        small = {Path(folder, file.path): file for file in files if not file.sha256}
        received = bring(small, "reading files outside LFS", threads=4) if small else {}
        return {file.path: file.sha256 or received[Path(folder, file.path)] for file in files}


def main(*, pins: Path = Path("pins.yaml")) -> None:
    """Rewrite the table for review; a failed row does not prevent the others.

    pins: the table.

    Raises VlmflowError with all failures, after the table is written.
    """
    filled, hindrances = fill_in(read_pins(pins))
    write_pins(pins, filled)
    if hindrances:
        raise VlmflowError(
            "\n".join(error.cause for error in hindrances),
            "; ".join(dict.fromkeys(error.next_step for error in hindrances)),
        )


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
