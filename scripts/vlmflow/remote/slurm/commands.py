"""Runs Slurm's commands. Their words are lists and their texts are lines; no shell reads either."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from vlmflow.core.errors import VlmflowError

SECONDS = 60.0
"""How long a command may take. Slurm's own commands give up after MessageTimeout, 10 s where nobody has changed it."""

OUTAGES = ("contact slurm controller", "timed out", "connection refused", "zero bytes", "communication", "try again")
"""What Slurm's commands say (in lower case) when the controller does not answer; anything else is its answer."""


OF_PEOPLE = "SQUEUE_"
"""How the variables begin with which people let squeue show less (SQUEUE_PARTITION); a job left out would seem gone."""


class SlurmError(VlmflowError):
    """A command of Slurm that failed. outage: whether the controller gave no answer, so that asking again may help."""

    def __init__(self, cause: str, next_step: str, outage: bool = False) -> None:
        super().__init__(cause, next_step)
        self.outage = outage


def refuse_without_slurm() -> None:
    """Raise VlmflowError if this machine has no commands of Slurm."""
    if shutil.which("sbatch") is None:
        raise VlmflowError(
            "this machine has no sbatch: it is not a login node of a Slurm cluster",
            "use a login node (`module load slurm` on some), or call Snakemake without the profile: docs/slurm.md",
        )


def ask(*words: str, script: str | None = None, environment: Mapping[str, str] = {}) -> str:
    """Run a command of Slurm, and return what it prints.

    script: its standard input. environment: variables for it, besides ours.

    Raises SlurmError if it fails, or takes longer than SECONDS.
    """
    try:
        done = subprocess.run(
            words,
            input=script or "",
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(OF_PEOPLE)},
                "SLURM_TIME_FORMAT": "standard",
                **environment,
            },
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise SlurmError(f"this machine has no {words[0]}", "use a login node of Slurm: docs/slurm.md") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer for {SECONDS:.0f} s", "try again later", outage=True) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        outage = any(word in said.lower() for word in OUTAGES)
        raise SlurmError(f"{words[0]}: {said}", "take the step that docs/slurm.md names for what Slurm says", outage)
    return done.stdout
