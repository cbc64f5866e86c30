"""Refuses a folder for temporary files whose path is too long for sockets in it."""

import tempfile

from vlmflow.core.errors import VlmflowError

TRAINING = ("train_smoke", "train_model", "trial")
"""The rules that start trainers, whose sockets are there; other stages have none."""

LONGEST = 107 - len("/torch-shm-dir-XXXXXX/manager.sock")
"""Bytes of the folder's path. A socket's may have 107 (unix(7)), and this name is the longest that is put there, of
PyTorch; that of Python's multiprocessing has 32 bytes."""


def refuse_long_temporary_folder() -> None:
    """Raise VlmflowError if the trainers' sockets would not fit in the folder for temporary files (TMPDIR)."""
    folder = tempfile.gettempdir()
    if len(folder.encode(errors="surrogateescape")) > LONGEST:
        raise VlmflowError(
            f"TMPDIR: {folder} has more than {LONGEST} bytes: trainers and other processes could make no sockets there",
            "name a folder with a shorter path, on a disk with free space: export TMPDIR=/tmp",
        )
