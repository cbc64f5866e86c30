"""The picture check, compared with a bare Pillow decode: the stage should take little more than the decoding itself.

Run alone: python tests/bench/bench_pictures.py [CORES]
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from vlmflow.config.data_settings import PictureLimits
from vlmflow.pictures.resolve import resolve_pictures
from vlmflow.pictures.roots import PictureRoots
from vlmflow.pictures.store import PictureStore

PHOTOGRAPHS = 300
COPIES = 6
"""Names of each photograph (hard links): enough work to make the processes' start negligible."""

WIDTH, HEIGHT = 640, 480


def bench_pictures(folder: Path, cores: int) -> dict:
    """Measure pictures per second: bare Pillow before and after the stage, and the stage on all cores.

    folder: an empty folder, to be filled with COCO-sized JPEGs; its disk makes the store's links.

    Returns the rates and two ratios: `ratio`, stage / (cores * bare on one core), with the goal 0.9, and
    `ratio_all_cores`, stage / bare on all cores at once. If the cores are threads that share an execution
    unit, or the clock falls under load, only the second can come near 1. `ratio_again` is the first with
    an earlier run's store, in which the links exist.
    """
    root = folder / "root"
    names = write_photographs(root)
    files = [root / name for name in names]
    before = _bare_rate(files, 1), _bare_rate(files, cores)
    stage = _stage_rate(folder, names, cores)
    again = _stage_rate(folder, names, cores)
    after = _bare_rate(files, 1), _bare_rate(files, cores)
    one, all_cores = ((first + last) / 2 for first, last in zip(before, after, strict=True))
    return {
        "pictures": len(names),
        "bytes_per_picture": round(sum(file.stat().st_size for file in files) / len(files)),
        "cores": cores,
        "bare_per_second_one_core": round(one, 1),
        "bare_per_second_all_cores": round(all_cores, 1),
        "stage_per_second": round(stage, 1),
        "ratio": round(stage / (cores * one), 3),
        "ratio_again": round(again / (cores * one), 3),
        "ratio_all_cores": round(stage / all_cores, 3),
    }


def _stage_rate(folder: Path, names: list[str], cores: int) -> float:
    begun = time.perf_counter()
    roots = PictureRoots([str(folder / "root")], "image_roots")
    store = PictureStore(folder / "store", "bench")
    entries = resolve_pictures(dict.fromkeys(names, 1), roots, store, PictureLimits(), cores, "bench_pictures")
    seconds = time.perf_counter() - begun
    assert all(entry.reason is None for entry in entries)
    return len(names) / seconds


def write_photographs(root: Path) -> list[str]:
    """Write JPEGs with gradients and the noise of a sensor, 100 to 200 KB each."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    noise = random.normal(0, 14, (HEIGHT, WIDTH, 3))
    (root / "coco/train2017").mkdir(parents=True)
    names = [f"coco/train2017/{number:012}.jpg" for number in range(PHOTOGRAPHS * COPIES)]
    for number, name in enumerate(names[:PHOTOGRAPHS]):
        slope = random.uniform(-0.2, 0.2, (3, 2))
        light = 128 + (columns - WIDTH / 2)[..., None] * slope[:, 0] + (rows - HEIGHT / 2)[..., None] * slope[:, 1]
        pixels = np.clip(light + np.roll(noise, number * 7, axis=(0, 1)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / name, quality=92)
        for copy in names[number + PHOTOGRAPHS :: PHOTOGRAPHS]:
            (root / copy).hardlink_to(root / name)
    return names


def _bare_rate(files: list[Path], cores: int) -> float:
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        pool.map(_decode, files[:cores])
        begun = time.perf_counter()
        for _ in pool.imap_unordered(_decode, files, chunksize=8):
            pass
        return len(files) / (time.perf_counter() - begun)


def _decode(file: Path) -> None:
    with Image.open(file) as image:
        image.load()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        cores = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count()
        print(json.dumps(bench_pictures(Path(scratch), cores), indent=1))
