"""The tests' own programs: the runner, its end and its budget, and the table of mutations, which fits the code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import run
from mutations.run import Mutation, judge, read_table
from workflow_runs import ROOT

PART = """
import os, signal, time
signal.signal(signal.SIGTERM, {handler})
print("part", os.getpid(), flush=True)
time.sleep(60)
"""

RUNNER = """
import sys
sys.argv = ["run.py", "check"]
import run
run.LONGEST_END = 1.0
run.parts_of = lambda what: [[run.Part("only", [sys.executable, "-c", {part!r}])]]
sys.exit(run.main())
"""


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start run.py with a part of its own; returns it, and the part's process id."""
    code = RUNNER.format(part=PART.format(handler=request.param))
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    part = int(process.stdout.readline().split()[-1])
    yield process, part
    process.kill()
    process.communicate()
    if runs(part):
        os.kill(part, signal.SIGKILL)


def runs(process: int) -> bool:
    """Return whether a process runs that this one need not have started."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("runner", ["signal.SIG_IGN"], indirect=True)
def test_a_part_that_ignores_its_end_is_killed_and_a_second_signal_changes_nothing(
    runner: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, part = runner
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert not runs(part)
    assert list(tmp_path.glob("vlmflow-tests-*")) == []


@pytest.mark.parametrize("runner", ["signal.SIG_DFL"], indirect=True)
def test_a_part_ends_with_a_runner_that_is_killed(runner: tuple[subprocess.Popen[str], int]) -> None:
    process, part = runner
    process.kill()
    deadline = time.monotonic() + 10
    while runs(part):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_speed_is_known_before_the_first_test_ends() -> None:
    assert run.Speed().mean() > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seconds_of_an_import: 0\ncore_minutes: {test: 1}", "seconds_of_an_import: Input should be greater than 0"),
        ("seconds_of_an_import: 1\ncore_minutes: {test: -1}", "core_minutes.test: Input should be greater than 0"),
        ("seconds_of_an_import: 1\ncore_minutes: {test: .nan}", "core_minutes.test: Input should be a finite number"),
        ("seconds_of_an_import: 1\ncore_minutes: {tests: 1}", "core_minutes.tests.[key]: Input should be 'test' or"),
        ("core_minutes: {test: 1}", "seconds_of_an_import: Field required"),
        ("", "Input should be a valid dictionary"),
        ("a: [", "while parsing a flow"),
    ],
)
def test_a_wrong_budget_is_refused_first(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BUDGET", tmp_path / "budget.yaml")
    monkeypatch.setattr(sys, "argv", ["run.py", "remote"])
    monkeypatch.setattr(run, "parts_of", lambda what: pytest.fail("a part began"))
    (tmp_path / "budget.yaml").write_text(text)
    with pytest.raises(SystemExit, match=r"budget\.yaml: ") as refused:
        run.main()
    assert said in str(refused.value)


@pytest.mark.parametrize(("minutes", "fits"), [(10.9, True), (11.1, False)])
def test_a_tenth_more_than_the_budget_passes_at_the_speed_of_its_machine(
    minutes: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    assert run.within_budget(minutes * 2, 10.0, 6.0, 3.0) is fits
    assert run.within_budget(minutes, 10.0, 1.0, 3.0) is fits, "an import says too much of a fast machine"


TABLE = read_table()
ROOMS = {
    *("config", "core", "estimate", "fetch", "lengths", "merging", "pictures", "publish", "raw", "reports"),
    *("rows", "serving", "swift", "track", "in_trainer", "supervisor", "harness"),
    *("remote/cluster", "remote/kubernetes", "remote/storage"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_text_occurs_once_and_the_test_exists(name: str) -> None:
    assert TABLE[name].fault(ROOT) == ""
    assert TABLE[name].text != TABLE[name].becomes
    assert not TABLE[name].test.startswith("tests/workflow/"), "it takes minutes"


def test_files_that_run_in_one_process_have_names_of_their_own() -> None:
    """Pytest refuses a second file of a name. Those on the cluster run by themselves."""
    tests = ROOT / "tests"
    names = [file.name for file in tests.rglob("test_*.py") if "remote/cluster" not in file.as_posix()]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_a_third_of_them_are_reverted_fixes_and_every_room_has_one() -> None:
    kinds = [mutation.kind for mutation in TABLE.values()]
    assert set(kinds) == {"reverted", "feared"}
    assert 24 <= len(kinds) <= 3 * kinds.count("reverted")
    assert {mutation.room for mutation in TABLE.values()} >= ROOMS


def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("value = 1\nvalue = 1\n")
    (tmp_path / "tests.py").write_text("def test_it() -> None: ...\n")
    mutation = Mutation("name", "feared", "module.py", "value = 1", "value = 2", "", "tests.py::test_it")
    assert mutation.fault(tmp_path) == "text found 2 times in module.py"
    (tmp_path / "module.py").write_text("value = 1\n")
    assert mutation.fault(tmp_path) == ""
    (tmp_path / "tests.py").write_text("def test_other() -> None: ...\n")
    assert mutation.fault(tmp_path) == "test not found: tests.py::test_it"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A module and its test, as a checkout has them."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = scripts\n")
    (tmp_path / "scripts" / "module.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "test_module.py").write_text(
        "from module import double\ndef test_double(): assert double(2) == 4\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("becomes", "verdict"),
    [
        ("return x * 2", "NOT CAUGHT by tests/test_module.py::test_double"),
        ("return 2 *", "DOES NOT IMPORT: SyntaxError"),
        ("return 2 * y", "NO ASSERTION: failed: NameError"),
    ],
)
def test_only_what_fails_by_its_assertion_is_caught(project: Path, becomes: str, verdict: str) -> None:
    test = "tests/test_module.py::test_double"
    mutation = Mutation("name", "feared", "scripts/module.py", "return 2 * x", becomes, "", test)
    assert judge(project, mutation).startswith(verdict)
    assert mutation.fault(project) == "", "the code is as it was"
