"""A whole archive brought to the disk: resumed after a break or a kill, checked, and only then named."""

import hashlib
import logging
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, unfinished
from vlmflow.web.remote_file import RemoteFile

logger = logging.getLogger(__name__)


def fetch_archive(remote: RemoteFile, target: Path, digests: dict[str, str | None]) -> None:
    """Bring an archive to `target`; the caller alone writes there.

    remote: is open. target: holds the archive's version in its name; a file that is there is taken as it is.
    digests: by algorithm (md5, sha256) what the archive's must be; None where it is not known.

    Raises VlmflowError where it does not fit on the disk, or has other digests; what `RemoteFile.stream` raises.
    """
    if target.is_file() and target.stat().st_size == remote.length:
        return
    part = unfinished(target)
    with part.open("ab") as file:
        if file.tell() > remote.length or not remote.takes_ranges:
            file.truncate(0)
        require_free_disk(target.parent, remote.length - file.tell(), remote.name)
        if file.tell():
            logger.info("%s: going on at byte %s of %s", remote.name, f"{file.tell():,}", f"{remote.length:,}")
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
                f"{remote.name}: the {algorithm} of what was received is {found}, it must be {wanted}",
                "something on the way alters it, or its owner changed it: find out which before you use it",
            )
    part.replace(target)
