"""The tests' own Slurm: a controller and two nodes, which start in seconds, end with this process, and leave no trace.

Each is a host of its own: network, host name, mounts and processes, with the machine's files, as on a shared file
system. Debian's slurmd is built for one per host. The machine itself is the login node: it has one link to the network
of the hosts, and no route out of it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from string import Template
from typing import Any

import debian
from cluster import cgroups
from cluster.paths import CACHE
from cluster.processes import children
from cluster.shell import alone, run, wait_for
from vlmflow.core.errors import VlmflowError
from vlmflow.core.processes import bound_to_this_process

SOURCES = Path(__file__).parent
FOLDER = CACHE / "slurm"
"""What lives only while it runs: settings, keys, logs, sockets, Slurm's state, and the GPUs' device files."""

PACKAGES = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "ip": "iproute2"}
"""Program to Debian package. The services of these packages do not start without settings in /etc/slurm."""

LINK = "vlmflow-slurm0"
NETWORK = "10.233.0"
MACHINE = f"{NETWORK}.254"
CONTROLLER = "controller"
NODES = ("node-a", "node-b")
ADDRESSES = {CONTROLLER: f"{NETWORK}.1", "node-a": f"{NETWORK}.11", "node-b": f"{NETWORK}.12"}

GPUS = 2
"""GPUs of each node: character devices that no driver serves. Slurm numbers them only if they have a device file."""
MAJOR = 240
"""Their major number, the first of those for local use (Linux, Documentation/admin-guide/devices.txt)."""

HIERARCHIES = ("devices", "freezer", "memory")
"""What proctrack/cgroup and task/cgroup need of control groups, version 1."""


def why_not() -> str | None:
    """Say in one line why Slurm cannot run on this machine, None if it can."""
    if not debian.is_debian() or os.geteuid() != 0:
        return "the tests' Slurm needs a Debian machine, and root"
    lacking = [name for name in HIERARCHIES if not os.access(cgroups.MOUNT / name / "cgroup.procs", os.W_OK)]
    if lacking:
        return f"the tests' Slurm needs control groups of version 1; {cgroups.MOUNT} lacks {', '.join(lacking)}"
    return None


def _group(node: str) -> str:
    """Return a node's name below cgroups.PARENT, where a node of the tests' Kubernetes may have the same name."""
    return f"slurm-{node}"


class Host:
    """A host of the tests' Slurm, in namespaces of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holder: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self.holder is not None

    @property
    def pid(self) -> int:
        """The id of its first process, on the machine."""
        assert self.holder is not None, f"{self.name} is not running"
        return children(self.holder.pid)[0]

    def boot(self, group: str = "") -> None:
        """Make its namespaces. They end with this process, also if that is killed.

        group: the control group that it takes for the machine's root.
        """
        ready = FOLDER / "run" / f"{self.name}.ready"
        ready.unlink(missing_ok=True)
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private")
        with (FOLDER / "log" / f"{self.name}.log").open("ab") as log:
            self.holder = subprocess.Popen(
                ["unshare", *spaces, "bash", str(SOURCES / "host.sh"), self.name, str(FOLDER), group],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the tests
                preexec_fn=bound_to_this_process(),
            )
        wait_for(f"{self.name} is made ({log.name})", ready.exists, limit=10, pause=0.01)

    def run(self, *words: object) -> str:
        """Run a command on it, and return what it prints. Raises VlmflowError if it fails."""
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid")
        return run("nsenter", "--target", self.pid, *spaces, "--wd=/", *words)

    def start(self, program: str, *words: object) -> None:
        """Start a daemon of Slurm or munge on it; they go into the background by themselves."""
        # Not `run`: a daemon would keep its pipes open.
        self.run("sh", "-c", f'exec {program} "$@" > {FOLDER}/log/{self.name}-{program}.out 2>&1', program, *words)

    def stop(self, pid_file: str, number: int) -> None:
        """Send a daemon a signal, and wait until it has ended."""
        process = (FOLDER / "run" / pid_file).read_text().strip()
        self.run("sh", "-c", f"kill -{number} {process}; while kill -0 {process} 2> /dev/null; do sleep 0.1; done")

    def kill(self) -> None:
        """Lose it, as in a power failure: all of its processes end at once."""
        if self.holder is not None:
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.holder.wait()  # the kernel first ends and takes every process of the namespace
            self.holder = None


