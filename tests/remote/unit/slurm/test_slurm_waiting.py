"""Slurm's reasons, in words."""

from pathlib import Path

import pytest

from vlmflow.remote.slurm.waiting import reason_in_words, starts_by_itself, will_not_start

REASONS = Path(__file__).with_name("reasons.txt").read_text().split()
"""All words of Slurm's documentation of 24.11, and of the library of 22.05."""

DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"


def test_every_word_of_the_documentation_is_explained() -> None:
    assert len(REASONS) > 190
    assert [reason for reason in REASONS if reason_in_words(reason) == reason] == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "all that it could use is taken"),
        ("QOSMaxJobsPerUserLimit", "its QOS allows each user no more running jobs at a time"),
        ("QOSMaxSubmitJobPerUserLimit", "its QOS allows each user no more running and waiting jobs at a time"),
        ("QOSMaxGRESPerUser", "its QOS allows each user no more GPUs (GRES) at a time"),
        ("MaxGRESPerAccount", "its QOS allows each account no more GPUs (GRES) at a time"),
        ("AssocMaxJobsLimit", "its account allows each user no more running jobs at a time"),
        ("AssocGrpGRES", "the jobs of its account together use all GPUs (GRES) that it allows"),
        ("AssocGrpGRESRunMinutes", "the jobs of its account together use all minutes of GPUs (GRES) that it allows"),
        ("AssocGrpCPUMinutesLimit", "its account has used up its minutes of cores"),
        ("QOSMaxGRESPerNode", "it asks for more GPUs (GRES) than its QOS allows a node of a job"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more time than its QOS allows a job"),
        ("AssocMaxCpuMinutesPerJobLimit", "it asks for more minutes of cores than its account allows a job"),
        ("QOSMinCpuNotSatisfied", "its QOS asks for more cores than the job does"),
        ("QOSMinMemory", "its QOS asks for more memory than the job does"),
        ("AssociationResourceLimit", "its account allows no more resources"),
        ("ReqNodeNotAvail, UnavailableNodes:node-b", "the nodes that it may use are reserved or down"),
        (DOWN, "the nodes that it needs are down, drained"),
        ("launch failed requeued held", "a node failed to start it"),
    ],
)
def test_a_reason_is_explained(reason: str, words: str) -> None:
    assert reason_in_words(reason).startswith(words)


def test_details_are_kept_and_an_unknown_word_is_shown_as_it_is() -> None:
    assert reason_in_words("ReqNodeNotAvail, UnavailableNodes:node-b").endswith(" (UnavailableNodes:node-b)")
    assert reason_in_words("ReqNodeNotAvail, May be reserved for other job").endswith(
        " (May be reserved for other job)"
    )
    assert "DRAINED" not in reason_in_words(DOWN)
    for reason in ("NewIn30", "some text of an administrator, as it is", "QOSMaxTeaPerUser", ""):
        assert reason_in_words(reason) == reason


def test_which_jobs_never_start_and_which_need_a_person() -> None:
    never = {reason for reason in REASONS if will_not_start(reason)}
    assert never >= {"PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS"}
    assert never >= {"QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES", "DependencyNeverSatisfied"}
    waits = {"Resources", "Priority", "BeginTime", "QOSMaxGRESPerUser", "AssocGrpGRES", "QOSGrpCPUMinutesLimit", DOWN}
    held = {"JobHeldUser", "JobHeldAdmin", "launch failed requeued held"}
    assert not [reason for reason in waits | held | {"ReqNodeNotAvail, x", "NewIn30"} if will_not_start(reason)]
    assert all(map(starts_by_itself, waits))
    assert not any(map(starts_by_itself, held | never))
