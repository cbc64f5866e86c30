"""What a pod sees of itself, as one line of JSON: runs in the pods' image, given as text to its Python.

usage: in_pod.py [FOLDER …], the folders to try to write in.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
import uuid
from pathlib import Path


def tried(folder: str) -> str:
    """Write, rename and remove a file; gives what was wrong, or nothing."""
    first = Path(folder, f".doctor-{uuid.uuid4()}")
    second = first.with_suffix(".renamed")
    try:
        first.write_text("x")
        first.rename(second)
        second.unlink()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "user": os.getuid(),
                "time": time.time(),
                "python": platform.python_version(),
                "folders": {folder: tried(folder) for folder in sys.argv[1:]},
                "packages": {one.name: one.version for one in importlib.metadata.distributions()},
            }
        )
    )
