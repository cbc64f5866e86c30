"""Use the controller from a laptop: push code and files, run Snakemake, follow it, stop it; store the hub's token."""

import base64
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO

from vlmflow.remote.cluster.kubectl import FILE_STREAM, Kubectl, own_labels, own_name, pipe
from vlmflow.remote.library import CHECKOUT, VlmflowError

CONTROLLERS_CHECKOUT = "/controller/vlmflow"
CONTROLLER = ("python", "/opt/controller/controller.py")

PATIENCE = 600.0
"""Seconds to wait for a controller that does not answer: its pod may have to move to another node."""
PAUSE = 2.0

SECRET = "hf-token"  # noqa: S105 - the name of the object
KEY = "HF_TOKEN"


def push(cluster: Kubectl) -> int:
    """Replace the controller's checkout with this one: its last commit and the files as they are; not during a run."""
    if busy := cluster.in_controller(*CONTROLLER, "status"):
        return busy
    with cluster.into_controller("python", "-c", FILE_STREAM, "unpack", CONTROLLERS_CHECKOUT) as stream:
        count = pack(CHECKOUT, stream)
    print(f"{count} files are in the controller, {CONTROLLERS_CHECKOUT}")
    return 0


def pack(checkout: Path, stream: IO[bytes]) -> int:
    """Write a tar of a git checkout: every file that git does not ignore, and a .git with only the last commit.

    Snakemake asks git which files belong to the workflow, and provenance names the commit. Returns the number of files.

    Raises VlmflowError if the folder is not a git checkout with a commit.
    """
    listed = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = sorted(name for name in listed.split("\0") if name and (checkout / name).is_file())
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=stream, mode="w|") as archive:
        # From a local path git would hard-link everything; from an address it copies one commit.
        _git(checkout, "clone", "--quiet", "--no-checkout", "--depth=1", checkout.resolve().as_uri(), folder)
        archive.add(Path(folder, ".git"), ".git", filter=_nobodys)
        for name in names:
            archive.add(checkout / name, name, recursive=False, filter=_nobodys)
    return len(names)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _git(checkout: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise VlmflowError(f"{checkout}: {ended.stderr.strip()}", "work in a git clone that has a commit")
    return ended.stdout


def run(cluster: Kubectl, *arguments: str) -> int:
    """Push, start `snakemake --executor kubernetes ARGUMENTS`, and follow it."""
    return push(cluster) or cluster.in_controller(*CONTROLLER, "start", "--", *arguments) or log(cluster)


def log(cluster: Kubectl) -> int:
    """Show the output of the run from its beginning to its end; reconnects as often as needed."""
    try:
        return follow(cluster, CONTROLLER)
    except KeyboardInterrupt:
        commands = "`vlmflow cluster log` follows it again, `vlmflow cluster stop` ends it"
        print(f"\nThe run continues in the cluster: {commands}.", file=sys.stderr)
        return 130


def follow(cluster: Kubectl, controller: tuple[str, ...], patience: float = PATIENCE) -> int:
    """Show the output until the run has ended; returns Snakemake's exit code.

    controller: the command of the controller's process. patience: seconds to wait if the controller does not answer.

    Both a broken connection and a failed run end `kubectl exec` with an exit code. So this function asks the controller
    how the run ended; if it has not, the output continues from the byte at which it broke off.
    Raises VlmflowError if the controller does not answer for `patience`.
    """
    shown, told, answered = 0, -1, time.monotonic()
    while True:
        process = cluster.talk_to_controller(*controller, "follow", "--from", str(shown))
        stdout = process.stdout
        assert isinstance(stdout, io.BufferedReader), "Popen buffers it"
        try:
            while block := stdout.read1(1 << 16):
                sys.stdout.buffer.write(block)
                sys.stdout.buffer.flush()
                shown += len(block)
                answered = time.monotonic()
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            pipe(process.stdin).close()
        question = cluster.talk_to_controller(*controller, "code")
        answer = question.communicate()[0].decode().strip()
        if question.returncode == 0:
            answered = time.monotonic()
            if answer != "on":  # the run has ended: with a code, or there was "none"
                return 0 if answer == "none" else int(answer)
        if time.monotonic() - answered > patience:
            raise VlmflowError(
                f"the controller does not answer for {patience:.0f} s: {pipe(process.stderr).read().decode().strip()}",
                "the run continues; `kubectl get pods` shows the controller, `vlmflow cluster log` follows it",
            )
        if told != shown:  # print it once, however long the controller does not answer
            told = shown
            broken = "The connection to the controller broke; trying again. The run continues."
            print(f"\n{broken}\n", file=sys.stderr, flush=True)
        time.sleep(PAUSE)


def stop(cluster: Kubectl) -> int:
    """Interrupt the run; its Jobs save what they can and end."""
    return cluster.in_controller(*CONTROLLER, "stop")


def token(cluster: Kubectl) -> None:
    """Create the Secret with the hub's token from the line HF_TOKEN=… of .env; it passes only over standard input."""
    text = secret(read_token(CHECKOUT / ".env"))
    # Server-side: a client-side apply would keep a second copy of the value in an annotation.
    cluster.run("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)
    print(f"Secret {own_name(SECRET)} is in namespace {cluster.namespace}")


def read_token(file: Path) -> str:
    """Return the value of the line HF_TOKEN=… in a file.

    Raises VlmflowError if it is missing, empty, not ASCII or has a blank in it, or if git tracks the file. No message
    shows the token.
    """
    advice = f"write a line {KEY}=hf_… into {file}"
    if not file.is_file():
        raise VlmflowError(f"no file {file}", advice)
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", file.name], cwd=file.parent, capture_output=True)
    if tracked.returncode == 0:
        raise VlmflowError(
            f"{file} is tracked by git", f"run git rm --cached {file}; then create a new token on the hub"
        )
    for line in file.read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        value = value.strip().strip("'\"")
        if name.strip() == KEY:
            if not value or not value.isascii() or any(character.isspace() for character in value):
                raise VlmflowError(f"{file}: the value of {KEY} is empty, not ASCII, or has a blank in it", advice)
            return value
    raise VlmflowError(f"{file} has no line {KEY}=…", advice)


def secret(token: str) -> str:
    """Return the Secret as JSON, for kubectl's standard input."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": own_name(SECRET), "labels": {"app.kubernetes.io/part-of": "vlmflow", **own_labels()}},
            "type": "Opaque",
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
    )
