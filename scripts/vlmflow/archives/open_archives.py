"""Opens the archives of a source, on any server or on the hub at their pinned commit, and downloads whole ones."""

import fnmatch
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from vlmflow.config.picture_sources import PictureSource
from vlmflow.config.pins import Pin, pin_of
from vlmflow.config.source import HubSource, parse_source
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, unfinished
from vlmflow.fetch.from_hub import pinned_revision, require_pinned
from vlmflow.web import hub
from vlmflow.web.hub import HubFile
from vlmflow.web.remote_file import RemoteFile
from vlmflow.web.transport import Transport

Digests = dict[str, str | None]
"""The expected digests of an archive by algorithm (md5, sha256); None if unknown."""

logger = logging.getLogger(__name__)


def require_pins(sources: Mapping[str, PictureSource], pins: Mapping[str, Pin]) -> None:
    """Raise VlmflowError for the first archive on the hub without a commit in pins.yaml."""
    for source in sources.values():
        if source.archive and (address := _on_hub(source.archive)):
            pinned_revision(address, pin_of(source.archive, pins))


def open_archives(
    source: PictureSource, pins: Mapping[str, Pin], transport: Transport
) -> list[tuple[RemoteFile, Digests]]:
    """Return the files of a source's archive, open for reading, with their digests.

    This is one file, unless an address on the hub names several parquet files by `*`.
    Raises Refused if the server refuses one, VlmflowError if one is not pinned or the server fails too often.
    """
    archive = source.archive
    assert archive is not None, "a source without an archive is fetched one by one"
    address = _on_hub(archive)
    found: list[tuple[RemoteFile, Digests]]
    if address is None:
        remote = RemoteFile(archive, lambda: archive, transport, source.size)
        found = [(remote, {"md5": source.md5})]
    else:
        pin = pin_of(archive, pins)
        revision = pinned_revision(address, pin)
        assert pin is not None, "pinned_revision refuses what has no pin"
        found = [
            (_hub_file(file, transport), {"sha256": file.sha256, "md5": source.md5})
            for file in _hub_files(address, pin, revision)
        ]
    for remote, _ in found:
        remote.open()
    return found


def name_on_disk(remote: RemoteFile, folder: Path) -> Path:
    """Return the file for an archive in its source's folder; each version has another name."""
    version = "".join(letter for letter in remote.version if letter.isalnum())[:40]
    return folder / f"{version}-{remote.size}-{remote.name.rpartition('/')[2]}"


def fetch_archive(remote: RemoteFile, target: Path, digests: Digests) -> None:
    """Download an archive to `target`, which gets its name only once it is checked; resumes after a break or a kill.

    remote: must be open. target: its name includes the archive's version; an existing file of the right size is kept.
    Only the caller writes there.

    Raises VlmflowError if it does not fit on the disk, or a digest differs; what `RemoteFile.stream` raises.
    """
    if target.is_file() and target.stat().st_size == remote.length:
        return
    part = unfinished(target)
    with part.open("ab") as file:
        if file.tell() > remote.length or not remote.takes_ranges:
            file.truncate(0)
        require_free_disk(target.parent, remote.length - file.tell(), remote.name)
        if file.tell():
            logger.info("%s: resuming at byte %s of %s", remote.name, f"{file.tell():,}", f"{remote.length:,}")
        if file.tell() < remote.length:
            remote.stream(file.tell(), remote.length, file.write, lambda: file.truncate(0))
        file.flush()
    for algorithm, wanted in digests.items():
        if wanted is None:
            continue
        with part.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != wanted:
            part.unlink()
            raise VlmflowError(
                f"{remote.name}: the received file has {algorithm} {found}, expected {wanted}",
                "something on the way changes it, or its owner changed it: find out which before you use it",
            )
    part.replace(target)


def _on_hub(archive: str) -> HubSource | None:
    if not archive.startswith("hf://"):
        return None
    source = parse_source(archive)
    if isinstance(source, Path) or source.path is None:
        raise VlmflowError(f"{archive} is a model, not a data set's file", "use hf://datasets/OWNER/NAME/FILE")
    return source


def _hub_files(source: HubSource, pin: Pin, revision: str) -> list[HubFile]:
    _, files = hub.describe(source, revision)
    files = [file for file in files if fnmatch.fnmatchcase(file.path, source.path or "")]
    if not files:
        raise VlmflowError(f"{source}: there is no such file at {revision}", "check it in picture_sources.yaml")
    require_pinned(source, pin, size=sum(file.size for file in files))
    if len(files) == 1:
        require_pinned(source, pin, sha256=files[0].sha256)
    return files


def _hub_file(file: HubFile, transport: Transport) -> RemoteFile:
    return RemoteFile(
        str(file), lambda: hub.look_up(file.source, file.revision, file.path)[1], transport, file.size, file.etag
    )
