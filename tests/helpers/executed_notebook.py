"""Executes notebooks/look.ipynb: its cells one after the other in one process, as a kernel does it.

The tests' environment has no Jupyter: its 100 packages would be there for this alone. envs/jupyter.lock has them.
"""

import os
import subprocess
import sys
from pathlib import Path

from workflow_runs import ROOT

NOTEBOOK = ROOT / "notebooks" / "look.ipynb"

KERNEL = """
import json, pathlib, sys
import matplotlib.pyplot
cells = json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]
namespace = {"__name__": "__main__"}
for number, cell in enumerate(cells, start=1):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
print("titles:", [matplotlib.pyplot.figure(number).axes[0].get_title() for number in matplotlib.pyplot.get_fignums()])
"""


def executed(folder: Path, run: str, ends_well: bool = True) -> str:
    """Execute the notebook for a run; return what it printed, and its figures' titles."""
    own = {"VLMFLOW_FOLDER": str(folder), "VLMFLOW_RUN": run, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", KERNEL, str(NOTEBOOK)],
        cwd=NOTEBOOK.parent,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ends_well, done.stdout + done.stderr
    return done.stdout + done.stderr
