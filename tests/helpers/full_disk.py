"""Train on a disk that fills up; `test_trainer` runs this in its own mount namespace.

unshare --mount --map-root-user python tests/helpers/full_disk.py DEMO_FOLDER
"""

import json
import subprocess
import sys
from pathlib import Path

from workflow_runs import CHECKPOINT_STEPS, RUN, STEPS, command

PAGE = 4096
"""Bytes; tmpfs stores a file in whole pages."""


def main() -> None:
    """Train where there is room for one and a half checkpoints; see it fail; make room, and see it resume."""
    folder = Path(sys.argv[1])
    runs = folder / "stores" / "runs"
    size = room_for_one_and_a_half_checkpoints(runs / RUN / "full")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(runs)], check=True)
    words = command(folder, "--allowed-rules", "train_model", "--", f"checkpoints/{RUN}/full")
    first = subprocess.run(words, capture_output=True, text=True, check=False)
    said = first.stdout + first.stderr
    assert first.returncode == 1, said[-3000:]
    assert "no space left on the disk" in said, said[-3000:]
    assert "free space on the disk of stores.runs" in said
    subprocess.run(["mount", "-o", "remount,size=64m", str(runs)], check=True)
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    output = again.stdout + again.stderr
    assert again.returncode == 0, output[-3000:]
    assert f"resuming from step {CHECKPOINT_STEPS} of {STEPS}" in output
    report = json.loads((folder / "checkpoints" / RUN / "full" / "report.json").read_text())
    assert report["steps"] == STEPS
    assert [step for step, _ in report["losses"]] == list(range(1, STEPS + 1))


def room_for_one_and_a_half_checkpoints(trained: Path) -> int:
    """Return the bytes that a training needs until it has saved one and a half checkpoints.

    trained: the folder of the same training, which was finished before.
    """
    files = {file: -(-file.stat().st_size // PAGE) * PAGE for file in trained.rglob("*") if file.is_file()}
    checkpoints = [folder for folder in trained.glob("*/checkpoints/checkpoint-*") if folder.is_dir()]
    within = sum(size for file, size in files.items() if any(folder in file.parents for folder in checkpoints))
    return sum(files.values()) - within + within * 3 // 2 // len(checkpoints)


if __name__ == "__main__":
    main()
