"""What an upgrade does to a user's outputs: runs made at one commit, continued at another, and made there again.

    python tests/upgrade/upgrade.py FROM TO [FIRE]

In a clone of this repository, with the environment of this checkout: at both commits the demo, a run on generated rows
in Volcano's form and, if FIRE is a folder with real rows (`make fire-demo`), one on these; and what dry runs of the
demo would run again after each of CHANGES. At TO also which rules a dry run would run again on what FROM made, and
whether anything is left to do after `snakemake --touch`.

Prints every output and every plan that differs, and exits with 1 if there is one, or if `--touch` leaves something to
do. Takes twelve minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from outputs import differences

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]

from bulk_rows import write_volcano_rows  # noqa: E402

MAKE = ["make", "--no-print-directory", "--old-file=.venv/train.stamp", "--old-file=.venv/command.stamp"]
"""It installs nothing of the clone into the environment of this checkout."""

RUN = "qwen3vl-fire"
TARGETS = [f"merged/{RUN}", "reports/data-fire.html", f"reports/lengths-{RUN}.html"]
VOLCANO_ROWS = 240

CHANGES = (
    "datasets={fire: {val_share: 0.2}}",
    "datasets={fire: {near_duplicates: {picture_distance: 3}}}",
    "datasets={fire: {licence: cc-by-4.0}}",
    f"runs={{{RUN}: {{train: {{learning_rate: 3e-3}}}}}}",
    f"runs={{{RUN}: {{train: {{max_length: 480}}}}}}",
    f"runs={{{RUN}: {{train: {{image_max_tokens: 32}}}}}}",
    f"runs={{{RUN}: {{train: {{max_steps: 60}}}}}}",
    f"runs={{{RUN}: {{smoke: {{steps: 9}}}}}}",
    f"runs={{{RUN}: {{verify: {{rows: 3}}}}}}",
    f"runs={{{RUN}: {{processes: 1}}}}",
)
"""Settings of the demo that change: of rows, of lengths, of the training, of the proof."""


def main() -> int:
    """Upgrade the runs, say what became of them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="FROM")
    parser.add_argument("after", metavar="TO")
    parser.add_argument("fire", metavar="FIRE", nargs="?", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT.parent, prefix="upgrade-") as folder:
        clone = Path(folder) / "vlmflow"
        _run(ROOT, "git", "clone", "--quiet", "--no-checkout", str(ROOT), str(clone))
        (clone / ".venv").symlink_to(ROOT / ".venv")
        (clone / "runs" / "volcano" / "rows").mkdir(parents=True)
        write_volcano_rows(clone / "runs" / "volcano" / "rows" / "rows.json", VOLCANO_ROWS, seed=1)
        kept = Path(folder) / "before"
        kept.mkdir()

        _run(clone, "git", "checkout", "--quiet", words.before)
        names = _make(clone, words.fire)
        plans = {change: _plan(clone, "--config", change) for change in CHANGES}
        _run(clone, "git", "checkout", "--quiet", words.after)
        print(f"Stale at {words.after}:\n{_plan(clone) or 'nothing'}", flush=True)
        _snakemake(clone, "--touch", *TARGETS)
        left = _plan(clone)
        print(f"Left to do after --touch:\n{left or 'nothing'}", flush=True)

        for name in names:
            shutil.copytree(clone / "runs" / name, kept / name, symlinks=True)
            for place in (clone / "runs" / name).iterdir():
                if name != "volcano" or place.name != "rows":
                    shutil.rmtree(place) if place.is_dir() else place.unlink()
        _make(clone, words.fire)
        found = [f"{name}/{line}" for name in names for line in differences(kept / name, clone / "runs" / name)]
        for change, plan in plans.items():
            if (now := _plan(clone, "--config", change)) != plan:
                found.append(f"-n --config '{change}':\n{plan or 'nothing'}\nand\n{now or 'nothing'}")
        print(f"What differs from {words.before}, of {', '.join(names)} and {len(plans)} dry runs:")
        print("\n".join(found) or "nothing")
    return int(bool(left or found))


def _make(clone: Path, fire: Path | None) -> list[str]:
    """Make the runs, and return the names of their folders in `runs`."""
    _run(clone, *MAKE, "demo")
    settings = yaml.safe_load((clone / "profiles" / "demo" / "run.yaml").read_text())
    settings["models"]["tiny"]["source"] = "../demo/tiny-model"
    data = {"kind": "volcano", "train": "rows/rows.json", "image_roots": ["rows/pictures"], "val_share": 0.1}
    settings["datasets"] = {"mine": data}
    settings["runs"] = {"volcano": settings["runs"][RUN] | {"dataset": "mine"}}
    settings["runs"]["volcano"]["train"]["max_length"] = 640
    (clone / "runs" / "volcano" / "run.yaml").write_text(yaml.safe_dump(settings))
    words = ["--profile", "profiles/demo", "--configfile", "runs/volcano/run.yaml", "--directory", "runs/volcano"]
    _run(clone, ".venv/bin/snakemake", *words, "--", "merged/volcano", "reports/data-mine.html")
    if fire is None:
        return ["demo", "volcano"]
    _run(clone, *MAKE, "fire-demo", f"FIRE={fire.resolve()}")
    return ["demo", "volcano", "fire-demo"]


def _plan(clone: Path, *words: str) -> str:
    """Return the rules that a dry run of the demo would run, with their numbers; "" if nothing is to be done."""
    said = _snakemake(clone, "-n", *words, "--", *TARGETS)
    return "" if "Nothing to be done" in said else said[said.rindex("Job stats:") :].split("\n\n")[0]


def _snakemake(clone: Path, *words: str) -> str:
    call = [".venv/bin/snakemake", "--profile", "profiles/demo", "--directory", "runs/demo", *words]
    return _run(clone, *call)


def _run(folder: Path, *words: str) -> str:
    ours = os.environ | {"PYTHONPATH": str(folder / "scripts")}  # `vlmflow` is installed from this checkout
    done = subprocess.run(words, cwd=folder, env=ours, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
