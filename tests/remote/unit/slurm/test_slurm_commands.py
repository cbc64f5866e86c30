"""Calls of Slurm's commands: what they say, and what counts as no answer."""

from pathlib import Path

import pytest

from slurm_commands import SlurmCommands
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.slurm import queue
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm


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
        ("slurm_load_jobs error: Invalid job id specified", False),
        ("sbatch: error: invalid partition specified: gpus", False),
    ],
)
def test_only_a_controller_that_does_not_answer_is_an_outage(slurm: SlurmCommands, said: str, outage: bool) -> None:
    slurm.answer("squeue", fails=f"{said}\n")
    refusal = refusal_of("squeue")
    assert (refusal.cause, refusal.outage) == (f"squeue: {said}", outage)


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
