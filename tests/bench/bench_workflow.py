"""The workflow's own overhead: the demo's wall time, and the part of it in which no script was running.

Run alone: python tests/bench/bench_workflow.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN = "qwen3vl-fire"


def bench_workflow(folder: Path) -> dict[str, Any]:
    """Run the demo in the empty `folder`.

    Returns its wall time, the time in which at least one script ran (from Snakemake's benchmark files), and the
    share of the rest (goal: 0.25 at most).
    """
    command = demo_command(folder)
    begun = time.perf_counter()
    quietly([*command, f"merged/{RUN}"])
    wall = time.perf_counter() - begun
    busy = covered([script_interval(path) for path in folder.glob("benchmarks/**/*.tsv")])
    return {
        "wall_seconds": round(wall, 1),
        "in_scripts_seconds": round(busy, 1),
        "overhead_share": round((wall - busy) / wall, 3),
    }


def demo_command(folder: Path) -> list[str]:
    """Put sample and tiny model into `folder`, and return the demo's command line there, without targets."""
    python("make_sample", "--folder", str(folder / "sample"))
    text = json.dumps([str(folder / "sample" / "FIRE-train-100K.json")])
    python("make_tiny_model", "--folder", str(folder / "tiny-model"), "--text", text)
    return [str(Path(sys.executable).with_name("snakemake")), "--profile", "profiles/demo", "--directory", str(folder)]


def script_interval(benchmark: Path) -> tuple[float, float]:
    """Return when a rule's script started and ended, from its benchmark file."""
    head, values = (line.split("\t") for line in benchmark.read_text().splitlines())
    ended = benchmark.stat().st_mtime
    return ended - float(values[head.index("s")]), ended


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the total time that possibly overlapping intervals cover."""
    total, reached = 0.0, 0.0
    for begun, ended in sorted(intervals):
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total


def python(tool: str, *options: str) -> None:
    """Run a tool of the project."""
    quietly(["env", f"PYTHONPATH={ROOT / 'scripts'}", sys.executable, "-m", f"vlmflow.tools.{tool}", *options])


def quietly(command: list[str]) -> str:
    """Run a command and return its output; print it if the command fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        print(json.dumps(bench_workflow(Path(scratch).resolve()), indent=1))
