"""The tests' cluster by hand: python -m cluster build | up | down | status | kubeconfig."""

import argparse
import os
import sys
import time
from pathlib import Path

from cluster import addons, images, machine, operators
from cluster.cluster import Cluster
from cluster.paths import KUBECONFIG
from vlmflow.core.errors import VlmflowError


def up(asked: argparse.Namespace) -> None:
    """Start the cluster with the requested parts, and print how long each took."""
    cluster = Cluster()
    begun = time.monotonic()
    steps = [("cluster", True, cluster.up), ("second node", asked.second_node, cluster.add_node)]
    steps.append(("DNS", asked.dns, lambda: addons.start_dns(cluster)))
    steps.append(("S3", asked.s3, lambda: addons.start_s3(cluster)))
    steps.append(("fake nodes' kubelets", asked.fake_nodes, lambda: addons.start_fake_nodes(cluster)))
    for name in asked.operator:
        steps.append((name, True, lambda name=name: operators.STARTS[name](cluster)))
    for target in asked.image:
        steps.append((f"image {target}", True, lambda target=target: cluster.carry_in(images.project_image(target))))
    for name, wanted, step in steps:
        if wanted:
            step()
            print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)
    print(f"export KUBECONFIG={KUBECONFIG}")


def build() -> None:
    """Build everything, unless the machine cannot run the cluster, or KUBECONFIG names another one."""
    if machine.why_not() is None and Path(os.environ.get("KUBECONFIG") or KUBECONFIG) == KUBECONFIG:
        images.build_all()


def status() -> None:
    """Print what runs."""
    cluster = Cluster()
    print(cluster.kubectl("get", "nodes", "--output=wide") if cluster.running() else "down")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start it, with what is asked for; what is there stays")
    start.add_argument("--second-node", action="store_true", help="a second real node, node-b")
    start.add_argument("--dns", action="store_true", help="let pods look up services' names")
    start.add_argument("--s3", action="store_true", help="an S3 server; its address and keys in state/s3.json")
    start.add_argument("--fake-nodes", action="store_true", help="let kwok play the kubelets of fake nodes")
    start.add_argument(
        "--operator", nargs="+", default=[], choices=operators.STARTS, help="Kubeflow's, for groups of pods"
    )
    start.add_argument("--image", nargs="+", default=[], choices=images.TARGETS, help="the project's, on every node")
    start.set_defaults(run=up)
    commands.add_parser(
        "build", help="build and install what the tests' own cluster lacks (minutes, once)"
    ).set_defaults(run=lambda asked: build())
    commands.add_parser("down", help="end every process of it and leave the machine as it was").set_defaults(
        run=lambda asked: Cluster().down()
    )
    commands.add_parser("status", help="say what runs").set_defaults(run=lambda asked: status())
    commands.add_parser("kubeconfig", help="print the path of its kubeconfig").set_defaults(
        run=lambda asked: print(KUBECONFIG)
    )
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    try:
        main()
    except VlmflowError as error:
        sys.exit(str(error))
