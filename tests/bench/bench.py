"""Measure the figures of docs/benchmarks.md: each way and its yardstick, in one run, on an otherwise idle machine.

    python tests/bench/bench.py [rows] [volcano] [pictures] [integrity] [fetch] [forms] [lengths] [merge] [workflow] …

Prints a Markdown table per part; without names, all parts. It temporarily uses 14 GB in runs/.
"""

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from bench_change import bench_change
from bench_fetch import bench_fetch
from bench_forms import bench_forms
from bench_integrity import bench_integrity
from bench_lengths import bench_lengths
from bench_merge import bench_merge
from bench_pictures import bench_pictures
from bench_rows import bench_rows
from bench_starts import bench_starts
from bench_training import bench_training
from bench_volcano import bench_volcano
from bench_workflow import bench_workflow

SCRATCH = Path(__file__).resolve().parents[2] / "runs"
CORES = len(os.sched_getaffinity(0))
PARTS = {
    "rows": lambda folder: bench_rows(folder, CORES),
    "volcano": lambda folder: bench_volcano(folder, CORES),
    "forms": lambda folder: bench_forms(folder, CORES),
    "pictures": lambda folder: bench_pictures(folder, CORES),
    "integrity": lambda folder: bench_integrity(folder, CORES),
    "fetch": bench_fetch,
    "lengths": lambda folder: bench_lengths(folder, CORES),
    "merge": lambda folder: bench_merge(folder, CORES),
    "workflow": bench_workflow,
    "change": bench_change,
    "starts": bench_starts,
    "training": bench_training,
}


def machine() -> str:
    """Describe the machine in one line."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "pillow", "msgspec"))
    return (
        f"{CORES} cores of {processor[1] if processor else platform.machine()}, {memory:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, {versions}"
    )


def main(parts: list[str]) -> None:
    """Measure and print; exit with the known names if one is unknown."""
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"{', '.join(unknown)}: not measured here; there are {', '.join(PARTS)}")
    SCRATCH.mkdir(exist_ok=True)
    print(f"Machine: {machine()}", flush=True)
    for part in parts or PARTS:
        with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="bench-") as scratch:
            figures = PARTS[part](Path(scratch).resolve())
        print(f"\n| {part} | |\n|---|---:|")
        for name, figure in figures.items():
            shown = f"{figure:,}" if isinstance(figure, int | float) else figure
            print(f"| {name.replace('_', ' ')} | {shown} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
