"""Measured losses that are kept: nothing is computed twice, after a kill or for the base of another run.

    <stores.evaluations>/losses/<digest of a model and how it is measured>/<time>-<random>.jsonl

Each measuring process writes a file of its own, a line per row, so writers need no lock. A line that a kill cut is
left out when the files are read.
"""

import hashlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.evaluation.answer_losses import Measured


class LossStore:
    """The losses of one model, measured in one way.

    folder: `stores.evaluations`. meaning: everything but the rows that determines losses: the model's digest, types,
    limits, arguments of the template, versions.
    """

    def __init__(self, folder: Path, meaning: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = folder / "losses" / digest

    def new_file(self) -> Path:
        """Return the name of a new file for one process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.jsonl"

    def read(self) -> dict[str, Measured]:
        """Return all whole lines, by their keys."""
        decoder = msgspec.json.Decoder(Measured)
        found: dict[str, Measured] = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            for line in file.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    continue
                try:
                    measured = decoder.decode(line)
                except msgspec.DecodeError:
                    continue
                found[measured.key] = measured
        return found