class SlurmCluster:
    """Slurm on this machine: there is only one."""

    def __init__(self) -> None:
        self.hosts = {name: Host(name) for name in (CONTROLLER, *NODES)}
        self.changes: dict[str, object] = {}
        self.held = ExitStack()

    def __enter__(self) -> "SlurmCluster":
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands on this machine reach it."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(FOLDER / "etc" / "slurm.conf")}

    def up(self) -> None:
        """Start it, and wait until both nodes can run jobs, unless it is up; other tests wait until it is down.

        Installs the Debian packages that are missing. Raises VlmflowError if the machine cannot run it.
        """
        if reason := why_not():
            raise VlmflowError(reason, "run it on another machine")
        if self.hosts[CONTROLLER].running:
            return
        debian.install(PACKAGES, CACHE / "apt.log")
        self.held.enter_context(alone("slurm"))
        try:
            _remove_remains()
            _refuse_taken_addresses()
            _make_folder()
            self._write_settings()
            controller = self.hosts[CONTROLLER]
            controller.boot()
            _connect_machine(controller)
            munge = FOLDER / "run" / "munge"
            words = {name: f"{munge}.{name}" for name in ("socket", "pid-file", "seed-file", "log-file")}
            # --force: munged does not like the folders above.
            controller.start(
                "munged", "--force", f"--key-file={munge}.key", *(f"--{key}={value}" for key, value in words.items())
            )
            self.start_controller()
            for name in NODES:
                self.start_node(name)
            for name in NODES:
                self.wait_for_node(name, "IDLE")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of it, and leave the machine as it was."""
        for name in reversed(self.hosts):
            self.hosts[name].kill()
        _remove_remains()
        self.held.close()

    def run(self, *words: object) -> str:
        """Run a command of Slurm on the machine, as on a login node, and return what it prints.

        Raises VlmflowError if it fails.
        """
        return run(*words, env=self.environment)

    def start_controller(self) -> None:
        """Start slurmctld, with what it knew when it ended, and wait until it answers."""
        self.hosts[CONTROLLER].start("slurmctld")
        wait_for("slurmctld answers", lambda: "is UP" in self.run("scontrol", "ping"))

    def stop_controller(self, number: int = signal.SIGTERM) -> None:
        """End slurmctld; jobs go on."""
        self.hosts[CONTROLLER].stop("slurmctld.pid", number)

    def start_node(self, name: str) -> None:
        """Start a node that is not there."""
        node = self.hosts[name]
        cgroups.make(_group(name))
        node.boot(_group(name))
        _connect(node, self.hosts[CONTROLLER])
        node.start("slurmd")

    def kill_node(self, name: str) -> None:
        """Lose a node, as in a power failure; Slurm notices it SlurmdTimeout later."""
        self.hosts[name].kill()
        cgroups.remove(_group(name))

    def wait_for_node(self, name: str, state: str, limit: float = 60) -> None:
        """Wait until Slurm says of a node that it is IDLE, MIXED, ALLOCATED or DOWN."""

        def state_of() -> str:
            # Not of sinfo, which said "mix" for minutes of a node whose job ended as the controller came back.
            words = self.run("scontrol", "--oneliner", "show", "node", name).split()
            return next(word.removeprefix("State=") for word in words if word.startswith("State="))

        try:
            wait_for(f"{name} is {state}", lambda: state_of().rstrip("*") == state, limit)
        except VlmflowError as error:
            error.add_note(self.run("scontrol", "show", "node", name))
            for log in sorted((FOLDER / "log").glob("slurm*.log")):
                error.add_note("\n".join([log.name, *log.read_text(errors="replace").splitlines()[-20:]]))
            raise

    @contextmanager
    def configured(self, **changes: object) -> Iterator[None]:
        """Change lines of slurm.conf (KillWait=30) while the block runs."""
        before, self.changes = self.changes, {**self.changes, **changes}
        try:
            self._reconfigure()
            yield
        finally:
            self.changes = before
            self._reconfigure()

    def submit(self, command: str, *options: str) -> str:
        """Submit a job that runs a line of shell, with a minute and 100 MB unless options say so; return its id."""
        own = ("--parsable", "--time=1", "--mem=100", f"--output={FOLDER}/log/job-%j.out")
        return self.run("sbatch", *own, *options, f"--wrap={command}").strip()

    def said(self, job: str) -> str:
        """Return what a job of `submit` has printed up to now."""
        return (FOLDER / "log" / f"job-{job}.out").read_text()

    def job(self, job: str) -> dict[str, Any]:
        """Return what `scontrol show job` knows of a job: JobState, Reason, ExitCode, Restarts, NodeList, …"""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(self, job: str, *states: str, limit: float = 60) -> str:
        """Wait until a job is in one of these states, in Slurm's words (COMPLETED, …), and return it."""

        def there() -> str | None:
            state = self.job(job)["JobState"]
            return state if state in states else None

        return str(wait_for(f"job {job} is {' or '.join(states)}", there, limit, pause=0.2))

    def clear(self) -> None:
        """Cancel all jobs, and wait until both nodes are free; start what a failed test left stopped."""
        if "is UP" not in self.run("sh", "-c", "scontrol ping || true"):
            self.start_controller()
        self.run("scancel", "--user=root")
        for name in NODES:
            if not self.hosts[name].running:
                self.start_node(name)
            self.wait_for_node(name, "IDLE")

    def _write_settings(self) -> None:
        text = Template((SOURCES / "slurm.conf").read_text()).substitute(FOLDER=FOLDER)
        lines = [line for line in text.splitlines() if line.partition("=")[0] not in self.changes]
        own = [f"{key}={value}" for key, value in self.changes.items()]
        (FOLDER / "etc" / "slurm.conf").write_text("\n".join([*own, *lines, ""]))

    def _reconfigure(self) -> None:
        self._write_settings()
        self.run("scontrol", "reconfigure")


