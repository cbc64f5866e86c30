"""The doctor judges what Slurm tells, what its jobs saw, and a call's profile, configuration and plan."""

import fcntl
import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml

from slurm_commands import SlurmCommands
from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.slurm import doctor, on_node, probe
from vlmflow.remote.slurm.on_node import FirstNode, SecondNode
from vlmflow.remote.slurm.partitions import Node, Partition
from vlmflow.remote.slurm.probe import Probe, check_nodes, folders_of
from vlmflow.remote.slurm.request import Request
from vlmflow.remote.slurm.site import (
    check_accounting,
    check_accounts,
    check_controller,
    check_partition,
    check_preemption,
    check_run,
    check_settings,
    check_time,
    read_config,
)
from workflow_runs import ROOT

# Lines of `scontrol show config` of Slurm 22.05.8.
CONFIG = read_config("""\
Configuration data as of 2026-11-27T19:05:15
AccountingStorageEnforce = none
ClusterName             = test
JobRequeue              = 1
KillWait                = 30 sec
MinJobAge               = 300 sec
OverTimeLimit           = 0 min
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SchedulerParameters     = sched_interval=2,bf_interval=2
SLURM_VERSION           = 22.05.8
""")
NODES = (Node("a", 2, 16_000, {"": 2}), Node("b", 2, 16_000, {"": 2}))
GPU = Partition("gpu", False, "UP", 120, NODES, grace_seconds=30, preempt_mode="REQUEUE")
CPU = Partition("cpu", True, "UP", None, NODES)
TRAIN = Request(
    "train_model", {"run": "mine"}, threads=2, mem_mb=6_000, gpus=2, runtime=2_880, warning=180, partitions=("gpu",)
)
WORKING = Path("/shared/work")
NAMES = {WORKING: "the working directory (and 8 stores in it)", Path("/shared/runs"): "stores.runs"}
TRIED: dict[str, dict[str, str]] = {str(name): {} for name in NAMES}
SECOND = SecondNode("node-b", TRIED, "")
FIRST = FirstNode("node-a", 1000, "3.11.9", TRIED, "/scratch", 90_000, "", 8_000, "", SECOND, "")


def changed(**fields: object) -> FirstNode:
    return msgspec.structs.replace(FIRST, **fields)


def states(*findings: object) -> list[str]:
    return [getattr(finding, "state", "") for finding in findings]


def test_what_the_controller_and_accounting_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_controller(CONFIG).found == "22.05.8, cluster test; its controller answers"
    slurm = SlurmCommands(tmp_path, monkeypatch)
    slurm.answer("sacct", "1\n")
    assert check_accounting().found == "on: sacct answers"
    slurm.answer("sacct", fails="Slurm accounting storage is disabled")
    assert "off (sacct: Slurm accounting storage is disabled)" in check_accounting().found


@pytest.mark.parametrize(
    ("account", "of_user", "enforced", "state"),
    [
        (None, None, False, "ok"),
        ("bio", None, True, "ok"),
        ("bio", {"vision"}, True, "fail"),
        ("Vision", {"vision"}, True, "ok"),
        (None, {"vision", "bio"}, True, "warn"),
        (None, {"vision", "bio"}, False, "ok"),
    ],
)
def test_accounts_are_those_of_the_user(
    account: str | None, of_user: set[str] | None, enforced: bool, state: str
) -> None:
    requests = [Request("x", mem_mb=1, account=account)]
    assert check_accounts(requests, None if of_user is None else frozenset(of_user), enforced).state == state


def test_a_partition_is_shown_with_what_it_has() -> None:
    assert check_partition(GPU).found == "120 minutes at most; 2 nodes of 2 cores, 16 GB, 2 GPUs"
    closed = check_partition(Partition("old", False, "DOWN", None, NODES))
    assert (closed.state, closed.found.partition(":")[0]) == ("fail", "it is down")


