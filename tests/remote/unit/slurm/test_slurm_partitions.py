"""Slurm's commands, what counts as no answer, and what partitions can hold, read from what scontrol prints."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_commands import SlurmCommands
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.slurm import queue
from vlmflow.remote.slurm.partitions import (
    Node,
    Partition,
    read_partitions,
    refuse_plan,
    refuse_what_fits_nowhere,
    why_in_none,
    why_not,
)
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm
from vlmflow.remote.slurm.request import Request, gpus_in


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    return SlurmCommands(tmp_path, monkeypatch)


def refusal_of(*words: str) -> SlurmError:
    with pytest.raises(SlurmError) as refusal:
        ask(*words)
    return refusal.value


def test_an_answer_is_what_a_command_prints(slurm: SlurmCommands) -> None:
    slurm.do("sbatch", 'cat; echo "$MORE" "$1"')
    said = ask("sbatch", "a b; $(c)", script="#!/bin/sh\n", environment={"MORE": "more"})
    assert said == "#!/bin/sh\nmore a b; $(c)\n", "no shell reads the words"


@pytest.mark.parametrize(
    ("said", "outage"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("scontrol: error: Connection refused", True),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying: try again", True),
        *(
            (f"sbatch: error: Batch job submission failed: {busy}", True)
            for busy in (
                *("Unexpected message received", "Message receive failure", "Message send failure"),
                *("Slurm backup controller in standby mode", "Resource temporarily unavailable"),
                *("Transport endpoint is not connected", "Protocol authentication error"),
            )
        ),
        ("slurm_load_jobs error: Invalid job id specified", False),
        ("sbatch: error: invalid partition specified: gpus", False),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", False),
        ("sbatch: error: a word of tomorrow", None),
    ],
)
def test_an_outage_a_refusal_and_what_nobody_knows(slurm: SlurmCommands, said: str, outage: bool | None) -> None:
    slurm.answer("squeue", fails=f"{said}\n")
    refusal = refusal_of("squeue")
    assert (refusal.cause, refusal.outage, refusal.refusal) == (f"squeue: {said}", outage is True, outage is False)


def test_only_listed_variables_reach_slurms_commands(slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others change what it shows, and what it starts; a job has those of the shell that are not Slurm's."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("SQUEUE_PARTITION", "SBATCH_ARRAY_INX", "SLURM_JOB_ID", "SCANCEL_STATE", "MINE"):
        monkeypatch.setitem(os.environ, name, "x")
    monkeypatch.setitem(os.environ, "SLURM_CONF", "/etc/there")
    monkeypatch.setitem(os.environ, "SLURM_TIME_FORMAT", "relative")
    for name in ("squeue", "sbatch"):
        slurm.do(name, "env")
    asked = {line.partition("=")[0] for line in ask("squeue").splitlines()}
    submitted = {line.partition("=")[0] for line in ask("sbatch", script="").splitlines()}
    assert {"PATH", "SLURM_CONF", "SLURM_TIME_FORMAT"} <= asked & submitted
    assert asked - {"PWD", "SHLVL", "_"} <= {*queue.PASSED, "SLURM_TIME_FORMAT"}
    assert "MINE" in submitted
    assert not {"SBATCH_ARRAY_INX", "SLURM_JOB_ID"} & submitted


@pytest.mark.parametrize(
    ("answer", "fails", "state"),
    [
        ("JobId=7 JobName=a UserId=x(1) JobState=RUNNING Reason=None\n", "", "RUNNING"),
        ("", "slurm_load_jobs error: Invalid job id specified", ""),
    ],
)
def test_a_job_is_gone_only_if_slurm_says_so(slurm: SlurmCommands, answer: str, fails: str, state: str) -> None:
    slurm.answer("scontrol", answer, fails)
    assert queue.state_of("7") == state
    slurm.answer("scontrol", fails="Unable to contact slurm controller")
    with pytest.raises(SlurmError):
        queue.state_of("7")


def test_a_dry_run_plans_without_a_slurm_that_answers(slurm: SlurmCommands, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.answer("sbatch")
    plan = SimpleNamespace(remote_execution_settings=True, dryrun=True)
    slurm.answer("scontrol", fails="Unable to contact slurm controller (connect failure)")
    refuse_plan(plan, None)
    assert "this plan is not compared with a cluster" in capsys.readouterr().err
    plan.dryrun = False
    with pytest.raises(SystemExit, match="Unable to contact slurm controller"):
        refuse_plan(plan, None)


def test_jobs_are_those_of_the_users_number_whatever_name_the_shell_gives(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "games")
    slurm.answer("squeue")
    queue.jobs()
    assert f" --user={os.getuid()} " in slurm.calls("squeue")[0]


def test_a_command_that_does_not_answer_in_time_is_an_outage(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SECONDS", 0.1)
    slurm.do("squeue", "exec sleep 20")
    refusal = refusal_of("squeue")
    assert refusal.outage
    assert refusal.cause.startswith("squeue did not answer for ")


def test_a_command_that_is_not_there_or_says_nothing_is_named(
    slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.do("scontrol", "exit 7")
    assert refusal_of("scontrol").cause == "scontrol: code 7"
    slurm.answer("sbatch")
    refuse_without_slurm()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal_of("sbatch").cause == "this machine has no sbatch"
    with pytest.raises(VlmflowError, match="not a login node of a Slurm cluster"):
        refuse_without_slurm()


# As Slurm 22.05.8 of Debian 12 prints them, with typed GPUs, a node that a person has drained, and a closed partition.
PARTITIONS_22 = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node-a,node-b PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=32000M,node=2,billing=4
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=30 Hidden=NO MaxNodes=UNLIMITED MaxTime=02:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node-a,node-b PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=32000M,node=2,billing=4
PartitionName=urgent AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node-a,node-b PriorityJobFactor=1 PriorityTier=100 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=DOWN TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=32000M,node=2,billing=4
"""  # noqa: E501
NODES_22 = """\
NodeName=node-a Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.25 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:2 NodeAddr=10.232.0.11 NodeHostName=node-a Version=22.05.8 OS=Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 AllocMem=0 FreeMem=18730 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=cpu,gpu,urgent  BootTime=2026-11-27T08:23:12 SlurmdStartTime=2026-11-27T19:05:15 LastBusyTime=2026-11-27T19:05:15 CfgTRES=cpu=2,mem=16000M,billing=2 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=node-b Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.25 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:2 NodeAddr=10.232.0.12 NodeHostName=node-b Version=22.05.8 OS=Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 AllocMem=0 FreeMem=18729 Sockets=2 Boards=1 State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=cpu,gpu,urgent  BootTime=2026-11-27T08:23:12 SlurmdStartTime=2026-11-27T19:05:15 LastBusyTime=2026-11-27T19:05:15 CfgTRES=cpu=2,mem=16000M,billing=2 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s Reason=disk is full = bad, RealMemory=1 Partitions=none [root@2026-11-27T19:05:15]
"""  # noqa: E501
# The keys of 23.11 to 24.11, as sites publish them: a name with spaces, accounts, and what is kept for the system.
PARTITIONS_24 = """\
PartitionName=CPU nodes (amd) AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO MaxNodes=1 MaxTime=7-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=8 MaxCPUsPerSocket=UNLIMITED NodeSets=ALL Nodes=r01c[01-02] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=64 TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=3200 TRES=cpu=32,mem=500G,node=1,billing=32
PartitionName=a100 AllowGroups=ALL AllowAccounts=vision,Language AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO Exclusive=NO GraceTime=120 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-12:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=g[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=FORCE:1 OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=132 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerCPU=192 MaxMemPerNode=UNLIMITED TRES=cpu=120,mem=1000000M,node=2,billing=120,gres/gpu=8 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=2.0
"""  # noqa: E501
NODES_24 = """\
NodeName=g1 Arch=x86_64 CoresPerSocket=18 CPUAlloc=8 CPUEfctv=28 CPUTot=36 CPULoad=2.31 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:a100:4(S:0-1),lscratch:3570 NodeAddr=g1 NodeHostName=g1 Version=23.02.7 OS=Linux 5.15.0-91-generic #101-Ubuntu SMP RealMemory=512000 AllocMem=128000 FreeMem=401230 Sockets=2 Boards=1 CoreSpecCount=8 CPUSpecList=28-35 MemSpecLimit=16000 State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=a100 BootTime=2026-08-20T08:00:00 CfgTRES=cpu=28,mem=512000M,billing=28,gres/gpu=4,gres/gpu:a100=4 AllocTRES=cpu=8,mem=128000M,gres/gpu=2
NodeName=g2 Arch=x86_64 CoresPerSocket=48 CPUAlloc=0 CPUTot=96 CPULoad=0.01 Gres=gpu:a100:2(S:0,2),gpu:h100:2(S:1,3) RealMemory=256000 State=DOWN+CLOUD+NOT_RESPONDING Partitions=CPU nodes (amd),a100 Reason=Not responding [root@2026-08-20T08:00:07]
"""  # noqa: E501


