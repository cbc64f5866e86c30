import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drawn_pictures import drawn, encoded, put
from vlmflow.core.files import unfinished
from workflow_runs import ROOT

SCRIPT = ROOT / "scripts/stages/resolve_images.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write 120 pictures, half of them to be rewritten, and two splits that name them."""
    names = [f"chartqa/{number}.png" for number in range(120)]
    for number, name in enumerate(names):
        image = drawn(300 + number, 300)
        put(
            tmp_path / "root" / name,
            encoded(image.convert("RGBA") if number % 2 else image, "PNG", compress_level=1),
        )
    for split, first in (("train", 0), ("test", 40)):
        rows = [{"image": name} for name in [*names[first:], "chartqa/gone.png"]]
        put(tmp_path / f"{split}.json", json.dumps(rows).encode())
    return tmp_path


def command(data: Path, split: str, out: str, roots: str | None = None) -> list[str]:
    values = {
        "raw": data / f"{split}.json",
        "manifest": data / out / f"images/{split}.jsonl",
        "dataset": "fire",
        "roots": roots or json.dumps([str(data / "root")]),
        "store": data / out / "pictures",
        "limits": "{}",
        "threads": 2,
    }
    return [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in values.items())]


def everything(folder: Path) -> dict[str, str | bytes]:
    """Return the content of a folder: links with their targets, files with their bytes."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


def test_a_split_is_resolved_from_a_shell(data: Path):
    """The log is on standard error, and not what libtiff says there of a picture that it decodes all the same."""
    fax = bytearray(encoded(drawn().convert("1"), "TIFF", compression="group4"))
    fax[len(fax) // 2 : len(fax) // 2 + 20] = b"\x37" * 20
    put(data / "root/fax.tif", bytes(fax))
    rows = json.loads((data / "train.json").read_bytes())
    put(data / "train.json", json.dumps([{"image": "fax.tif"}, *rows]).encode())
    done = subprocess.run(command(data, "train", "out"), capture_output=True, text=True, check=True)
    assert "122 pictures named, 121 usable, of which 60 rewritten" in done.stderr
    assert "Fax4Decode" not in done.stderr
    assert "missing, of source chartqa: 1 picture, 1 row" in done.stderr
    assert "pictures/s" in done.stderr
    again = everything(data / "out")
    subprocess.run(command(data, "train", "out"), capture_output=True, check=True)
    assert everything(data / "out") == again


def test_killed_in_the_middle_and_started_again(data: Path):
    """SIGKILL at several moments; an incomplete state never counts as a result, and the final result is the same."""
    subprocess.run(command(data, "train", "whole"), capture_output=True, check=True)
    (last,) = (data / "whole/pictures").rglob("119.png*")
    part = unfinished(data / "out/pictures/.rewritten" / last.resolve().name)
    part.parent.mkdir(parents=True)
    with part.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # like another run at the last copy: none ends before its kill
        for copies in (1, 20, 50):
            run = subprocess.Popen(command(data, "train", "out"), stderr=subprocess.DEVNULL)
            wait_for_copies(part.parent, copies, run)
            run.send_signal(signal.SIGKILL)
            run.wait()
            assert not (data / "out/images/train.jsonl").exists()
    subprocess.run(command(data, "train", "out"), capture_output=True, check=True)
    assert everything(data / "out") == everything(data / "whole")


def wait_for_copies(folder: Path, copies: int, run: subprocess.Popen) -> None:
    while len(list(folder.glob("*.png"))) < copies:
        assert run.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)


def test_train_and_test_are_resolved_at_the_same_time(data: Path):
    runs = [subprocess.Popen(command(data, split, "out"), stderr=subprocess.DEVNULL) for split in ("train", "test")]
    assert [run.wait() for run in runs] == [0, 0]
    for split in ("train", "test"):
        subprocess.run(command(data, split, "apart"), capture_output=True, check=True)
    assert everything(data / "out") == everything(data / "apart")


def test_a_missing_root_is_named_with_its_key(data: Path):
    done = subprocess.run(
        command(data, "train", "out", roots='["/nowhere"]'), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "datasets.fire.image_roots: /nowhere: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
