"""What the pods of a group do in test_groups.py: one sum over all ranks; prints it, and the connections of its pod."""

import json
import os

import psutil
import torch
import torch.distributed as dist


def main() -> None:
    """Join the group that torchrun names, and print one line of JSON."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    own = {address.address for found in psutil.net_if_addrs().values() for address in found}
    connections = [
        {"from": each.laddr.port, "to": each.raddr.ip, "port": each.raddr.port}
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.raddr.ip.removeprefix("::ffff:") not in own
    ]
    rank, pod = dist.get_rank(), os.environ["POD_NAME"]
    print(json.dumps({"rank": rank, "pod": pod, "sum": total.item(), "connections": connections}), flush=True)
    dist.barrier()  # so that no connection closes before each rank has looked


if __name__ == "__main__":
    main()