@pytest.fixture(scope="module")
def small() -> dict[str, Partition]:
    return read_partitions(PARTITIONS_22, NODES_22)


@pytest.fixture(scope="module")
def large() -> dict[str, Partition]:
    return read_partitions(PARTITIONS_24, NODES_24)


def test_partitions_of_22_are_read(small: dict[str, Partition]) -> None:
    nodes = (Node("node-a", 2, 16_000, {"": 2}), Node("node-b", 2, 16_000, {"": 2}))
    assert list(small.values()) == [
        Partition("cpu", True, "UP", None, nodes, preempt_mode="REQUEUE"),
        Partition("gpu", False, "UP", 120, nodes, grace_seconds=30, preempt_mode="REQUEUE"),
        Partition("urgent", False, "DOWN", None, nodes),
    ]


def test_partitions_of_24_are_read(large: dict[str, Partition]) -> None:
    mixed = {"a100": 2, "h100": 2}
    assert large == {
        "CPU nodes (amd)": Partition(
            "CPU nodes (amd)", False, "UP", 10_080, (Node("g2", 8, 3_200, mixed),), max_nodes=1
        ),
        "a100": Partition(
            "a100",
            False,
            "UP",
            2_160,
            (Node("g1", 28, 496_000, {"a100": 4}), Node("g2", 96, 256_000, mixed)),
            accounts=frozenset({"vision", "language"}),
            grace_seconds=120,
            preempt_mode="REQUEUE",
        ),
    }


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:no_consume:2,nvme:3600", {"": 2}),
        ("gpu:nvidia_b200:4(S:0-1),gpu:nvidia_b200_2g.45gb:8(S:0,2)", {"nvidia_b200": 4, "nvidia_b200_2g.45gb": 8}),
        ("pfsdir:scratch:1,mygpu:3", {}),
    ],
)
def test_gpus_are_counted_by_model(gres: str, gpus: dict[str, int]) -> None:
    assert gpus_in(gres) == gpus


