"""The controller pod's process: it runs the requested Snakemake; whoever requested it may disconnect.

    controller.py serve                  execute requested runs; the pod's main process
    controller.py start -- ARGUMENTS     request `snakemake --executor kubernetes ARGUMENTS`
    controller.py follow [--from BYTE]   show the output until the run ends; exits with Snakemake's exit code
    controller.py code                   print Snakemake's exit code, "on", or "none" if no run was requested
    controller.py stop                   interrupt the run, like Ctrl-C
    controller.py status                 print what runs; exit code 3 if something does

The request is in ../run of the working directory, on the volume: a run that the pod's end interrupted continues when
the pod is back; one that ended by itself or was stopped does not. Only the standard library: this file is mounted from
a ConfigMap and must work before there is a checkout.
"""

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

RUN = Path.cwd().parent / "run"
WANTED, STOP, ENDED, OUTPUT = (RUN / name for name in ("wanted.json", "stop", "ended.json", "output.log"))
SERVING = RUN / "serving"
"""Locked by the process that serves: a controller on a node that counts as lost may still live."""
KILLS = 3
"""How often a killed Snakemake (for example by the kernel, for its memory) is restarted."""
STARTED = "Job stats:"
"""Snakemake prints this once it has ended the Jobs of an earlier call."""
POLL = 0.5
"""Seconds between two checks of the folder."""
BUSY = 3
"""The exit code while a run is on."""

leaving = False
"""Whether the pod is ending."""


def serve() -> int:
    """Execute requests until SIGTERM; then interrupt Snakemake, which ends its Jobs, and keep the request."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Snakemake would inherit that we ignore it (nohup, &)
    RUN.mkdir(parents=True, exist_ok=True)
    with SERVING.open("w") as lock:
        while not leaving and not _locked(lock):
            time.sleep(POLL)
        kills = 0
        while not leaving:
            if _is_on():
                kills = kills + 1 if _run(json.loads(WANTED.read_text()), kills < KILLS) else 0
            time.sleep(POLL)
    return 0


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        sys.exit(
            f"{SERVING} cannot be locked ({error}), so two controllers could execute the same run\n"
            "  what to do: mount the volume of the claim controller-state with locks (Lustre: -o flock; NFS: without "
            "nolock), or give the claim another storage class"
        )
    return True


def _run(command: list[str], again: bool) -> bool:
    """Run Snakemake to its end.

    again: whether to keep the request if Snakemake is killed. Returns whether that happened.
    """
    with OUTPUT.open("a") as output:
        begun = output.tell()
        if output.tell():
            print("\nThe controller came back: the run continues.\n", file=output)
        print(f"$ {shlex.join(command)}", file=output, flush=True)
        try:
            snakemake = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            print(f"Snakemake could not be started: {error}", file=output, flush=True)
            _write(ENDED, 127)
            return False
        interrupted, late = False, STOP.exists()  # the pod's end interrupted a stop: the old Jobs end first
        while snakemake.poll() is None:
            late = late and STARTED not in OUTPUT.read_text(errors="replace")[begun:]
            if (leaving or STOP.exists()) and not interrupted and not late:
                snakemake.send_signal(signal.SIGINT)  # on SIGTERM Snakemake waits until its running jobs are done
                interrupted = True
            time.sleep(POLL)
        if leaving and not STOP.exists():
            print("The controller's pod is ending; the run continues when it is back.", file=output)
        elif snakemake.returncode < 0 and again and not STOP.exists():
            print(f"Snakemake was killed (signal {-snakemake.returncode}). It is restarted.", file=output, flush=True)
            return True
        else:
            code = snakemake.returncode if snakemake.returncode >= 0 else 128 - snakemake.returncode
            print(f"Snakemake ended with code {code}.", file=output, flush=True)
            _write(ENDED, code)
    return False


def _leave(number: int, frame: object) -> None:
    global leaving
    leaving = True


def start(arguments: list[str]) -> int:
    """Request a run; refused while another one is on."""
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_on():
            return status()
        for file in (WANTED, ENDED, STOP, OUTPUT):
            file.unlink(missing_ok=True)
        OUTPUT.touch()
        _write(WANTED, ["snakemake", "--executor", "kubernetes", *arguments])
    return 0


def status() -> int:
    """Print what runs, or how the last run ended."""
    if _is_on():
        print(f"{_wanted()} is running: follow it (vlmflow cluster log) or stop it (vlmflow cluster stop)")
        return BUSY
    print(f"{_wanted()} ended with code {ENDED.read_text()}" if WANTED.exists() else "no run was requested yet")
    return 0


def follow(begin: int) -> int:
    """Copy the output, from byte `begin` on, to ours as it grows; return Snakemake's exit code."""
    if not WANTED.exists():
        return status()
    with OUTPUT.open("rb") as output:
        output.seek(begin if begin <= OUTPUT.stat().st_size else 0)  # a shorter file belongs to another run
        while True:
            ended = ENDED.exists()  # checked before reading, so that everything written until then is read
            while text := output.read(1 << 16):
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
            if ended:
                return int(ENDED.read_text())
            time.sleep(POLL)


def code() -> int:
    """Print Snakemake's exit code: kubectl's own, when the connection breaks, looks like one."""
    print("on" if _is_on() else ENDED.read_text() if WANTED.exists() else "none")
    return 0


def stop() -> int:
    """Interrupt the run and wait until Snakemake has ended its Jobs."""
    if not _is_on():
        return status()
    STOP.touch()
    while not ENDED.exists():
        time.sleep(POLL)
    return status()


def _is_on() -> bool:
    return WANTED.exists() and not ENDED.exists()


def _wanted() -> str:
    return shlex.join(json.loads(WANTED.read_text()))


def _write(file: Path, value: object) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value))
    os.replace(part, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["serve", "start", "follow", "code", "stop", "status"])
    parser.add_argument("--from", dest="begin", type=int, default=0)
    own, arguments = sys.argv[1:], []
    if "--" in own:  # Snakemake's arguments may contain a "--", which argparse would remove
        arguments = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    given = parser.parse_args(own)
    wanted = {"start": lambda: start(arguments), "follow": lambda: follow(given.begin)}
    sys.exit(wanted.get(given.action, globals()[given.action])())
