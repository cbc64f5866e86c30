import fcntl
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.exceptions import WorkflowError

from harness import code_digest, stale_lock
from harness.targets import raw_source, splits_of
from vlmflow.config.model import check_config

STAGE = """
from pathlib import Path
from harness.stage import run_stage
from vlmflow.errors import VlmflowError

def main(*, source: Path, target: Path, words: list[str], times: int = 2) -> None:
    '''Write words.'''
    if not words:
        raise VlmflowError(f"{source}: no words", "give some")
    target.write_text(source.read_text() + " ".join(words) * times + str(1 // (times - 3))[:0])

if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
"""
SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    for name, text in {
        "pack/__init__.py": "",
        "pack/a.py": "from pack.b import f\n",
        "pack/b.py": "def f(): return 1\n",
        "pack/c.py": "",
        "one.py": "import os\nfrom pack.a import f\n",
        "two.py": "import pack.c\n",
        "three.py": "from pack import b\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_changed_module_changes_the_digest_of_the_scripts_that_import_it(scripts: Path) -> None:
    """However deep it is imported; and of no other script."""
    names = ["one", "two", "three"]
    before = {name: code_digest.of_scripts(scripts)(name) for name in names}
    (scripts / "pack" / "b.py").write_text("def f(): return 2\n")
    after = {name: code_digest.of_scripts(scripts)(name) for name in names}
    assert [name for name in names if before[name] != after[name]] == ["one", "three"]
    (scripts / "pack" / "b.py").write_text("def f(): return 1\n")
    assert {name: code_digest.of_scripts(scripts)(name) for name in names} == before


def test_every_script_of_a_rule_has_a_digest_over_the_library() -> None:
    of_script = code_digest.of_scripts(SCRIPTS)
    digests = {script.stem: of_script(script.stem) for script in SCRIPTS.glob("*.py")}
    assert len(set(digests.values())) == len(digests)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "stage.py"
    script.write_text(textwrap.dedent(STAGE))
    return subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SCRIPTS)},
        check=False,
    )


def test_a_script_runs_alone_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("> ")
    done = run(tmp_path, "--source", f"{tmp_path}/s", "--target", f"{tmp_path}/t", "--words", "[a, b]", "--times", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t").read_text() == "> a b"


def test_a_failing_stage_ends_with_cause_and_next_step(tmp_path: Path) -> None:
    done = run(tmp_path, "--source", "s", "--target", "t", "--words", "[]", "--log", f"{tmp_path}/log")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == ["the stage failed: s: no words", "  what to do: give some"]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "log").read_text().endswith(done.stderr)


def test_an_unforeseen_failure_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    words = ["--source", f"{tmp_path}/s", "--target", f"{tmp_path}/t", "--words", "[a]", "--times", "3"]
    done = run(tmp_path, *words, "--log", f"{tmp_path}/log")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x" * 100)
    done = run(tmp_path, "--source", f"{tmp_path}/s", "--target", "/dev/full", "--words", "[a]")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.splitlines()[-1] == "  what to do: free disk there, and run the same command again"


def workflow(**values: bool) -> SimpleNamespace:
    return SimpleNamespace(**({"is_main_process": True, "dryrun": False} | values))


def test_a_lock_that_nobody_holds_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stale_lock, "_held", [])
    lock = tmp_path / ".snakemake" / "locks" / "0.input.lock"
    lock.parent.mkdir(parents=True)
    for left_alone in ({"dryrun": True}, {"is_main_process": False}):
        lock.touch()
        stale_lock.clear(workflow(**left_alone))
        assert lock.exists()
    with (tmp_path / ".snakemake" / "vlmflow.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        stale_lock.clear(workflow())
        assert lock.exists()
    stale_lock._held.clear()
    stale_lock.clear(workflow())
    assert not lock.exists()


def test_raw_files_know_their_source() -> None:
    settings = check_config(
        {
            "models": {"m": {"source": "x", "model_type": "t"}},
            "datasets": {
                "fire": {"kind": "fire", "train": "hf://datasets/a/b/t.json", "test": "/x/e.json"},
                "volcano": {"kind": "volcano", "train": "v.json"},
            },
            "runs": {"r": {"model": "m", "dataset": "fire"}},
        },
        [],
    )
    assert splits_of(settings, "fire") == ["train", "test"]
    assert splits_of(settings, "volcano") == ["train"]
    source = raw_source(settings)
    assert source(SimpleNamespace(dataset="fire", file="t.json")) == "hf://datasets/a/b/t.json"
    assert source(SimpleNamespace(dataset="volcano", file="v.json")) == "v.json"
    with pytest.raises(WorkflowError, match=r"it has raw/fire/t\.json, raw/fire/e\.json"):
        source(SimpleNamespace(dataset="fire", file="x.json"))