@pytest.mark.parametrize(
    ("where", "asked", "why"),
    [
        ("gpu", Request("x", threads=2, mem_mb=16_000, gpus=2, runtime=120, nodes=2), None),
        ("gpu", Request("x", threads=3, mem_mb=1), "3 cores on one node; its largest node has 2"),
        ("gpu", Request("x", mem_mb=256_000), "256,000 MB of memory on one node; its largest node has 16,000"),
        ("gpu", Request("x", mem_mb=1, gpus=3), "3 GPUs on one node; its largest node has 2"),
        ("gpu", Request("x", mem_mb=1, gpus=1, model="a100"), "1 GPU of a100 on one node; its nodes have none"),
        ("gpu", Request("x", mem_mb=1, runtime=121), "121 minutes; its limit is 120"),
        ("gpu", Request("x", mem_mb=1, runtime=121, warning=180), None),
        (
            "gpu",
            Request("x", mem_mb=1, nodes=3),
            "1 core, 1 MB of memory on each of 3 nodes; its nodes with all of that: 2",
        ),
        ("urgent", Request("x", mem_mb=1), "it is down: jobs wait there until an administrator opens it"),
        (
            "a100",
            Request("x", mem_mb=300_000, gpus=2, model="h100"),
            "1 core, 300,000 MB of memory, 2 GPUs of h100 on one node; its nodes with all of that: 0",
        ),
        ("a100", Request("x", mem_mb=1, account="bio"), "account bio; it is for language, vision"),
        ("a100", Request("x", mem_mb=1, account="Vision"), None),
        ("CPU nodes (amd)", Request("x", mem_mb=1, nodes=2), "2 nodes; a job may have 1 there"),
    ],
)
def test_why_a_partition_can_never_hold_a_job(
    small: dict[str, Partition], large: dict[str, Partition], where: str, asked: Request, why: str | None
) -> None:
    assert why_not((small | large)[where], asked) == why


