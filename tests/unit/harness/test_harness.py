import ctypes
import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmflow.config.model import check_config
from vlmflow.core.errors import PassingError, of_system
from vlmflow.harness import patches
from vlmflow.harness.inputs import RuleInputs, as_inputs, splits_of
from vlmflow.harness.params import RuleParams
from workflow_runs import ROOT

STAGE = """
from pathlib import Path
from vlmflow.harness.stage import run_stage
from vlmflow.core.errors import InterruptedTrainingError, PassingError, VlmflowError

def main(*, source: Path, target: Path, words: list[str], times: int = 2) -> None:
    '''Write words.'''
    if not words:
        raise VlmflowError(f"{source}: no words", "give some")
    if words == ["later"]:
        raise PassingError("the hub is away", "run it later")
    if words[0] in ("saved", "lost"):
        raise InterruptedTrainingError("interrupted", "run it again", saved=words[0] == "saved")
    target.write_text(source.read_text() + " ".join(words) * times + str(1 // (times - 3))[:0])

if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
"""
SCRIPTS = ROOT / "scripts"


def test_no_line_of_a_rule_is_longer_than_120_characters() -> None:
    """Neither ruff nor snakefmt checks their comments and strings."""
    files = [SCRIPTS.parent / "Snakefile", *(SCRIPTS.parent / "rules").glob("*.smk")]
    assert [(file.name, line) for file in files for line in file.read_text().splitlines() if len(line) > 120] == []


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "stage.py"
    script.write_text(textwrap.dedent(STAGE))
    return subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SCRIPTS), "VLMFLOW_VERDICT": str(folder / "verdict")} | variables,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("[]", {"again": False}),
        ("5", {"again": False}),
        ("[later]", None),
        ("[a]", None),
        ("[saved]", {"saved": True}),
        ("[lost]", {"saved": False}),
    ],
    ids=[
        *("a failure by its own word", "a wrong parameter", "a passing failure", "one that is not foreseen"),
        *("a training that saved", "a training that saved nothing"),
    ],
)
def test_a_stage_reports_failures_that_would_repeat_and_what_it_saved(
    tmp_path: Path, words: str, said: dict[str, bool] | None
) -> None:
    (tmp_path / "s").touch()
    target = tmp_path / "t"
    done = run(tmp_path, "--source", f"{tmp_path}/s", "--target", f"{target}", "--words", words, "--times", "3")
    assert done.returncode == 1
    verdict = tmp_path / "verdict"
    assert (json.loads(verdict.read_text()) if verdict.exists() else None) == said


def test_a_second_process_of_a_job_refuses_to_make_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    words = ["--source", f"{tmp_path}/s", "--target", f"{tmp_path}/t", "--words", "[a]", "--times", "1"]
    done = run(tmp_path, *words, SLURM_PROCID="1", SLURM_JOB_ID="77")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "the stage failed: this is process 1 of job 77: Slurm has started this stage more than once",
        "  what to do: give the job one task: srun --ntasks=1",
    ]
    assert not (tmp_path / "t").exists()
    assert json.loads((tmp_path / "verdict").read_text()) == {"again": False}
    assert run(tmp_path, *words, SLURM_PROCID="0", SLURM_JOB_ID="77").returncode == 0


def test_a_full_disk_may_have_room_later(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x" * 100)
    run(tmp_path, "--source", f"{tmp_path}/s", "--target", "/dev/full", "--words", "[a]")
    assert not (tmp_path / "verdict").exists()


def test_a_script_runs_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("> ")
    done = run(tmp_path, "--source", f"{tmp_path}/s", "--target", f"{tmp_path}/t", "--words", "[a, b]", "--times", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t").read_text() == "> a b"


OF_SETTINGS = """
from pathlib import Path
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import PartOf
from vlmflow.harness.stage import run_stage

def main(*, target: Path, settings: PartOf[DatasetSettings]) -> None:
    target.write_text(f"{settings.seed + 1} {settings.one_prompt} {settings.row_limits.max_turns}")

run_stage(main)
"""


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("{seed: 1e3, one_prompt: true, row_limits: {max_turns: 8}}", ""),
        ("{seed: 1e3, kind: text, row_limits: {max_turns: 8}}", ""),
        ("{seed: 1000, row_limits: {}}", "settings: kind is missing"),
        ("{seed: -1}", "settings.seed: -1: Input should be greater than or equal to 0"),
        ("{one_prompt: 7}", "settings.one_prompt: 7: Input should be a valid boolean, unable to interpret input"),
        ("{sede: 1}", "settings.sede: 1: Extra inputs are not permitted"),
        ("{row_limits: {max_turn: 8}}", "settings.row_limits.max_turn: 8: Extra inputs are not permitted"),
        ("7", "settings: 7: Input should be a valid dictionary or instance of DatasetSettings"),
    ],
)
def test_a_part_of_the_settings_has_the_given_keys_as_their_class_declares_them(
    tmp_path: Path, given: str, fault: str
) -> None:
    (tmp_path / "stage.py").write_text(OF_SETTINGS)
    words = [sys.executable, str(tmp_path / "stage.py"), "--target", str(tmp_path / "made"), "--settings", given]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SCRIPTS)}
    )
    if fault:
        assert done.returncode == 1
        assert f"the stage failed: {fault}" in done.stderr
    else:
        assert (tmp_path / "made").read_text() == "1001 True 8", done.stderr


