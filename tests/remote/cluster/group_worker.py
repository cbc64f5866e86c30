"""The program of each rank in test_groups.py: sums up over all ranks, and prints the sum and its pod's connections."""

import json
import os

import psutil
import torch
import torch.distributed as dist


def main() -> None:
    """Join the ranks that torchrun started, and print one line of JSON.

    connections: address and port of the other end, for each TCP connection with another pod or machine.
    """
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    own = {address.address for found in psutil.net_if_addrs().values() for address in found}
    open_ones = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    ends = [(each.raddr.ip.removeprefix("::ffff:"), each.raddr.port) for each in open_ones]  # IPv4 in an IPv6 socket
    connections = [end for end in ends if end[0] not in own]
    rank, pod = dist.get_rank(), os.environ["POD_NAME"]
    print(json.dumps({"rank": rank, "pod": pod, "sum": total.item(), "connections": connections}), flush=True)
    dist.barrier()  # so that no connection closes before each rank has looked


if __name__ == "__main__":
    main()
