"""Count seconds up to a number, from where an earlier count was saved; SIGTERM saves after two seconds and ends."""

import os
import signal
import sys
import time
from pathlib import Path

saved, told = Path("/outputs/faults/saved"), []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
count = int(saved.read_text()) if saved.exists() else 0
print(f"begins at {count} in {os.environ['HOSTNAME']}", flush=True)
while count < int(sys.argv[1]):
    time.sleep(1)
    count += 1
    if told:
        time.sleep(2)
        saved.write_text(str(count))
        sys.exit("told to end")
Path(sys.argv[2]).write_text(f"{count}\n")
