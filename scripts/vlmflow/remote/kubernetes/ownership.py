"""The owner of each Job, as labels, and the commit that it runs."""

import hashlib
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from vlmflow.remote.cluster.instance import labels
from vlmflow.remote.kubernetes.job_shape import INVOCATION, TARGETS, WORKDIR


@dataclass(frozen=True)
class Owner:
    """One invocation of Snakemake.

    invocation: its name. workdir: the name of its working directory, the same in each invocation. targets: the name of
    the place of its targets.
    """

    invocation: str
    workdir: str
    targets: str

    @property
    def labels(self) -> dict[str, str]:
        """The labels of each Job and pod of this invocation."""
        return {INVOCATION: self.invocation, WORKDIR: self.workdir, TARGETS: self.targets, **labels()}

    @property
    def ours(self) -> str:
        """The selector of this invocation's Jobs."""
        return f"{INVOCATION}={self.invocation}"

    @property
    def earlier(self) -> str:
        """The selector of all Jobs of this working directory: as an invocation starts, those of earlier ones."""
        return f"{WORKDIR}={self.workdir}"

    @property
    def strangers(self) -> str:
        """The selector of the Jobs of other working directories that make the same targets."""
        return f"{TARGETS}={self.targets},{WORKDIR}!={self.workdir}"


def owner_of(invocation: str, kept: Path, targets: str) -> Owner:
    """Return the owner of an invocation's Jobs.

    kept: the folder that keeps the working directory's name, which its first invocation chose. targets: namespace and
    storage prefix of its targets.
    """
    file = kept / "kubernetes-owner"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:16])
    return Owner(invocation, file.read_text(), hashlib.sha256(targets.encode()).hexdigest()[:16])


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, for provenance; "" if unknown. VLMFLOW_COMMIT names it for one without .git."""
    given = os.environ.get("VLMFLOW_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