def _make_folder() -> None:
    for name in ("etc", "log", "run", "state", *(f"spool-{node}" for node in NODES)):
        (FOLDER / name).mkdir(parents=True)
    (FOLDER / "etc" / "gres.conf").write_text(f"Name=gpu File={FOLDER}/nvidia[0-{GPUS - 1}]\n")
    (FOLDER / "etc" / "cgroup.conf").write_text("ConstrainDevices=yes\nConstrainRAMSpace=yes\n")
    hosts = {"localhost": "127.0.0.1", os.uname().nodename: MACHINE, **ADDRESSES}
    (FOLDER / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
    key = FOLDER / "run" / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for number in range(GPUS):
        os.mknod(FOLDER / f"nvidia{number}", 0o20666, os.makedev(MAJOR, number))


def _refuse_taken_addresses() -> None:
    for route in json.loads(run("ip", "-j", "route")):
        if route["dst"].startswith(f"{NETWORK}."):
            raise VlmflowError(
                f"the machine already has a route to {route['dst']} (device {route.get('dev')})",
                f"end what uses it: the tests' Slurm needs {NETWORK}.0/24",
            )


def _connect_machine(controller: Host) -> None:
    """Make the hosts' network, a bridge on the controller, and the machine's link to it."""
    controller.run("ip", "link", "add", "hosts", "type", "bridge")
    controller.run("ip", "address", "add", f"{ADDRESSES[CONTROLLER]}/24", "dev", "hosts")
    controller.run("ip", "link", "set", "hosts", "up")
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "machine", "netns", controller.pid)
    run("ip", "address", "add", f"{MACHINE}/24", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    controller.run("ip", "link", "set", "machine", "master", "hosts", "up")


def _connect(node: Host, controller: Host) -> None:
    """Connect a node to the hosts' network; its earlier link has gone with its namespace, or goes now."""

    def gone() -> bool:
        with contextlib.suppress(VlmflowError):
            controller.run("ip", "link", "delete", node.name)
        return node.name not in _links(controller.run("ip", "-j", "link"))

    wait_for(f"the earlier link to {node.name} is gone", gone, pause=0.01)
    peer = ("type", "veth", "peer", "name", "eth0", "netns", node.pid)
    run("ip", "link", "add", node.name, "netns", controller.pid, *peer)
    controller.run("ip", "link", "set", node.name, "master", "hosts", "up")
    node.run("ip", "address", "add", f"{ADDRESSES[node.name]}/24", "dev", "eth0")
    node.run("ip", "link", "set", "eth0", "up")


def _links(text: str) -> set[str]:
    return {link["ifname"] for link in json.loads(text)}


def _remove_remains() -> None:
    """Remove what processes that have ended, or were killed, left."""
    for name in NODES:
        cgroups.remove(_group(name))
    with contextlib.suppress(VlmflowError):  # gone with the controller, or just going
        run("ip", "link", "delete", LINK)
    wait_for(f"the link {LINK} is gone", lambda: LINK not in _links(run("ip", "-j", "link")), pause=0.01)
    shutil.rmtree(FOLDER, ignore_errors=True)
