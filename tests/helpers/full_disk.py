"""Train on a disk that fills up; `test_trainer` runs this in its own mount namespace.

unshare --mount --map-root-user python tests/helpers/full_disk.py DEMO_FOLDER
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from workflow_runs import RUN, command

DISK = "64m"


def main() -> None:
    """Fill the disk after the first checkpoint, check that the training fails, make room, and check that it resumes."""
    folder = Path(sys.argv[1])
    runs = folder / "stores" / "runs"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(runs)], check=True)
    words = command(folder, "--allowed-rules", "train_lora", "--", f"checkpoints/{RUN}/full")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        while last_step(runs) < 7:  # then the checkpoint of step 6 is complete
            assert first.poll() is None, first.stdout.read()
            time.sleep(0.02)
        with (runs / "filler").open("wb") as filler:
            try:
                while True:
                    filler.write(bytes(1 << 16))
                    filler.flush()
            except OSError:
                pass
        said = first.stdout.read()
    assert first.returncode == 1
    assert "no space left on the disk" in said, said[-3000:]
    assert "free space on the disk of stores.runs" in said
    (runs / "filler").unlink(missing_ok=True)
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    output = again.stdout + again.stderr
    assert again.returncode == 0, output[-3000:]
    assert "resuming from step 6 of 18" in output
    report = json.loads((folder / "checkpoints" / RUN / "full" / "report.json").read_text())
    assert report["steps"] == 18
    assert [step for step, _ in report["losses"]] == list(range(1, 19))


def last_step(runs: Path) -> int:
    """Return the last step that the training reported; 0 before the first."""
    lines = [line for file in runs.glob("*/full/*/progress.jsonl") for line in file.read_text().splitlines(True)]
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


if __name__ == "__main__":
    main()