def test_a_failing_stage_ends_with_cause_and_next_step(tmp_path: Path) -> None:
    done = run(tmp_path, "--source", "s", "--target", "t", "--words", "[]", "--log", f"{tmp_path}/log")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == ["the stage failed: s: no words", "  what to do: give some"]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "log").read_text().endswith(done.stderr)


def test_a_failing_stage_says_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """Its words may be a row's or a server's."""
    done = run(tmp_path, "--source", "a\x1b[2Jb", "--target", "t", "--words", "[]")
    assert done.stderr.splitlines()[-2:] == ["the stage failed: a�[2Jb: no words", "  what to do: give some"]


def in_rule(folder: Path, rule: str, inputs: str, **variables: str) -> str:
    """Run the stage in a rule whose wildcard `run` is my.run; returns what Snakemake says."""
    (folder / "Snakefile").write_text(
        f"rule {rule}:\n"
        f"    input: {inputs}\n"
        '    output: target="made/{run}"\n'
        "    params: words=[]\n"
        '    script: "stage.py"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--directory", str(folder), "--cores", "1", "made/my.run"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SCRIPTS), "HOME": str(folder), "PATH": os.environ["PATH"]} | variables,
        cwd=folder,
        check=False,
    )
    return done.stderr


@pytest.mark.lengthy
def test_a_stage_that_trains_refuses_a_temporary_folder_too_long_for_sockets(tmp_path: Path) -> None:
    """As a job on another machine of a batch system, where the plan was not made; others have no sockets."""
    (folder := tmp_path / ("x" * 90)).mkdir()
    (tmp_path / "s").touch()
    (tmp_path / "stage.py").write_text(STAGE)
    for rule, said in (("train_smoke", f"TMPDIR: {folder} has more than"), ("words", "no words")):
        assert said in in_rule(tmp_path, rule, 'source="s"', TMPDIR=str(folder))


@pytest.mark.lengthy
def test_a_next_step_names_its_run_data_set_and_model(tmp_path: Path) -> None:
    text = STAGE.replace("give some", "set datasets.NAME.a, runs.NAME.b, runs.NAME.c or models.NAME.d")
    more = "source: Path, stats: Path | None = None, model_files: Path | None = None"
    (tmp_path / "stage.py").write_text(text.replace("source: Path", more))
    for name in ("s", "data/fire/stats.json", "model_files/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    said = in_rule(tmp_path, "words", 'source="s", stats="data/fire/stats.json", model_files="model_files/a"')
    assert "  what to do: set datasets.fire.a, runs.my.run.b, runs.my.run.c or models.a.d\n" in said, said


@pytest.mark.lengthy
def test_a_stage_without_an_input_that_others_have_says_what_failed(tmp_path: Path) -> None:
    """A rule may have a named input that is an empty list."""
    text = STAGE.replace("source: Path", "source: Path, stats: list[Path] | None = None")
    (tmp_path / "stage.py").write_text(text)
    (tmp_path / "s").touch()
    said = in_rule(tmp_path, "words", 'source="s", stats=[]')
    assert "what to do: give some" in said, said
    assert "TypeError" not in said


def test_an_unforeseen_failure_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    words = ["--source", f"{tmp_path}/s", "--target", f"{tmp_path}/t", "--words", "[a]", "--times", "3"]
    done = run(tmp_path, *words, "--log", f"{tmp_path}/log")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_full_disk_is_reported_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x" * 100)
    done = run(tmp_path, "--source", f"{tmp_path}/s", "--target", "/dev/full", "--words", "[a]")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.splitlines()[-1] == "  what to do: free disk space there, then run the same command again"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EDQUOT, "free disk space"),
        (errno.EROFS, "let this user read and write"),
        (errno.ENOSYS, "no file locks"),
        (errno.ESTALE, "look at the disk"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_an_error_of_the_system_names_its_path_and_the_next_step(number: int, advice: str) -> None:
    error = of_system(OSError(number, os.strerror(number), "/data/x"), "one of the outputs")
    assert error is not None
    assert error.cause == f"{os.strerror(number)}: '/data/x'"
    assert advice in error.next_step
    nameless = of_system(OSError(number, os.strerror(number)), "a.json, b.json")
    assert nameless is not None
    assert nameless.cause.endswith(": 'a.json, b.json'")
    assert of_system(OSError("no number"), "x") is None


def workflow(**values: bool) -> SimpleNamespace:
    return SimpleNamespace(**({"is_main_process": True, "dryrun": False} | values))


def test_a_volume_without_file_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patches.fcntl, "flock", flock)
    with pytest.raises(PassingError, match=rf"{tmp_path}/\.snakemake/vlmflow\.lock'\n  what to do: .*no file locks"):
        patches.clear(workflow())


