"""The first process of a node: it sets up the node's mounts and reaps dead processes. Only node.py runs it.

It is process 1 of the node's PID namespace: when it is killed, the kernel ends every process of the node with it, and
the mounts, links and rules of the node's namespaces go away.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

# The kubelet writes these, which belong to the whole machine: it finds files of its own in their place.
MACHINE_WIDE_SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
NODE_SYSCTLS = {
    "ip_forward": "1",
    # A pod that tries to leave the network gets an error each time, not once a second.
    "icmp_ratelimit": "0",
    # On one flat network a service's packets leave by the link they came in: no pod is to be told to go round the node.
    "conf/all/send_redirects": "0",
    "conf/default/send_redirects": "0",
}


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main(folder: Path) -> None:
    mount("--make-rshared", "/")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "tmpfs", "/run")
    mount("-t", "tmpfs", "tmpfs", "/var/lib/kubelet")
    mount("--bind", str(folder / "log"), "/var/log")
    for name in MACHINE_WIDE_SYSCTLS:
        stand_in = folder / "sysctl" / name.replace("/", ".")
        stand_in.write_text(Path("/proc/sys", name).read_text())
        mount("--bind", str(stand_in), f"/proc/sys/{name}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name, value in NODE_SYSCTLS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    (folder / "ready").touch()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigtimedwait({signal.SIGCHLD}, 1)


if __name__ == "__main__":
    # Blocked, so that a child's end is seen by sigtimedwait; process 1 ignores every other signal but the fatal ones.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    main(Path(sys.argv[1]))
