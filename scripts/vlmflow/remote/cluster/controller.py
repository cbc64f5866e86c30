"""Use the controller from a laptop: push code and files, run Snakemake, follow it, stop it; store the hub's token.

usage: python -m vlmflow.remote.cluster.controller [--namespace NAME] push | run -- ARGUMENTS | log | stop | token
                                                             get -- TARGET TO | put -- FROM TO
"""

import argparse
import logging
import sys
from pathlib import Path

from vlmflow import CHECKOUT
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import checkout, copying, hub_token
from vlmflow.remote.cluster.following import follow
from vlmflow.remote.cluster.instance import named
from vlmflow.remote.cluster.kubectl import Kubectl

CONTROLLERS_CHECKOUT = "/controller/vlmflow"
CONTROLLER = ("python", "/opt/controller/controller.py")
GOES_ON = "\nThe run continues in the cluster: `make cluster-log` follows it again, `make cluster-stop` ends it."


def push(kubectl: Kubectl, arguments: list[str]) -> int:
    """Replace the controller's checkout with this one: its last commit and the files as they are; not during a run."""
    if busy := kubectl.in_controller(*CONTROLLER, "status"):
        return busy
    unpack = Path(checkout.__file__).with_name("unpack.py").read_text()
    with kubectl.into_controller("python", "-c", unpack, CONTROLLERS_CHECKOUT) as stream:
        count = checkout.pack(CHECKOUT, stream)
    print(f"{count} files are in the controller, {CONTROLLERS_CHECKOUT}")
    return 0


def run(kubectl: Kubectl, arguments: list[str]) -> int:
    """Push, start `snakemake --executor kubernetes ARGUMENTS`, and follow it."""
    return push(kubectl, []) or kubectl.in_controller(*CONTROLLER, "start", "--", *arguments) or log(kubectl, [])


def log(kubectl: Kubectl, arguments: list[str]) -> int:
    """Show the output of the run from its beginning to its end; reconnects as often as needed."""
    try:
        return follow(kubectl, CONTROLLER)
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return 130


def get(kubectl: Kubectl, arguments: list[str]) -> int:
    """Copy a target here."""
    target, to = arguments
    copying.get(kubectl, target, Path(to))
    return 0


def put(kubectl: Kubectl, arguments: list[str]) -> int:
    """Copy a file or folder to the controller."""
    source, to = arguments
    copying.put(kubectl, Path(source), to)
    return 0


def stop(kubectl: Kubectl, arguments: list[str]) -> int:
    """Interrupt the run; its Jobs save what they can and end."""
    return kubectl.in_controller(*CONTROLLER, "stop")


def make_token(kubectl: Kubectl, arguments: list[str]) -> int:
    """Create the Secret with the hub's token from the line HF_TOKEN=… of .env."""
    secret = hub_token.secret(hub_token.read_token(CHECKOUT / ".env"))
    # Server-side: a client-side apply would keep a second copy of the value in an annotation.
    kubectl.run("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=secret)
    print(f"Secret {named(hub_token.SECRET)} is in namespace {kubectl.namespace}")
    return 0


ACTIONS = {"push": push, "run": run, "log": log, "stop": stop, "token": make_token, "get": get, "put": put}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="vlmflow")
    parser.add_argument("action", choices=ACTIONS)
    own, arguments = sys.argv[1:], []
    if "--" in own:  # Snakemake's arguments may contain a "--" of their own, which argparse would remove
        arguments = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    given = parser.parse_args(own)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sys.exit(ACTIONS[given.action](Kubectl(given.namespace), arguments))
    except VlmflowError as error:
        sys.exit(str(error))
