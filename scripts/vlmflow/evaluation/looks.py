"""The log of looks at test splits: `stores.evaluations/looks.jsonl`, a line per evaluation of one.

Who looks at the test split again and again, and keeps the run with the best figure, has trained on it. Nobody can
prevent that, so every look is counted.
"""

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from vlmflow.evaluation.kept_lines import whole_lines

LOG = "looks.jsonl"


class Look(msgspec.Struct, frozen=True):
    """One look.

    time: in UTC. what: evaluate or answer. rows_digest: SHA-256 of the test split's file. model: digest of the tuned
    model.
    """

    time: str
    what: str
    run: str
    dataset: str
    rows_digest: str
    model: str


def record_look(store: Path, what: str, run: str, dataset: str, rows_digest: str, model: str) -> int:
    """Append a look, and return how many there are at this data set's test split with these rows, this one included.

    store: `stores.evaluations`. The other parameters are fields of `Look`.
    """
    look = Look(datetime.now(UTC).isoformat(timespec="seconds"), what, run, dataset, rows_digest, model)
    store.mkdir(parents=True, exist_ok=True)
    with (store / LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if _last_line_is_cut(store / LOG):
            log.write(b"\n")
        log.write(msgspec.json.encode(look) + b"\n")
        log.flush()
        os.fsync(log.fileno())
        return sum(each.rows_digest == rows_digest for each in read_looks(store))


def read_looks(store: Path) -> list[Look]:
    """Return all looks; lines that a kill cut are left out."""
    return list(whole_lines(store / LOG, Look)) if (store / LOG).exists() else []


def _last_line_is_cut(file: Path) -> bool:
    """Return whether the last line was cut."""
    content = file.read_bytes()
    return bool(content) and not content.endswith(b"\n")
