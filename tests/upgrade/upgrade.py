"""What an upgrade does to a user's outputs: the demo made at one commit, continued at another.

    python tests/upgrade/upgrade.py FROM TO

In a clone of this repository: `make demo` at FROM; at TO, which rules a dry run would run again, and whether anything
is left to do after `snakemake --touch`; then the demo made again at TO, and every output compared with that of FROM.
Prints the findings, and exits with 1 if `--touch` leaves something to do or an output differs. Takes ten minutes.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from outputs import differences

ROOT = Path(__file__).resolve().parents[2]
DEMO = ["make", "--old-file=.venv/train.stamp", "demo"]
"""The environment is that of this checkout, at both commits."""

TARGETS = ["merged/qwen3vl-fire", "reports/data-fire.html", "reports/lengths-qwen3vl-fire.html"]


def main() -> int:
    """Upgrade a demo, say what became of it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="FROM")
    parser.add_argument("after", metavar="TO")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT.parent, prefix="upgrade-") as folder:
        clone = Path(folder) / "vlmflow"
        _run(ROOT, "git", "clone", "--quiet", "--no-checkout", str(ROOT), str(clone))
        (clone / ".venv").symlink_to(ROOT / ".venv")
        demo, before = clone / "runs" / "demo", clone / "runs" / "before"

        _run(clone, "git", "checkout", "--quiet", words.before)
        _run(clone, *DEMO)
        _run(clone, "git", "checkout", "--quiet", words.after)
        print(f"Stale at {words.after}:\n{_plan(clone) or 'nothing'}", flush=True)
        _snakemake(clone, "--touch", *TARGETS)
        left = _plan(clone)
        print(f"Left to do after --touch:\n{left or 'nothing'}", flush=True)

        demo.rename(before)
        _run(clone, *DEMO)
        different = list(differences(before, demo))
        print(f"Outputs that differ from those of {words.before}:\n" + ("\n".join(different) or "none"))
    return int(bool(left or different))


def _plan(clone: Path) -> str:
    """Return the rules that Snakemake would run, with their numbers; "" if nothing is to be done."""
    said = _snakemake(clone, "-n", *TARGETS)
    return "" if "Nothing to be done" in said else said[said.rindex("Job stats:") :].split("\n\n")[0]


def _snakemake(clone: Path, *words: str) -> str:
    call = [".venv/bin/snakemake", "--profile", "profiles/demo", "--directory", "runs/demo", *words]
    return _run(clone, *call)


def _run(folder: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