def test_a_run_fits_or_each_refusal_is_a_finding() -> None:
    found = {"gpu": GPU, "cpu": CPU}
    (fine,) = check_run("mine", [TRAIN, Request("fit_rows", {"run": "mine"}, mem_mb=4_000, runtime=60)], found, None)
    assert (fine.state, fine.found) == (
        "ok",
        "each of its 2 jobs fits; the largest is train_model (2 cores, 6 GB, 2 GPUs)",
    )
    large = Request("merge_weights", {"run": "mine"}, threads=8, mem_mb=90_000)
    (refused,) = check_run("mine", [TRAIN, large, large], found, None)
    assert refused.found == "merge_weights, run mine, partition cpu: 8 cores on one node; its largest node has 2"
    assert refused.next_step.startswith("no other partition can hold it; ask for less: the rule's own threads")


@pytest.mark.parametrize(
    ("limit", "state", "words"),
    [
        (None, "ok", "run mine: 2,880 minutes; partition gpu has no limit"),
        (2_880, "ok", "run mine: 2,880 minutes; partition gpu has 2,880"),
        (120, "ok", "run mine: 2,880 minutes; partition gpu ends jobs after 120: 25 jobs, one after the other"),
        (4, "fail", "run mine: 2,880 minutes; partition gpu ends jobs after 4, which leaves no time to train"),
    ],
)
def test_a_training_above_the_time_limit_becomes_several_jobs(limit: int | None, state: str, words: str) -> None:
    """Of each job's 120 minutes the last 4 are for saving: the warning of 3, up to 1 early."""
    finding = check_time(TRAIN, Partition("gpu", False, "UP", limit, NODES))
    assert (finding.state, finding.found[: len(words)]) == (state, words)


@pytest.mark.parametrize(
    ("mode", "grace", "kind", "state", "words"),
    [
        ("REQUEUE", 30, "preempt/partition_prio", "warn", "30 s to save"),
        ("REQUEUE", 0, "preempt/partition_prio", "warn", "30 s to save"),
        ("REQUEUE", 300, "preempt/qos", "ok", "300 s to save"),
        ("CANCEL", 300, "preempt/qos", "ok", "Slurm does not bring a job back"),
        ("GANG,SUSPEND", 0, "preempt/partition_prio", "warn", "trainers are stopped"),
        ("OFF", 0, "preempt/partition_prio", "ok", "none"),
        ("REQUEUE", 0, "preempt/none", "ok", "none"),
    ],
)
def test_a_preemption_is_judged_by_the_time_that_it_leaves(
    mode: str, grace: int, kind: str, state: str, words: str
) -> None:
    partition = Partition("gpu", False, "UP", None, NODES, grace_seconds=grace, preempt_mode=mode)
    finding = check_preemption(partition, CONFIG | {"PreemptType": kind}, 180)
    assert (finding.state, words in finding.found) == (state, True), finding.found


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("KillWait", "5 sec", "KillWait"),
        ("MinJobAge", "2 sec", "MinJobAge"),
        ("ProctrackType", "proctrack/pgid", "processes of jobs"),
    ],
)
def test_settings_that_cost_something_are_named(key: str, value: str, what: str) -> None:
    assert set(states(*check_settings(CONFIG))) == {"ok"}
    assert [one.what for one in check_settings(CONFIG | {key: value}) if one.state == "warn"] == [what]


def test_an_answer_without_faults_is_ready() -> None:
    findings = list(check_nodes("gpu", FIRST, NAMES, 2, "https://huggingface.co"))
    assert set(states(*findings)) == {"ok"}
    assert [one.what for one in findings] == [
        *("jobs in gpu", "folders in gpu", "two nodes of gpu", "signals in gpu", "TMPDIR in gpu", "hub from gpu"),
    ]
    assert list(check_nodes("gpu", FIRST, NAMES, 1, ""))[2].state == "warn"


