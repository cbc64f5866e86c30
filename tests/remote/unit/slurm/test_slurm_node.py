"""What each node of a job on several becomes."""

import os
import sys

import pytest

from vlmflow.remote.slurm import in_job


@pytest.mark.parametrize(
    ("number", "restarts", "command"),
    [
        ("0", None, ["python3", "-m", "snakemake", "x y"]),
        (
            "1",
            None,
            [sys.executable, "-m", "vlmflow.supervisor.other_node", "stores/runs/r", "slurm-123456-0", "1", "8"],
        ),
        ("0", "2", ["python3", "-m", "snakemake", "x y"]),
        (
            "3",
            "2",
            [sys.executable, "-m", "vlmflow.supervisor.other_node", "stores/runs/r", "slurm-123456-2", "3", "8"],
        ),
    ],
)
def test_node_0_runs_snakemake_and_each_other_an_agent_of_the_same_attempt(
    monkeypatch: pytest.MonkeyPatch, number: str, restarts: str | None, command: list[str]
) -> None:
    given = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": number, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "HOME": "/x"}
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "environ", given | ({"SLURM_RESTART_COUNT": restarts} if restarts else {}))
    monkeypatch.setattr(sys, "argv", [in_job.__file__, "stores/runs/r", "8", "python3", "-m", "snakemake", "x y"])
    monkeypatch.setattr(os, "execvp", lambda program, words: became.append((program, words, dict(os.environ))))
    in_job.become_node()
    ((program, words, environment),) = became
    assert (program, words) == (command[0], command)
    added = {name: value for name, value in environment.items() if name.startswith("VLMFLOW_")}
    assert added == {
        "VLMFLOW_ATTEMPT": f"slurm-123456-{restarts or 0}",
        "VLMFLOW_NODE_0": "10.0.0.7",
        "VLMFLOW_PORT": str(29500 + 3456),
    }
    assert environment["HOME"] == "/x"
