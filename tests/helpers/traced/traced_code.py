"""Writes down which code of the project a program executes; traced.pth lets every program of an environment import it.

A file for each process, named after the stage that it is part of; a line for each function that was called, and not
only to load a module: its file and first line. traced.txt beside this file says where: variables do not reach all.
"""

import os
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS, FOLDER = (HERE / "traced.txt").read_text().split("\n")[:2]


def stage() -> str:
    """Return the stage that this process is part of; "" for none."""
    process = os.getpid()
    while process > 1:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for word in words:
            if "/.snakemake/scripts/" in word and word.endswith(".py"):
                return word.split(".")[-2]
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""


def loads(frame) -> bool:
    """Return whether a module of the project is being loaded."""
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if is_module and frame.f_code.co_filename.startswith(SCRIPTS):
            return True
        frame = frame.f_back
    return False


def trace() -> None:
    """Trace this process, its threads and its forks."""
    file = os.open(f"{FOLDER}/{stage()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = set()

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code not in seen:
            if not code.co_filename.startswith(SCRIPTS) or not code.co_filename.endswith(".py"):  # as templates
                seen.add(code)
            elif not loads(frame):
                seen.add(code)
                name = code.co_filename.removeprefix(SCRIPTS)
                os.write(file, f"{name}\t{code.co_firstlineno}\n".encode())

    threading.setprofile(look)
    sys.setprofile(look)


if stage():
    trace()
