"""The cost of checking files of earlier stages: the cheapest stage that reads pictures, with and without, and a model.

Run alone: python tests/bench/bench_integrity.py [CORES]
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from bench_pictures import write_photographs  # puts scripts/ on the path

from vlmflow.config.data_settings import PictureLimits
from vlmflow.core.account import LEVEL, RECORDS, refuse_changed
from vlmflow.core.files import sha256_of
from vlmflow.pictures import look_alikes
from vlmflow.pictures.resolve import resolve_pictures, write_picture_manifest
from vlmflow.pictures.roots import PictureRoots
from vlmflow.pictures.store import PictureStore

MODEL_BYTES = 2 << 30
ROUNDS = 3


def bench_integrity(folder: Path, cores: int) -> dict:
    """Measure `hash_pictures`, which decodes pictures at an eighth of their size, without checks and with them.

    folder: an empty folder, to be filled with COCO-sized JPEGs and a file of MODEL_BYTES, all in the page cache.

    Returns the seconds of the stage without a check, with the first check (which reads everything), a quick and a full
    one, the last three as ratios to the first; and the seconds for a model file. Best of ROUNDS in turns.
    """
    pictures = _Pictures(folder, cores)
    model = folder / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        for _ in range(MODEL_BYTES >> 20):
            file.write(os.urandom(1 << 10) * (1 << 10))
    digests = {"model.safetensors": sha256_of(model / "model.safetensors")}

    def look_at_model() -> None:
        refuse_changed("model files", model, digests, "models/bench", "")

    rounds: dict[str, list[tuple[float, float]]] = {"first": [], "quick": [], "full": []}
    bare = []
    for number in range(ROUNDS):
        with patch.dict(os.environ, {RECORDS: str(folder / f"records-{number}"), LEVEL: "quick"}):
            with patch.object(look_alikes, "refuse_changed_pictures"):
                bare.append(_seconds(pictures.hash))
            for name, taken in rounds.items():
                os.environ[LEVEL] = "full" if name == "full" else "quick"
                taken.append((_seconds(pictures.hash), _seconds(look_at_model)))
    without = min(bare)
    seconds = {name: tuple(map(min, zip(*taken, strict=True))) for name, taken in rounds.items()}
    return {
        "pictures": pictures.count,
        "cores": cores,
        "hash_pictures_without_a_look": round(without, 2),
        **{f"hash_pictures_with_a_{name}_look": round(both[0], 2) for name, both in seconds.items()},
        **{f"ratio_of_the_{name}_look": round(both[0] / without, 3) for name, both in seconds.items()},
        "model_bytes": MODEL_BYTES,
        **{f"model_{name}_look": round(both[1], 4) for name, both in seconds.items()},
    }


class _Pictures:
    """Pictures in a store, with their manifest."""

    def __init__(self, folder: Path, cores: int) -> None:
        names = write_photographs(folder / "root")
        self._folder, self._cores, self.count = folder, cores, len(names)
        roots = PictureRoots([str(folder / "root")], "image_roots")
        store = PictureStore(folder / "store", "bench")
        entries = resolve_pictures(dict.fromkeys(names, 1), roots, store, PictureLimits(), cores, "bench_integrity")
        for number, entry in enumerate(entries):
            assert entry.reason is None
            (folder / "store" / "bench" / entry.name).unlink()
            copy = folder / "own" / f"{number}.jpg"
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(Path(entry.file).read_bytes() + number.to_bytes(4, "big"))  # other bytes, the same picture
            (folder / "store" / "bench" / entry.name).symlink_to(copy)
            entry.sha256 = sha256_of(copy)
        write_picture_manifest(folder / "manifest.jsonl", entries)

    def hash(self) -> None:
        table = self._folder / "hashes.jsonl"
        look_alikes.hash_pictures(self._folder / "manifest.jsonl", table, self._folder / "store/bench", self._cores)


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        cores = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count()
        print(json.dumps(bench_integrity(Path(scratch), cores), indent=1))
