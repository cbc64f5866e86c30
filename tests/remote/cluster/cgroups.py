"""A node's own cgroup in every hierarchy of the machine, with cgroup v1, v2 or both."""

import contextlib
import os
import time
from pathlib import Path

from vlmflow.core.errors import VlmflowError

MOUNT = Path("/sys/fs/cgroup")
PARENT = "vlmflow-tests"
UNIFIED = (MOUNT / "cgroup.controllers").exists()


def root_of(node: str) -> str:
    """Return the parent cgroup of a node's pods."""
    return f"/{PARENT}/{node}"


def make(node: str) -> None:
    """Make the cgroups of a node, with every controller that pods need."""
    for hierarchy in _hierarchies():
        above = hierarchy
        for name in (PARENT, node):
            _hand_down_controllers(above)
            group = above / name
            group.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):  # cgroup v1: empty at first, and then it accepts no process
                if (group / setting).exists() and (above / setting).exists():
                    (group / setting).write_text((above / setting).read_text())
            above = group
        _hand_down_controllers(above)


def remove(node: str) -> None:
    """Remove the cgroups of a node whose processes have ended, and the parent with the last node's."""
    for hierarchy in _hierarchies():
        end = time.monotonic() + 5
        while (hierarchy / PARENT / node).exists() and time.monotonic() < end:
            for folder, _, _ in os.walk(hierarchy / PARENT / node, topdown=False):
                with contextlib.suppress(OSError):  # busy for a moment after the last process has ended
                    os.rmdir(folder)
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            (hierarchy / PARENT).rmdir()


def _hierarchies() -> list[Path]:
    if UNIFIED:
        return [MOUNT]
    return [path for path in MOUNT.iterdir() if path.is_dir() and not path.is_symlink()]


def _hand_down_controllers(group: Path) -> None:
    """Let the child groups use every controller of this one (cgroup v2; useless next to v1)."""
    if not UNIFIED:
        return
    wanted = " ".join(f"+{name}" for name in (group / "cgroup.controllers").read_text().split())
    try:
        (group / "cgroup.subtree_control").write_text(wanted)
    except OSError as error:
        raise VlmflowError(
            f"the cgroup {group} cannot hand its controllers down: {error.strerror}",
            "in a container, move its processes to a cgroup below first (cgroups(7), no internal processes)",
        ) from error
