"""Runs the tests in parts, side by side, and says what they cost: `make check`, `test`, `test-remote`, `test-cluster`.

    .venv/bin/python tests/run.py check | test | remote | cluster

Lint and the parts share the cores; each line of output begins with its part. At the end: the minutes of each part, and
the core-minutes of all, with those that BUDGET allows. In CI, more than a tenth above it fails. What the tests on the
cluster build, once, does not count.

Test processes that import torch are large: each process that they start copies their page tables. So they are a part of
their own, and the others stay small.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]

import session_folder  # noqa: E402
import warm_programs  # noqa: E402
from vlmflow.core.processes import bound_to_this_process  # noqa: E402
from vlmflow.core.progress import clock  # noqa: E402

BUDGET = ROOT / "tests" / "budget.yaml"
OVER = 1.1
"""CI fails if the tests cost more than this multiple of their budget: measurements differ."""

LONGEST_END = 10.0
"""Seconds until a part is killed that was told to end."""

LIGHT = "VLMFLOW_TEST_LIGHT"
"""The variable that lets test processes refuse slow imports (conftest.py)."""

HEAVY = (
    *("unit/demo/test_tiny_tokenizer.py", "unit/estimate", "unit/evaluation/answering"),
    *("unit/evaluation/scoring/test_overlap.py", "unit/evaluation/test_gpus.py"),
    *("unit/fetch/test_model_weights.py", "unit/merging", "unit/pictures/test_budget.py"),
    *("unit/reports/test_estimate_page.py", "unit/search", "unit/serving/test_chat_client.py", "unit/swift"),
    *("unit/test_notebook.py", "unit/in_trainer", "unit/supervisor/test_checkpoint.py"),
    *("unit/lengths/test_steps.py", "unit/supervisor/test_strategies.py", "workflow/test_demo_workflow.py"),
    *("workflow/test_estimate_refuses.py", "workflow/test_evaluate.py", "workflow/test_kills.py"),
)
"""Files and folders outside of stages/ whose tests import torch or other slow libraries, or start programs that do."""


@dataclass
class Part:
    """A command whose output has its name before each line. It ends with this process at the latest."""

    name: str
    command: Sequence[object]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    code: int = 1
    process: subprocess.Popen[str] | None = None
    faults: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run it to its end."""
        began = time.monotonic()
        self.process = process = subprocess.Popen(
            [str(word) for word in self.command],
            cwd=ROOT,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=bound_to_this_process(signal.SIGTERM),
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{self.name:6} | {line}", end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                self.faults.append(line.rstrip())
        self.code = process.wait()
        self.seconds = time.monotonic() - began


def end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Let processes end, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(LONGEST_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pytest(name: str, processes: int, *words: object, light: bool = False) -> Part:
    """Return a part of the tests, in so many processes: some tests wait, and more than two use two cores."""
    # Files keep their order (conftest.py): the slow ones start first.
    how = ("--numprocesses", processes, "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow", "-q")
    call = [sys.executable, "-m", "pytest", *how, *words]
    return Part(name, call, {LIGHT: "1"} if light else {})


def parts_of(what: str) -> list[list[Part]]:
    """Return the parts of a target of the Makefile: those of a list run side by side, the lists in turn."""
    tests = ROOT / "tests"
    heavy = [tests / name for name in HEAVY]
    without = [word for place in heavy for word in ("--ignore", place)]
    lint = Part("lint", ["make", "--no-print-directory", "lint"])
    remote = tests / "remote"
    if what == "remote":
        return [[pytest("remote", 4, remote / "unit", light=True)]]
    if what == "cluster":
        path = os.pathsep.join(str(ROOT / name) for name in ("tests/remote", "tests/helpers", "scripts"))
        build = Part("build", [sys.executable, "-m", "cluster", "build"], {"PYTHONPATH": path})
        return [[build], [pytest("jobs", 0, remote / "slurm", remote / "cluster", "-vv", "--durations", 40)]]
    if what == "check":
        quick = ("-m", "not slow and not lengthy", "--hypothesis-profile", "quick")
        return [[lint, pytest("unit", 5, tests / "unit", *without, *quick, light=True)]]
    others = (remote / "cluster", remote / "slurm", tests / "stages")
    elsewhere = [word for folder in others for word in ("--ignore", folder)]
    return [
        [
            pytest("stages", 2, tests / "stages", *heavy, "--durations", 20),
            pytest("unit", 2, tests, *elsewhere, *without, "--durations", 20, light=True),
            lint,
        ]
    ]


class Speed(threading.Thread):
    """Measures how fast the machine is while the tests run: other machines and other work change a second's worth.

    The measure is an import of torch by a new process, since the tests mostly start programs and import: where memory
    is slow, that took three times as long on a machine that counted as fast as another.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds = [self._import()]

    def run(self) -> None:
        """Measure, every three minutes."""
        while True:
            time.sleep(180)
            self.seconds.append(self._import())

    @staticmethod
    def _import() -> float:
        """Return the processor time of one import, in seconds."""
        process = subprocess.Popen([sys.executable, "-c", "import torch"], stdin=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{sys.executable} cannot import torch (exit code {process.returncode}); `make env` installs it")
        return used.ru_utime + used.ru_stime

    def mean(self) -> float:
        """Return the seconds of processor time that an import took."""
        return sum(self.seconds) / len(self.seconds)


def core_minutes() -> float:
    """Return the processor time of all processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


class Budget(BaseModel):
    """The content of tests/budget.yaml."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    seconds_of_an_import: PositiveFloat
    core_minutes: dict[Literal["test", "cluster"], PositiveFloat]


def read_budget() -> Budget:
    """Read tests/budget.yaml. Raises SystemExit, with the key, if it is wrong."""
    try:
        return Budget.model_validate(yaml.safe_load(BUDGET.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        sys.exit(f"{BUDGET}: {'.'.join(map(str, first['loc'])) or 'the content'}: {first['msg']}")
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"{BUDGET}: {error}")


def within_budget(minutes: float, allowed: float, second: float, of_budget: float) -> bool:
    """Print what the tests cost, and return whether the budget allows it.

    minutes: core-minutes. allowed: those of the budget. second, of_budget: as `Speed.mean`, on the two machines.
    """
    scaled = minutes * min(1.0, of_budget / second)
    fits = scaled <= OVER * allowed
    print(
        f"{minutes:.1f} core-minutes, an import of torch took {second:.1f} s; {scaled:.1f} at the speed of the machine "
        f"of tests/budget.yaml ({of_budget:.1f} s), which allows "
        f"{allowed:.1f}{'' if fits else f', and a tenth more: {scaled / allowed:.0%} of it'}"
    )
    if not fits:
        print("  what to do: take as much away as you added, or move it to `make test-slow`; CONTRIBUTING.md")
    return fits or os.environ.get("CI") != "true"


def main() -> int:
    """Run the parts, print what they cost, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "test", "remote", "cluster"))
    what = parser.parse_args().what
    began, budget = time.monotonic(), read_budget()
    speed = Speed() if what in budget.core_minutes else None
    if speed:
        speed.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles what it imports, for seconds
    folder = session_folder.make()
    servers: list[subprocess.Popen[bytes]] = []
    parts: list[Part] = []
    try:
        for name in (".venv", ".venv-track", ".venv-search") if what == "test" else ():
            servers.append(warm_programs.start(folder, ROOT / name / "bin" / "python"))
        for together in parts_of(what):
            before, parts = core_minutes(), [*parts, *together]
            threads = [threading.Thread(target=part.run, daemon=True) for part in together]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if any(part.code for part in together):
                break
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # whoever sends another one waits for this
            signal.signal(number, signal.SIG_IGN)
        end([part.process for part in parts if part.process is not None])
        end(servers)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + "\n".join(f"{clock(part.seconds):>6}  {part.name}" + (" FAILED" * bool(part.code)) for part in parts))
    print(f"{clock(time.monotonic() - began):>6}  in all")
    for part in parts:
        print("".join(f"{fault}\n" for fault in part.faults), end="")  # again, where people look
    minutes, failed = core_minutes() - before, any(part.code for part in parts)
    if speed is None:
        print(f"{minutes:.1f} core-minutes")
        return int(failed)
    minutes -= sum(speed.seconds[1:]) / 60
    fits = within_budget(minutes, budget.core_minutes[what], speed.mean(), budget.seconds_of_an_import)
    return int(failed or not fits)


if __name__ == "__main__":
    sys.exit(main())
