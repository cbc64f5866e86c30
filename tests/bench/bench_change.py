"""The cost of a changed number of rows: which rules run again, and their seconds compared with the whole workflow's.

Run alone: python tests/bench/bench_change.py
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_workflow import RUN, demo_command, quietly

TARGETS = [f"merged/{RUN}", "reports/data-fire.html", "reports/data-fire-timestep.html"]
OTHER_DATA = "datasets={fire-timestep: {max_samples: 150}}"
OWN_DATA = "datasets={fire: {max_samples: 150}, fire-timestep: {max_samples: 150}}"


def bench_change(folder: Path) -> dict[str, Any]:
    """Run the demo and the pages of two data sets in the empty `folder`; then again with fewer rows of each.

    Returns the seconds of the whole workflow, and for each change the rules that ran again, their seconds and share:
    for a data set that no run is trained on, and for the run's own.
    """
    command = demo_command(folder)
    whole = seconds([*command, "--", *TARGETS])
    figures: dict[str, Any] = {"whole_seconds": round(whole, 1)}
    for name, change in (("rows_of_another_data_set", OTHER_DATA), ("rows_of_the_runs_data_set", OWN_DATA)):
        changed = [*command, "--config", change, "--", *TARGETS]
        figures[f"{name}:_rules_again"] = ", ".join(planned([*changed[:-4], "-n", *changed[-4:]]))
        took = seconds(changed)
        figures[f"{name}:_seconds"] = round(took, 1)
        figures[f"{name}:_share_of_the_whole"] = round(took / whole, 2)
    return figures


def planned(command: list[str]) -> list[str]:
    """Return the rules of a dry run, with the number of their jobs if there are several."""
    said = quietly(command)
    jobs = re.findall(r"^(\w+) +(\d+)$", said[said.index("Job stats:") :], re.MULTILINE)
    return [rule if count == "1" else f"{count} {rule}" for rule, count in dict(jobs).items() if rule != "total"]


def seconds(command: list[str]) -> float:
    """Run a command and return its duration."""
    begun = time.perf_counter()
    quietly(command)
    return time.perf_counter() - begun


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as scratch:
        print(json.dumps(bench_change(Path(scratch).resolve()), indent=1))
