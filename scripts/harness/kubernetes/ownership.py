"""Whose Jobs are whose, said by labels, and of which commit they run."""

import hashlib
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from harness.kubernetes.job_shape import INVOCATION, TARGETS, WORKDIR
from vlmflow.cluster.instance import labels


@dataclass(frozen=True)
class Owner:
    """One call of Snakemake.

    invocation: names the call. workdir: names its working directory, over many calls. targets: names what it makes.
    """

    invocation: str
    workdir: str
    targets: str

    @property
    def labels(self) -> dict[str, str]:
        """The labels of each Job and pod of this call."""
        return {INVOCATION: self.invocation, WORKDIR: self.workdir, TARGETS: self.targets, **labels()}

    @property
    def ours(self) -> str:
        """The selector of this call's Jobs."""
        return f"{INVOCATION}={self.invocation}"

    @property
    def earlier(self) -> str:
        """The selector of the Jobs of this working directory's calls, for one that begins: those before it."""
        return f"{WORKDIR}={self.workdir}"

    @property
    def strangers(self) -> str:
        """The selector of the Jobs of other working directories that make the same targets."""
        return f"{TARGETS}={self.targets},{WORKDIR}!={self.workdir}"


def owner_of(invocation: str, kept: Path, targets: str) -> Owner:
    """Say whose a call's Jobs are.

    kept: the folder in which the working directory keeps the name that its first call gave it. targets: in which
    namespace and under which storage prefix they are made.
    """
    file = kept / "kubernetes-owner"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:16])
    return Owner(invocation, file.read_text(), hashlib.sha256(targets.encode()).hexdigest()[:16])


def commit_of(checkout: Path) -> str:
    """Name the commit of a checkout, for provenance; VLMFLOW_COMMIT says it where the checkout has no history."""
    given = os.environ.get("VLMFLOW_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
