"""The tests' cluster by hand: python -m cluster up | down | status | kubeconfig."""

import argparse
import sys
import time

from cluster import images
from cluster.cluster import Cluster
from cluster.paths import KUBECONFIG
from vlmflow.errors import VlmflowError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start it, with what is asked for; what is there stays")
    up.add_argument("--second-node", action="store_true", help="a second real node, node-b")
    up.add_argument(
        "--image", nargs="+", default=[], choices=images.TARGETS, help="the project's images, on every node"
    )
    commands.add_parser("down", help="end every process of it and leave the machine as it was")
    commands.add_parser("status", help="say what runs")
    commands.add_parser("kubeconfig", help="print the path of its kubeconfig")
    asked = parser.parse_args()
    cluster = Cluster()
    if asked.command == "kubeconfig":
        print(KUBECONFIG)
    elif asked.command == "down":
        cluster.down()
    elif asked.command == "status":
        print(cluster.kubectl("get", "nodes", "--output=wide") if cluster.running() else "down")
    else:
        begun = time.monotonic()
        cluster.up()
        if asked.second_node:
            cluster.add_node()
        for target in asked.image:
            cluster.carry_in(images.project_image(target))
        print(f"up after {time.monotonic() - begun:.1f} s: export KUBECONFIG={KUBECONFIG}")


if __name__ == "__main__":
    try:
        main()
    except VlmflowError as error:
        sys.exit(str(error))
