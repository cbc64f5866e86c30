"""A fetched picture is written without the page cache if possible, and always completely."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmflow.fetch.fetch_pictures import BUFFER_BYTES, write_picture
from vlmflow.fetch.transport import Missing
from workflow_runs import ROOT


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one on a file system that may not support O_DIRECT."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            yield Path(place)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES - 4097])
def test_every_size_is_written_completely(folder: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    assert write_picture(folder / "new" / "a.jpg", content) is None
    assert (folder / "new" / "a.jpg").read_bytes() == content
    assert [file.name for file in (folder / "new").iterdir()] == ["a.jpg"]


def test_the_rest_of_a_killed_fetch_is_overwritten(folder: Path) -> None:
    (folder / "a.jpg.part").write_bytes(b"half of a picture that was longer" * 1_000)
    assert write_picture(folder / "a.jpg", b"picture") is None
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("a.jpg", b"picture")]


def test_a_link_is_not_followed(folder: Path) -> None:
    (folder / "other").write_bytes(b"other")
    (folder / "a.jpg.part").symlink_to(folder / "other")
    with pytest.raises(OSError, match=r"a\.jpg"):
        write_picture(folder / "a.jpg", b"picture")
    assert (folder / "other").read_bytes() == b"other"


def test_a_folder_in_place_of_a_file_is_reported(folder: Path) -> None:
    (folder / "a.jpg").mkdir()
    assert isinstance(write_picture(folder / "a.jpg", b"picture"), Missing)
    (folder / "b.jpg").write_bytes(b"picture")
    assert isinstance(write_picture(folder / "b.jpg" / "c.jpg", b"picture"), Missing)
    assert sorted(file.name for file in folder.iterdir()) == ["a.jpg", "b.jpg"]


WITHOUT_A_WAY_PAST_THE_CACHE = """
import os, sys
from pathlib import Path
from vlmflow.fetch.fetch_pictures import write_picture
folder, content = Path(sys.argv[1]), os.urandom(5_000)
try:
    os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
except OSError as error:
    print(error.strerror)
assert write_picture(folder / "new" / "a.jpg", content) is None
assert (folder / "new" / "a.jpg").read_bytes() == content
print("kept")
"""


def test_a_file_system_without_o_direct_is_written_through_the_cache(tmp_path: Path) -> None:
    """Such as ramfs, in its own mount namespace."""
    mounted = 'mount -t ramfs ramfs "$0" && exec "$@"'
    program = [sys.executable, "-c", WITHOUT_A_WAY_PAST_THE_CACHE, tmp_path]
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", mounted, tmp_path, *program]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "Invalid argument\nkept\n", done.stderr
