"""The workflow itself, for tests: a demo folder, Snakemake called on it as a person would, and one rule alone."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from forked_snakemake import called

ROOT = Path(__file__).parents[2]
RUN = "qwen3vl-fire"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

STEPS, CHECKPOINT_STEPS = 9, 3
"""Steps of QUICK's full training, and after how many it is evaluated and saved."""

TRAIN_ROWS = 240
"""Rows of the sample's train split: fewer than the demo's, whose val has to suffice for a verdict."""

QUICK = f"""
runs:
  qwen3vl-fire:
    train: {{max_steps: {STEPS}, checkpoint_steps: {CHECKPOINT_STEPS}, evaluation_steps: {CHECKPOINT_STEPS}}}
    smoke: {{steps: 6, longest: 4, sample: 4}}
    verify: {{rows: 2}}
"""
"""Overrides of the demo's settings: every stage for real, with fewer steps."""


SPEED = re.compile(r" (.+): (?:[\d,.]+ of [\d,.]+|0) (?:rows|pictures|MB) · [\d,.]+ (rows|pictures|MB)/s · .*")


def speeds(folder: Path, rule: str) -> dict[str, str]:
    """Return, from a rule's logs, the unit of each progress line ("rows", "pictures", "MB") by its label.

    While a stage works it shows a line with count, rate and time left; the log has its last form.
    """
    logs = "\n".join(log.read_text() for log in sorted((folder / "logs" / rule).rglob("*.log")))
    return dict(SPEED.findall(logs))


def program(name: str) -> Path:
    """Return the file of one of the project's programs: a stage or a tool."""
    (file,) = [*(ROOT / "scripts").glob(f"stages/{name}.py"), *(ROOT / "scripts/vlmflow").glob(f"tools/{name}.py")]
    return file


def vlmflow(*words: object) -> list[str]:
    """Return a call of the command `vlmflow`."""
    return [sys.executable, "-m", "vlmflow.command", *map(str, words)]


def refusal(words: Sequence[str]) -> str:
    """Return why `vlmflow` cannot take some words: the command, an option, or the number of arguments; "" if it can.

    It does not judge values; of what a command passes on to Snakemake it judges the options.
    """
    from snakemake.cli import get_argument_parser
    from typer import BadParameter
    from typer.core import TyperGroup
    from typer.main import get_command

    from vlmflow.command import app

    command, rest = get_command(app), list(words)
    while isinstance(command, TyperGroup):
        name = rest.pop(0) if rest else ""
        if name == "--help":
            return ""
        if name not in command.commands:
            return f"no such command: {name}"
        command = command.commands[name]
    try:
        passed_on = command.make_context("vlmflow", rest).obj or []
        get_argument_parser().parse_args(passed_on)
    except SystemExit:
        return f"snakemake does not understand {passed_on}"
    except Exception as error:
        return "" if type(error) is BadParameter else str(error) or type(error).__name__
    return ""


def script(name: str, **values: object) -> None:
    """Run one of the project's scripts, as from a shell."""
    words = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, str(program(name)), *words], check=True, capture_output=True)


def make_demo_folder(folder: Path) -> Path:
    """Write the demo's input into `folder`: sample, tiny model, and QUICK as `quick.yaml`."""
    script("make_sample", folder=folder / "sample", train_rows=TRAIN_ROWS)
    script("make_tiny_model", folder=folder / "tiny-model", text=f"[{folder}/sample/FIRE-train-100K.json]")
    (folder / "quick.yaml").write_text(QUICK)
    return folder


def command(folder: Path, *words: str, root: Path = ROOT) -> list[str]:
    """Return Snakemake's command line for a demo folder."""
    files = [str(root / "profiles" / "demo" / "run.yaml"), str(folder / "quick.yaml")]
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(root / "Snakefile"), "--directory", str(folder)]
    return [*call, "--configfile", *files, "--cores", "2", *words]


def words_of(process: psutil.Process) -> str:
    """Return the command line of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def snakemake(folder: Path, *words: str, root: Path = ROOT) -> str:
    """Run Snakemake to its end and return its output.

    Raises AssertionError with the output if it fails.
    """
    done = called(command(folder, *words, root=root))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def stale_rules(folder: Path, *words: str, root: Path = ROOT) -> set[str]:
    """Return the rules that a dry run for the merged weights names."""
    output = snakemake(folder, "-n", f"merged/{RUN}", *words, root=root)
    if "Nothing to be done" in output:
        return set()
    table = output[output.rindex("Job stats:") :]
    return set(re.findall(r"^(\w+) +\d+$", table, re.MULTILINE)) - {"total", "count", "job"}


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a demo folder with its times and links; Snakemake then finds nothing to do in the copy."""
    subprocess.run(["cp", "--archive", str(source), str(target)], check=True)
    return target


def checkout(target: Path) -> Path:
    """Make a git checkout of the project's files as they are in the working tree."""
    clone(target)
    person = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "--quiet"], ["add", "--all"], [*person, "commit", "--quiet", "--message=All"]):
        subprocess.run(["git", *words], cwd=target, check=True)
    return target


def clone(target: Path) -> Path:
    """Make a fresh clone of the project's files as they are in the working tree, with new times."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


SNAKEFILE = """
import os
import sys
from pathlib import Path
sys.path.insert(0, f"{workflow.basedir}/scripts")
from vlmflow.harness import start
from vlmflow.config.model import check_config
from vlmflow.core.processes import import_path
os.environ["PYTHONPATH"] = import_path()
configfile: "config.yaml"
settings = check_config(config, [])
config = settings.model_dump(mode="json")
names, inputs, params, resources = start.for_rules(workflow, settings)
"""


def one_rule(folder: Path, rule: str, **settings: object) -> Callable[..., str]:
    """Make a workflow of one rule in a folder; return a function that calls Snakemake there and returns its output.

    settings: the configuration; keys that are not named are empty.
    """
    (folder / "Snakefile").write_text(f'{SNAKEFILE}include: "rules/{rule}.smk"\n')
    for name in ("rules", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config.yaml").write_text(yaml.safe_dump({"models": {}, "datasets": {}, "runs": {}} | settings))

    def snakemake(*words: str) -> str:
        call = [sys.executable, "-m", "snakemake", *words, "--cores=2"]
        call += ["--rerun-triggers", "mtime", "params", "input"]
        done = called(call, folder)
        return done.stdout + done.stderr

    return snakemake


def validation(**changed: Any) -> dict[str, Any]:
    """Return the part of a data set's settings that validate_sharegpt takes."""
    return {
        "kind": "fire",
        "one_prompt": False,
        "form": "trajectory",
        "max_history_rounds": None,
        "modality": "image",
        "skip_images": False,
        "test_share": 0.0,
        "val_share": 0.1,
        "seed": 1,
        "max_reject_share": 0.5,
        "row_limits": {},
        "near_duplicates": {},
        **changed,
    }
