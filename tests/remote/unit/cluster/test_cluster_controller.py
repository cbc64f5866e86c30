"""The controller's process and its checkout, without a cluster, with real processes and real git."""

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import controller, file_stream
from workflow_runs import ROOT

CONTROLLER = ROOT / "k8s/base/controller.py"
SNAKEMAKE = """#!/bin/sh
trap 'echo interrupted; exit 1' INT
echo "running $*"
while [ ! -e go ]; do
    if [ -e begun ]; then echo "Job stats:"; rm begun; fi
    sleep 0.05
done
echo done; exit 7
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory, and a command named snakemake that ends with 7 once the file `go` exists.

    If the file `begun` exists, it prints what Snakemake prints after it has ended the old Jobs.
    """
    program = tmp_path / "bin/snakemake"
    program.parent.mkdir()
    program.write_text(SNAKEMAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "vlmflow").mkdir()
    return tmp_path / "vlmflow"


def started(work: Path, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PATH": f"{work.parent / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, str(CONTROLLER), *arguments]
    return subprocess.Popen(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True)


def ended(work: Path, *arguments: str) -> tuple[int, str]:
    process = started(work, *arguments)
    said = process.communicate(timeout=60)[0]
    return process.returncode, said


@pytest.fixture
def serve(work: Path) -> Iterator[Callable[[], subprocess.Popen]]:
    processes = []

    def begin() -> subprocess.Popen:
        processes.append(started(work, "serve"))
        return processes[-1]

    yield begin
    (work / "go").touch()
    for process in processes:
        process.terminate()
        process.wait(timeout=60)


def until_output_has(work: Path, text: str, times: int = 1) -> None:
    for _ in range(1200):
        if (work.parent / "run/output.log").read_text().count(text) >= times:
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came")


def test_a_run_is_started_followed_and_its_code_given(work: Path, serve: Callable) -> None:
    serve()
    assert ended(work, "status") == (0, "no run was requested yet\n")
    assert ended(work, "start", "--", "--config", "b=1", "--", "merged/a") == (0, "")
    until_output_has(work, "running --executor kubernetes --config b=1 -- merged/a")
    code, said = ended(work, "start", "--", "merged/b")
    assert code == 3
    assert "snakemake --executor kubernetes --config b=1 -- merged/a is running" in said
    (work / "go").touch()
    code, said = ended(work, "follow")
    assert code == 7
    assert said.endswith("done\nSnakemake ended with code 7.\n")
    assert ended(work, "start", "--", "merged/b")[0] == 0


def test_a_stopped_run_stays_stopped(work: Path, serve: Callable) -> None:
    first = serve()
    ended(work, "start", "--", "merged/a")
    until_output_has(work, "running")
    assert ended(work, "stop")[0] == 0
    assert (work.parent / "run/output.log").read_text().endswith("interrupted\nSnakemake ended with code 1.\n")
    first.terminate()
    first.wait(timeout=60)
    serve()
    time.sleep(1)
    assert ended(work, "status")[0] == 0


def test_a_stop_that_the_pods_end_interrupted_is_completed(work: Path, serve: Callable) -> None:
    """Snakemake is started once more to end the previous one's Jobs, and then interrupted."""
    first = serve()
    ended(work, "start", "--", "merged/a")
    until_output_has(work, "running")
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait(timeout=60)
    for child in children:  # they end with the pod; otherwise two would write at once
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    (work.parent / "run/stop").touch()
    serve()
    until_output_has(work, "The controller came back")
    time.sleep(1)
    assert ended(work, "status")[0] == 3
    (work / "begun").touch()
    code, said = ended(work, "follow")
    assert code == 1
    assert said.endswith("Job stats:\ninterrupted\nSnakemake ended with code 1.\n")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_continues_when_the_controller_is_back(work: Path, serve: Callable, end: signal.Signals) -> None:
    first = serve()
    ended(work, "start", "--", "merged/a")
    until_output_has(work, "running")
    first.send_signal(end)
    first.wait(timeout=60)
    output = work.parent / "run/output.log"
    assert ("interrupted" in output.read_text()) == (end == signal.SIGTERM)
    assert ended(work, "status")[0] == 3
    (work / "go").touch()
    serve()
    code, said = ended(work, "follow")
    assert code == 7
    assert "The controller came back" in said


def test_a_snakemake_that_was_killed_is_started_again_three_times(work: Path, serve: Callable) -> None:
    serve()
    ended(work, "start", "--", "merged/a")
    for count in range(1, 5):
        until_output_has(work, "running --executor", times=count)
        program = str(work.parent / "bin/snakemake")
        found = [each for each in psutil.process_iter(["cmdline"]) if program in (each.info["cmdline"] or [])]
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # they may include what it is just starting
                each.kill()
    code, said = ended(work, "follow")
    assert said.count("Snakemake was killed (signal 9). It is restarted.") == 3
    assert code == 137


def test_only_one_of_two_controllers_executes_a_run(work: Path, serve: Callable) -> None:
    first = serve()
    ended(work, "start", "--", "merged/a")
    until_output_has(work, "running")
    serve()
    time.sleep(2)
    output = work.parent / "run/output.log"
    assert output.read_text().count("running --executor") == 1
    first.kill()
    first.wait(timeout=60)
    until_output_has(work, "The controller came back")


def test_a_volume_without_locks_is_named(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without -o flock."""
    monkeypatch.chdir(work)
    spec = importlib.util.spec_from_file_location("controller", CONTROLLER)
    controller = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(controller)

    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without)
    with CONTROLLER.open() as file, pytest.raises(SystemExit, match=r"(?s)serving cannot be locked.*Lustre: -o flock"):
        controller._locked(file)


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def carried(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, file_stream.__file__, "unpack", str(target)], stdin=subprocess.PIPE)
    with process.stdin:
        controller.pack(source, process.stdin)
    assert process.wait() == 0


def test_the_checkout_arrives_with_its_commit_and_its_changes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name, text in {"Snakefile": "one", "gone.py": "", ".gitignore": ".env\n", ".env": "HF_TOKEN=hf_secret"}.items():
        (source / name).write_text(text)
    git(source, "init")
    git(source, "add", ".")
    git(source, "commit", "-m", "first")
    carried(source, target)
    (target / "my-run.yaml").write_text("mine")
    git(target, "rm", "--cached", "-f", "my-run.yaml", "--ignore-unmatch")
    assert git(target, "describe", "--always", "--dirty") == git(source, "describe", "--always")

    (source / "Snakefile").write_text("two")
    (source / "gone.py").unlink()
    (source / "new.smk").write_text("")
    carried(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(
        [".git", ".gitignore", "Snakefile", "my-run.yaml", "new.smk"]
    )
    assert (target / "Snakefile").read_text() == "two"
    assert "new.smk" in git(target, "ls-files")
    assert git(target, "describe", "--always", "--dirty").endswith("-dirty\n")
    assert not any(b"hf_secret" in path.read_bytes() for path in target.rglob("*") if path.is_file())


def test_a_push_that_is_cut_off_changes_nothing_and_the_next_one_does(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "Snakefile").write_text("one")
    git(source, "init")
    git(source, "add", ".")
    git(source, "commit", "-m", "first")
    carried(source, target)
    (source / "Snakefile").write_text("two")
    with (tmp_path / "tar").open("wb") as stream:
        controller.pack(source, stream)
    whole = (tmp_path / "tar").read_bytes()
    for part in (b"", whole[: len(whole) // 2]):
        command = [sys.executable, file_stream.__file__, "unpack", str(target)]
        assert subprocess.run(command, input=part, capture_output=True, check=False).returncode != 0
        assert (target / "Snakefile").read_text() == "one"
        assert git(target, "ls-files") == "Snakefile\n"
    carried(source, target)
    assert (target / "Snakefile").read_text() == "two"
    assert not (target / ".arriving").exists()


def test_a_file_replaces_a_folder_and_the_reverse(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "one").mkdir(parents=True)
    (source / "one/file").write_text("")
    (source / "two").write_text("")
    git(source, "init")
    git(source, "add", ".")
    git(source, "commit", "-m", "first")
    carried(source, target)
    (source / "one/file").unlink()
    (source / "one").rmdir()
    (source / "one").write_text("file")
    (source / "two").unlink()
    (source / "two").mkdir()
    (source / "two/file").write_text("")
    carried(source, target)
    assert (target / "one").read_text() == "file"
    assert (target / "two/file").is_file()


def test_a_folder_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match="not a git repository"), (tmp_path / "tar").open("wb") as stream:
        controller.pack(tmp_path, stream)


@pytest.mark.parametrize("text", ["", "OTHER=1\n", "HF_TOKEN=\n", "HF_TOKEN=hf_abc hf_def\n"])
def test_a_file_without_a_token_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / ".env").write_text(text)
    with pytest.raises(VlmflowError) as raised:
        controller.read_token(tmp_path / ".env")
    assert "hf_abc" not in str(raised.value)


def test_a_token_becomes_a_secret(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\nexport HF_TOKEN='hf_abc'\n")
    secret = json.loads(controller.secret(controller.read_token(tmp_path / ".env")))
    assert (secret["metadata"]["name"], secret["data"]) == ("hf-token", {"HF_TOKEN": "aGZfYWJj"})


def test_a_tracked_file_is_no_place_for_a_token(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=hf_abc\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".env")
    with pytest.raises(VlmflowError, match="tracked by git"):
        controller.read_token(tmp_path / ".env")