def job(rule: str, threads: int = 1, **resources: Any) -> SimpleNamespace:
    """What is read of a job of Snakemake."""
    return SimpleNamespace(
        name=rule,
        rules=[rule],
        params=SimpleNamespace(run_store="stores/runs"),
        threads=threads,
        resources=resources,
        wildcards_dict={"run": "mine"},
        is_group=lambda: False,
    )


def test_what_a_job_asks_is_read_from_its_resources() -> None:
    train = job("train_model", 8, gpu=2, mem_mb=9, runtime=600, warning_seconds=180, slurm_partition="a,b", nodes=2)
    assert Request.of(train, "h100") == Request(
        "train_model",
        {"run": "mine"},
        threads=8,
        mem_mb=9,
        gpus=2,
        model="h100",
        nodes=2,
        runs="stores/runs/mine",
        runtime=600,
        warning=180,
        partitions=("a", "b"),
    )
    by_gres = job("evaluate", gres="gpu:a100:4", runtime=60, slurm_account="vision")
    assert Request.of(by_gres, None) == Request(
        "evaluate", {"run": "mine"}, gpus=4, model="a100", runtime=60, account="vision"
    )


def test_a_group_asks_for_its_largest_and_its_longest_stage() -> None:
    members = [job("fit_rows", 4, mem_mb=4_000, runtime=60), job("mix_rows", 1, mem_mb=8_000, runtime=30)]
    group = SimpleNamespace(
        groupid="data",
        rules=["fit_rows", "mix_rows"],
        jobs=members,
        threads=5,
        resources={"mem_mb": 12_000, "runtime": 90, "slurm_partition": "cpu"},
        is_group=lambda: True,
    )
    assert Request.of(group, None) == Request(
        "the group data", threads=4, mem_mb=8_000, runtime=60, partitions=("cpu",)
    )


def test_one_line_for_each_rule_that_fits_nowhere(small: dict[str, Partition]) -> None:
    fitting = job("fit_rows", 2, mem_mb=4_000, runtime=60)
    training = job("train_model", 2, mem_mb=4_000, gpu=1, runtime=9_999, warning_seconds=180, slurm_partition="gpu")
    refuse_what_fits_nowhere([fitting, training], small, None, None)
    large = job("train_model", 2, mem_mb=256_000, slurm_partition="gpu")
    long = job("evaluate", runtime=240, slurm_partition="gpu")
    with pytest.raises(VlmflowError) as refusal:
        refuse_what_fits_nowhere([fitting, large, large, long], small, None, None)
    lines = refusal.value.cause.splitlines()
    assert [line.partition(",")[0].strip() for line in lines[1:]] == ["train_model", "evaluate"]
    assert (
        "partition gpu: 256,000 MB of memory on one node; its largest node has 16,000: no other partition can"
        in lines[1]
    )
    assert "runs.mine.nodes, processes, device, train.dataloader_workers and resources" in lines[1]
    assert "240 minutes; its limit is 120: set `slurm_partition` of evaluate" in lines[2]
    assert "to cpu, or ask for less: " in lines[2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Request("x", mem_mb=1, partitions=("gpus",)), "x: there is no partition gpus: did you mean gpu?"),
        (Request("x", mem_mb=1, partitions=("urgent", "cpu")), None),
        (Request("x", mem_mb=1, account="bio"), "x: you have no account bio"),
        (Request("x", mem_mb=1, account="Vision"), None),
    ],
)
def test_unknown_partitions_and_accounts_are_named(
    small: dict[str, Partition], asked: Request, said: str | None
) -> None:
    refusal = why_in_none(asked, small, frozenset({"vision"}))
    assert (refusal and refusal[0]) == said


def test_without_a_default_partition_one_must_be_named(large: dict[str, Partition]) -> None:
    refusal = why_in_none(Request("x", mem_mb=1), large, None)
    assert refusal is not None
    assert refusal[0] == "x: it names no partition, and Slurm has no default one"
    assert refusal[1].endswith("to one of CPU nodes (amd), a100")
