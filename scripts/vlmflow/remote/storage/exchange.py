"""Exchanges two names in one system call."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


class ExchangeNotSupportedError(Exception):
    """The file system or the operating system cannot exchange two names: NFS, CephFS and macOS cannot."""


def exchange(one: Path, other: Path) -> None:
    """Give each of two files or folders the other's name; both exist at every moment (renameat2(2)).

    Raises OSError if that fails, with nothing changed: ENOENT if one does not exist. Raises ExchangeNotSupportedError
    if it is not possible here.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise ExchangeNotSupportedError
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in _NOT_SUPPORTED:
            raise ExchangeNotSupportedError
        raise OSError(number, os.strerror(number), str(one), None, str(other))