@pytest.mark.parametrize(
    ("first", "what", "state", "words"),
    [
        (
            changed(folders={"/shared/runs": {}}),
            "the working directory (and 8 stores in it) in gpu",
            "fail",
            "it was not tried",
        ),
        (
            changed(folders=FIRST.folders | {"/shared/runs": {"flock": "not implemented"}}),
            *("stores.runs in gpu", "fail", "user 1000 cannot lock files: not implemented"),
        ),
        (
            changed(folders=FIRST.folders | {"/shared/runs": {"\x1b[31mhostile": "\x1b[2J"}}),
            *("stores.runs in gpu", "fail", "cannot write: \ufffd[2J"),
        ),
        (changed(second=None, second_fault="srun: not found"), "two nodes of gpu", "fail", "no step ran: srun: not"),
        (
            changed(second=SecondNode("node-b", TRIED | {"/shared/runs": {"see": "No such file"}}, "")),
            *("two nodes of gpu", "fail", "stores.runs, from node-b, while node-a uses it: No such file"),
        ),
        (
            changed(second=SecondNode("node-b", TRIED | {"/shared/work": {"flock": "two nodes hold one lock"}}, "")),
            *("two nodes of gpu", "fail", "two nodes hold one lock"),
        ),
        (changed(second=SecondNode("b", TRIED, "no signal came")), "signals in gpu", "fail", "no signal came"),
        (changed(temporary_fault="AF_UNIX path too long"), "TMPDIR in gpu", "fail", "AF_UNIX path too long"),
        (changed(shared_memory_mb=64), "TMPDIR in gpu", "warn", "shm 0 GB"),
        (changed(hub="timed out"), "hub from gpu", "fail", "https://huggingface.co: timed out"),
    ],
)
def test_what_a_job_lacks_is_a_finding(first: FirstNode, what: str, state: str, words: str) -> None:
    findings = list(check_nodes("gpu", first, NAMES, 2, "https://huggingface.co"))
    (wrong,) = [one for one in findings if one.state != "ok"]
    assert (wrong.what, wrong.state) == (what, state)
    assert words in wrong.found
    assert wrong.next_step


@pytest.mark.parametrize(
    ("squeue", "output", "state", "words"),
    [
        ("PENDING|Resources", None, "warn", "it still waits after 0 s: all that it could use is taken"),
        ("PENDING|PartitionTimeLimit", None, "fail", "its job never starts: its time limit is above"),
        ("FAILED|None", None, "fail", "its job is FAILED: its node wrote no output"),
        ("FAILED|None", "env: python: \x1b not found", "fail", "its job is FAILED: env: python: \ufffd not found"),
        ("FAILED|None", "", "fail", "its job is FAILED: it printed nothing"),
        ("", f"a warning\n{msgspec.json.encode(FIRST).decode()}\n", "", ""),
    ],
)
def test_a_job_that_says_nothing_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, output: str | None, state: str, words: str
) -> None:
    monkeypatch.setattr(probe, "PAUSE", 0.0)
    slurm = SlurmCommands(tmp_path, monkeypatch)
    slurm.answer("scancel")
    slurm.answer("sbatch", "7\n")
    slurm.answer("squeue", f"7|{squeue}||0:00|2026-11-27T19:00:00||vlmflow-doctor\n" if squeue else "")
    with Probe(GPU, None, tmp_path, [], "") as started:
        if output is not None:
            started._output.write_text(output)
        answer = started.answer(0)
    assert answer == FIRST if not state else (answer.what, answer.state) == ("jobs in gpu", state)
    assert not state or words in answer.found
    assert slurm.calls("scancel") == ["scancel 7"]
    assert list(tmp_path.glob(".doctor*")) == []


def test_a_refused_job_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmCommands(tmp_path, monkeypatch)
    slurm.answer("sbatch", fails="sbatch: error: invalid account")
    with Probe(GPU, "mine", tmp_path, [], "") as started:
        answer = started.answer(0)
    assert (answer.state, answer.found) == ("fail", "sbatch: sbatch: error: invalid account")
    assert slurm.calls("scancel") == []


def test_folders_to_try_are_those_that_are_there(tmp_path: Path) -> None:
    work, runs = tmp_path / "work", tmp_path / "runs"
    work.mkdir()
    runs.mkdir()
    stores = {"raw": "stores/raw", "models": "stores/models", "runs": str(runs / "deep" / "er")}
    assert folders_of(work, stores) == {work: "the working directory (and 2 stores in it)", runs: "stores.runs"}


