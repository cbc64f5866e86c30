"""Hands a program that imports for seconds over to a process that has imported already (warm_programs.py).

Python runs this file first in the processes that tests start, by PYTHONPATH. The process that was started stays: it
passes signals on, and ends as the program does. If it is killed, so is the program; if its parent ends, it is killed,
as the program would be (core/processes.die_with_parent). Without a server, or if nothing is to be handed over, the
program starts here, after the code of VLMFLOW_BEFORE.
"""

import os
import re
import sys

HANDED_OVER = re.compile(
    r"torch\.distributed\.run|vlmflow\.in_trainer\.process|recording_worker"
    r"|vlmflow\.swift\.(encoded_rows|export|row_counter)|vlmflow\.evaluation\.answer_losses"
    r"|vlmflow\.search\.study_program|vlmflow\.track\.to_mlflow"
    r"|.*\b(make_tiny_model|train_smoke|train_model|trial|merge_weights|verify_tensors|verify_merged)\.py"
    r"|vlmflow\.command verify|.*\b(samplers|trainer_inputs)\.py"
    r"|(?s:\s*import .*\bfrom (swift|vlmflow\.swift\.encoded_rows) import.*)"
)
"""The programs: modules, scripts, and code (`-c`); of `vlmflow` one command."""


def program(words):
    """Return the module, script or code of a Python command line, without Python's options, and what follows it."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    return rest[1:] if rest[:1] in (["-m"], ["-c"]) else rest


def hand_over(folder):
    """Let the server run this process's program, and end as it does; return if this interpreter has none."""
    import json
    import signal
    import socket

    while (low := os.open(os.devnull, os.O_RDWR)) < 3:  # it starts without stdin, stdout or stderr
        pass
    os.close(low)
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    inherited = [
        number for number in inherited if os.path.exists(f"/proc/self/fd/{number}")
    ]  # one is of the list itself
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(os.path.join(folder, os.path.basename(sys.prefix)))
    except OSError:
        return
    mask = os.umask(0)
    call = {
        "files": [0, 1, 2, *inherited],
        "words": sys.orig_argv,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "mask": mask,
    }
    text = json.dumps(call | {"process": os.getpid()}).encode()
    socket.send_fds(server, [len(text).to_bytes(4)], call["files"])
    server.sendall(text)
    for number in inherited:
        os.close(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
    if program(sys.orig_argv)[0].startswith("vlmflow."):
        from ctypes import CDLL

        CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not (answer := server.recv(4)):
        raise ConnectionError("the process that ran this program (warm_programs.py) has ended")
    code = int.from_bytes(answer, signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


WORDS = program(sys.orig_argv) or [""]
NAME = " ".join(WORDS[: 2 if WORDS[0] == "vlmflow.command" else 1])
if "VLMFLOW_WARM" in os.environ and HANDED_OVER.fullmatch(NAME) and os.environ.get("VLMFLOW_FRESH") != NAME:
    try:
        hand_over(os.environ["VLMFLOW_WARM"])
    except BaseException as error:  # the program may run already: not once more here
        os.write(2, f"warm/sitecustomize.py: {error!r}\n".encode())
        os._exit(70)
if "VLMFLOW_BEFORE" in os.environ:
    with open(os.environ["VLMFLOW_BEFORE"]) as file:
        exec(compile(file.read(), file.name, "exec"), {})  # noqa: S102
