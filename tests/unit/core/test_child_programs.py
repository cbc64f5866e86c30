"""Programs that a stage starts: the variables that they get, and those in an environment of their own."""

import json
import os
from pathlib import Path

import pytest

from vlmflow.core.child_programs import NAMED, ask, child_environment, python_of
from vlmflow.core.errors import PassingError, VlmflowError

OURS = {"PYTHONSAFEPATH": "1"}

KEPT = {
    *("PATH", "HOME", "TMPDIR", "LC_ALL", "PYTHONUTF8", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "CXX"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "VLMFLOW_RECORDS"),
}

CHANGES_WHAT_IS_TRAINED = {
    *(
        "SPATIAL_MERGE_SIZE",
        "MAX_RATIO",
        "MAX_PIXELS",
        "CELOSS_PARALLEL_SIZE",
        "RAY_SWIFT_ARGS",
        "NVIDIA_TF32_OVERRIDE",
    ),
    *(
        "RANK",
        "MASTER_ADDR",
        "WORLD_SIZE",
        "PET_NNODES",
        "SLURM_PROCID",
        "MKL_CBWR",
        "PYTHONWARNINGS",
        "PYTHONHASHSEED",
    ),
}

KEYS = {"HF_TOKEN", "WANDB_API_KEY", "VLMFLOW_ANSWER_KEY", "AWS_SECRET_ACCESS_KEY"}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A shell with all these variables, and no others."""
    for name in os.environ:
        monkeypatch.delenv(name)
    for name in KEPT | CHANGES_WHAT_IS_TRAINED | KEYS:
        monkeypatch.setenv(name, name.lower())
    return monkeypatch


def names(*also: str) -> set[str]:
    given = child_environment(*also)
    assert given.items() >= OURS.items()
    return given.keys() - OURS.keys()


def test_what_changes_a_training_does_not_pass_and_no_key_does(shell: pytest.MonkeyPatch) -> None:
    assert names() == KEPT
    assert child_environment()["CXX"] == "cxx"


def test_the_configuration_lets_others_pass_by_name_or_beginning(shell: pytest.MonkeyPatch) -> None:
    shell.setenv(NAMED, "SLURM_* MKL_CBWR AWAY")
    assert names() == KEPT | {"SLURM_PROCID", "MKL_CBWR", NAMED}
    assert names("PET_*") == KEPT | {"SLURM_PROCID", "MKL_CBWR", NAMED, "PET_NNODES"}


def test_a_key_passes_only_by_its_own_name(shell: pytest.MonkeyPatch) -> None:
    assert names("HF_*", "WANDB_*", "AWS_*") == KEPT
    assert names("HF_TOKEN") == KEPT | {"HF_TOKEN"}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a module of a text, for `ask`, and gives its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(text: str) -> str:
        (tmp_path / "asked_program.py").write_text(f"import json, os, sys\n{text}")
        return "asked_program"

    return make


def test_it_answers_from_its_own_packages(module, capfd: pytest.CaptureFixture[str]) -> None:
    program = module(
        "import optuna\n"
        "from vlmflow.core.child_programs import answer_with\n"
        "def main(question):\n"
        "    print('on the way')\n"
        "    os.write(1, b'below Python')\n"
        "    return [question, optuna.__version__]\n"
        "answer_with(main)"
    )
    assert ask("search", program, {"ü": 1}) == [{"ü": 1}, "5.0.0"]
    said = capfd.readouterr().err
    assert "on the way" in said
    assert "below Python" in said


def test_it_gets_the_variables_that_are_named_for_it_alone(module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "x")
    program = module("json.dump([name for name, value in os.environ.items() if value == 'x'], sys.stdout)")
    assert ask("search", program, None, also=["MLFLOW_*"]) == ["MLFLOW_HTTP_REQUEST_TIMEOUT"]


def test_its_last_line_is_the_cause(module) -> None:
    program = module("print('first', file=sys.stderr)\nsys.exit('the server is away')")
    with pytest.raises(VlmflowError, match="the server is away") as caught:
        ask("search", program, "x" * 1_000_000)  # more than a pipe holds, which it never reads
    assert "first" in caught.value.next_step


@pytest.mark.parametrize("kind", [VlmflowError, PassingError])
def test_an_error_of_ours_is_raised_again(module, kind: type[VlmflowError]) -> None:
    program = module(
        "from vlmflow.core.errors import PassingError, VlmflowError\n"
        "from vlmflow.core.child_programs import answer_with\n"
        "def main(question):\n"
        f"    raise {kind.__name__}('the server said \\x1b[2J', 'ask again')\n"
        "answer_with(main)"
    )
    with pytest.raises(kind) as caught:
        ask("search", program, None)
    assert type(caught.value) is kind
    assert (caught.value.cause, caught.value.next_step) == ("the server said �[2J", "ask again")


def test_a_killed_program_may_succeed_another_time(module) -> None:
    with pytest.raises(PassingError, match="signal 9 ended it"):
        ask("search", module("os.kill(os.getpid(), 9)"), None)


@pytest.mark.parametrize("reads", [True, False])
def test_one_that_does_not_end_is_killed(module, reads: bool) -> None:
    program = module(f"import time\nprint('it waits', file=sys.stderr)\n{reads} and sys.stdin.read()\ntime.sleep(3600)")
    with pytest.raises(PassingError, match="asked_program: it did not end within 2 seconds") as caught:
        ask("search", program, "x" * 1_000_000, limit=2)
    assert "server" in caught.value.next_step


def test_one_that_ends_in_time_keeps_its_answer_and_its_error(module) -> None:
    assert ask("search", module("json.dump(1, sys.stdout)"), None, limit=600) == 1
    with pytest.raises(VlmflowError, match="the server is away") as caught:
        ask("search", module("sys.exit('the server is away')"), None, limit=600)
    assert type(caught.value) is VlmflowError


def test_what_it_prints_steers_no_terminal_and_holds_no_key(
    module, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "very-secret\n")
    program = module("print('it said \x1b[2J', 'Bearer very-secret', file=sys.stderr)\nsys.exit('\\tno very-secret')")
    with pytest.raises(VlmflowError, match=r"no \*\*\*") as caught:
        ask("search", program, None)
    said = capfd.readouterr().err
    assert "it said �[2J Bearer ***\n" in said
    assert "very-secret" not in said + str(caught.value)


def test_a_module_of_the_working_directory_is_not_imported(
    module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = module("import colorlog\njson.dump(colorlog.__file__, sys.stdout)")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "colorlog.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(tmp_path / "here")
    assert "site-packages" in ask("search", program, None)


def test_a_missing_environment_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_VENV_TRACK", str(tmp_path / "away"))
    with pytest.raises(VlmflowError) as caught:
        python_of("track")
    assert caught.value.next_step == "vlmflow env track"
    assert json.dumps(str(tmp_path / "away"))[1:-1] in caught.value.cause
