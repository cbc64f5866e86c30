"""Downloads a whole archive: resumes after a break or a kill, and names the file only once it is checked."""

import hashlib
import logging
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, unfinished
from vlmflow.web.remote_file import RemoteFile

logger = logging.getLogger(__name__)


def fetch_archive(remote: RemoteFile, target: Path, digests: dict[str, str | None]) -> None:
    """Download an archive to `target`; only the caller writes there.

    remote: must be open. target: its name includes the archive's version; an existing file of the right size is kept.
    digests: the archive's expected digests by algorithm (md5, sha256); None if unknown.

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