def test_the_second_look_finds_a_lock_that_is_held_elsewhere_and_one_that_is_not(tmp_path: Path) -> None:
    assert on_node.leave(str(tmp_path), ".doctor-1") == {}
    place = tmp_path / ".doctor-1"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert on_node.look(place) == {}
    assert on_node.look(place) == {"flock": "two nodes hold one lock"}
    (place / "hard-link").unlink()
    assert list(on_node.look(place)) == ["see"]


def test_sockets_fit_in_a_short_folder_only(tmp_path: Path) -> None:
    assert on_node.no_socket(Path(tempfile.gettempdir())) == ""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    assert "too long" in on_node.no_socket(deep)
    assert list(deep.iterdir()) == []


def test_an_address_that_does_not_answer_is_named() -> None:
    assert "refused" in on_node.no_answer("http://127.0.0.1:9")
    assert "unknown url type" in on_node.no_answer("nonsense")


PROFILE = str(ROOT / "profiles/slurm")
DEMO = [ROOT / "profiles/demo/run.yaml"]


def settings_of(*files: Path) -> Config:
    return check_config(read_layers([ROOT / "config.yaml", *files]), [*files])


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("nowhere", "profile directory given (nowhere)"),
        (str(ROOT / "profiles/kubernetes"), "its executor is kubernetes"),
        (str(ROOT / "profiles/demo"), "its executor is none"),
    ],
)
def test_a_profile_that_is_none_of_slurm_is_refused(profile: str, said: str) -> None:
    with pytest.raises(VlmflowError) as refusal:
        doctor.read_profile(profile, [])
    assert said in refusal.value.cause


@pytest.mark.parametrize(
    ("run", "folder", "path", "said"),
    [
        ("mine", ".", "/usr/bin", "--run: unknown run mine"),
        ("qwen3vl-fire", "nowhere", "/usr/bin", "nowhere: no such folder"),
        ("qwen3vl-fire", ".", "/nowhere", "this machine has no sbatch"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    run: str, folder: str, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path)
    with pytest.raises(VlmflowError) as refusal:
        doctor.main(DEMO, [run], PROFILE, Path(folder), 180, as_json=False)
    assert said in refusal.value.cause
    assert "\n" not in refusal.value.cause


def test_the_plan_has_the_jobs_of_slurm_with_the_profiles_resources(tmp_path: Path) -> None:
    """Stages that fetch run on the login node, and those that make data share a job."""
    (tmp_path / "sample" / "pictures").mkdir(parents=True)
    (tmp_path / "tiny-model").mkdir()
    for file in ("tiny-model/model.safetensors", "sample/FIRE-train-100K.json", "sample/FIRE-test.json"):
        (tmp_path / file).touch()
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    profile["set-resources"]["train_model"] |= {"slurm_partition": "a100,h100"}
    profile["default-resources"]["slurm_account"] = "vision"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump(profile))
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump({"slurm": {"gpu_model": "a100"}}))
    options = doctor.read_profile(str(tmp_path / "mine"), [*DEMO, tmp_path / "gpu.yaml"])
    planned = doctor.planned(options, settings_of(*options.configfile), "qwen3vl-fire", tmp_path)
    requests = {request.rule: request for request, _ in planned}
    assert {"train_smoke", "train_model", "merge_weights", "verify_merged", "the group data"} <= set(requests)
    assert not [rule for rule in requests if rule.startswith("fetch_")]
    train = requests["train_model"]
    assert (train.run, train.partitions, train.account, train.model) == (
        "qwen3vl-fire",
        ("a100", "h100"),
        "vision",
        "a100",
    )
    assert (train.threads, train.mem_mb, train.gpus, train.runtime, train.warning) == (2, 6_000, 0, 30, 180)
    assert requests["merge_weights"].partitions == ("cpu",)
    assert requests["merge_weights"].warning == 0
    (words,) = [words for request, words in planned if request.rule == "train_model"]
    assert {"sbatch", "a100,h100", "vision", "--mem", "6000", "--signal=TERM@180"} <= set(words)
