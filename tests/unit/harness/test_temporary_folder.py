"""The longest folder for temporary files in which sockets can be made."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.harness.stage import LONGEST, refuse_long_temporary_folder


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The longest folder that is allowed, and one whose path has a byte more; each has a longer letter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        made = [Path(short, "x" * (length - len(short) - 3) + "é") for length in (LONGEST, LONGEST + 1)]
        for folder in made:
            (folder / "torch-shm-dir-XXXXXX").mkdir(parents=True)
        yield made


def test_the_longest_is_that_in_which_a_socket_still_fits(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, error in zip(folders, (None, VlmflowError), strict=True):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        place = str(folder / "torch-shm-dir-XXXXXX" / "manager.sock")
        with socket.socket(socket.AF_UNIX) as end:
            if error is None:
                refuse_long_temporary_folder()
                end.bind(place)
            else:
                with pytest.raises(error, match="73 bytes"):
                    refuse_long_temporary_folder()
                with pytest.raises(OSError, match="path too long"):
                    end.bind(place)