def test_a_lock_that_nobody_holds_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patches, "_held", [])
    lock = tmp_path / ".snakemake" / "locks" / "0.input.lock"
    lock.parent.mkdir(parents=True)
    for left_alone in ({"dryrun": True}, {"is_main_process": False}):
        lock.touch()
        patches.clear(workflow(**left_alone))
        assert lock.exists()
    with (tmp_path / ".snakemake" / "vlmflow.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        patches.clear(workflow())
        assert lock.exists()
    patches._held.clear()
    patches.clear(workflow())
    assert not lock.exists()


def test_raw_files_know_their_source() -> None:
    settings = check_config(
        {
            "models": {"m": {"source": "x", "model_type": "qwen3", "template": "qwen3"}},
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
    source = RuleParams(settings).raw_source
    assert source(SimpleNamespace(dataset="fire", file="t.json")) == "hf://datasets/a/b/t.json"
    assert source(SimpleNamespace(dataset="volcano", file="v.json")) == "v.json"
    with pytest.raises(SystemExit, match=r"ask for one of raw/fire/t\.json, raw/fire/e\.json"):
        source(SimpleNamespace(dataset="fire", file="x.json"))


def test_a_base_waits_for_the_run_that_makes_it_and_its_small_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and estimate of the second run are known before the first is trained.

    The weights are no param: these would change between the plan, when they are not there, and the next call.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "merged/first"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(b"")
    settings = check_config(
        {
            "models": {
                name: {"source": at, "model_type": "qwen3", "template": "qwen3"}
                for name, at in (("m", "x"), ("n", "merged/first"))
            },
            "datasets": {"text": {"kind": "fire", "train": "t.json"}},
            "runs": {name: {"model": m, "dataset": "text"} for name, m in (("first", "m"), ("second", "n"))},
        },
        [],
    )
    inputs, (local, made) = RuleInputs(None, settings), (SimpleNamespace(model=name) for name in ("m", "n"))
    assert (inputs.base_run(made), inputs.files_of_base_run(made)) == (["merged/first"], ["model_files/m"])
    assert inputs.local_model(made) == inputs.base_run(local) == inputs.files_of_base_run(local) == []
    state = RuleParams(settings).model_state
    assert (len(state(local)), state(made)) == (1, [])


@pytest.mark.parametrize(
    ("test", "near", "files", "distance"),
    [
        ("b.json", {}, 2, 0),
        ("b.json", {"picture_distance": 6}, 2, 0),
        ("b.json", {"picture_distance": 6, "drop": True}, 2, 6),
        (None, {"drop": True}, 1, 4),
    ],
)
def test_a_data_set_has_hashes_of_its_splits_and_validation_a_distance_if_it_drops_by_them(test, near, files, distance):
    block = {"kind": "fire", "train": "a.json", "test": test, "near_duplicates": near}
    settings = check_config(
        {
            "models": {"m": {"source": "hf://Qwen/Qwen3-8B", "model_type": "qwen3"}},
            "datasets": {"fire": block},
            "runs": {name: {"model": "m", "dataset": "fire"} for name in ("r", "s")},
        },
        [],
    )
    wildcards = SimpleNamespace(dataset="fire")
    expected = ["images/fire/train.hashes.jsonl", "images/fire/test.hashes.jsonl"][:files]
    named = SimpleNamespace(config_settings=SimpleNamespace(overwrite_config={"stores": {}}))
    inputs = RuleInputs(named, settings)
    assert inputs.hashes(wildcards) == expected
    given = RuleParams(settings).dataset(near_duplicates="near_duplicates_to_drop")(wildcards)
    assert given["picture_distance"] == distance
    pages = ["data-fire", *(f"{page}-{run}" for run in ("r", "s") for page in ("lengths", "estimate", "run"))]
    assert inputs.everything() == ["merged/r", "merged/s", *(f"reports/{page}.html" for page in pages)]
    named.config_settings.overwrite_config["runs"] = {"s": {"processes": 2}}
    assert inputs.everything() == ["merged/s", *(f"reports/{page}.html" for page in [pages[0], *pages[4:]])]


def test_a_mixture_needs_the_files_of_its_data_sets() -> None:
    settings = check_config(
        {
            "models": {"m": {"source": "x", "model_type": "qwen3_vl"}},
            "datasets": {
                "fire": {"kind": "fire", "train": "t.json", "test": "e.json", "fixed_rows": "/x/fixed.jsonl"},
                "chats": {"kind": "messages", "modality": "text", "train": "c.jsonl"},
                "blend": {"mix": {"chats": "30%", "fire": "all"}},
                "texts": {"mix": {"chats": "all"}},
            },
            "runs": {"r": {"model": "m", "dataset": "blend"}, "t": {"model": "m", "dataset": "texts"}},
        },
        [],
    )
    inputs, blend = RuleInputs(None, settings), SimpleNamespace(dataset="blend")
    assert inputs.of_members("train.jsonl", "val.jsonl")(blend) == [
        f"data/{name}/{split}.jsonl" for name in ("chats", "fire") for split in ("train", "val")
    ]
    assert inputs.member_pictures(blend) == ["images/fire/train.jsonl", "images/fire/test.jsonl"]
    assert inputs.hashes(blend) == ["images/fire/train.hashes.jsonl", "images/fire/test.hashes.jsonl"]
    assert inputs.manifests(blend) == [f"images/blend/{split}.jsonl" for split in ("train", "val", "test")]
    run, texts = SimpleNamespace(run="r"), SimpleNamespace(run="t")
    assert inputs.train_pictures(run) == ["images/blend/train.jsonl", "images/blend/val.jsonl"]
    assert inputs.run_pictures(texts) == []
    assert inputs.raw_gold("train")(run) == ["raw/fire/t.json"]
    assert inputs.raw_gold("train")(texts) == []
    assert settings.good_run("blend") is None
    settings.mixtures["blend"].members["fire"] = settings.raw_datasets["fire"].model_copy(update={"skip_images": True})
    with pytest.raises(
        SystemExit, match=r"^datasets\.fire\.skip_images: .*; mixture blend would have unchecked pictures"
    ):
        inputs.of_members("train.jsonl")(blend)
    with pytest.raises(SystemExit, match=r"^datasets\.fire\.skip_images: .*; run r would train on unchecked pictures"):
        inputs.data("train.jsonl")(run)


def said_without_rights(act: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> str:
    """Return with what text a child exits that may do only what the modes of files allow, also one of root."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability
        try:
            act()
        except SystemExit as ended:
            print(ended, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return capfd.readouterr().out


@pytest.mark.parametrize("closed", ["model/config.json", "model", "."])
def test_a_model_that_may_not_be_read_is_named(tmp_path: Path, closed: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    models = {"m": {"source": f"{tmp_path}/model", "model_type": "qwen3"}}
    settings = check_config({"models": models, "datasets": {}, "runs": {}}, [])
    inputs = RuleInputs(None, settings)
    (tmp_path / closed).chmod(0)
    said = said_without_rights(lambda: inputs.local_model(SimpleNamespace(model="m")), capfd)
    (tmp_path / closed).chmod(0o700)
    named = tmp_path / ("model/config.json" if closed.endswith("json") else "model")
    assert said == f"{named}: this user may not read it\n  what to do: let this user read it, and enter its folders\n"


def test_a_working_folder_that_may_not_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    assert said_without_rights(patches.make_folders, capfd).startswith(
        f"Permission denied: '{tmp_path}/.snakemake'\n  what to do: let this user read and write there"
    )


def test_a_local_source_of_the_future_is_refused_with_what_mends_it(tmp_path: Path) -> None:
    """Archives from a time zone ahead, and file systems with another clock, have such files."""
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    local = SimpleNamespace(storage_registry=SimpleNamespace(default_storage_provider=None))
    assert as_inputs(local, [file, tmp_path / "gone"]) == [str(file), str(tmp_path / "gone")]
    os.utime(file, (0, time.time() + 86_400))
    with pytest.raises(SystemExit) as ended:
        as_inputs(local, [file])
    said, advice = str(ended.value).split("\n  what to do: set it to now: ")
    assert re.fullmatch(rf"{re.escape(str(file))}: its time, 20\S+ \S+, is in the future by this machine's clock", said)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(SystemExit):
        as_inputs(local, [link])
    subprocess.run(advice.split(), check=True)
    assert as_inputs(local, [file]) == [str(file)]
