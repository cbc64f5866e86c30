"""Token lengths of rows by arithmetic, compared with ms-swift's own encode of every row.

Run alone: python tests/bench/bench_lengths.py [CORES]

The plain way is how ms-swift gets lengths where it needs them (group_by_length): it reads and scales every picture and
tokenizes every row. Both ways run in turns; the best of each counts. Seconds are those of the work,
without imports. Memory is measured in separate runs, because measuring takes time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from anonymous_memory import anonymous, peak_anonymous
from bench_rows import prepare, resolve, script, stages
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.lengths.measure import TemplateCounter
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.rows.chat import IMAGE_TAG
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel
from vlmflow.swift.child_process import environment

ROUNDS = 3
ROWS = 20_000
PLAIN_ROWS = 300
TEXT_ROWS = 3_000
SIZE = (640, 480)
"""Pixels of the pictures: COCO's."""

IMAGE_MAX_TOKENS = 1024
MODEL, TRAIN, LARGE = "model", "data/train.jsonl", "data/ten-times.jsonl"
PLAIN, TEXT = "data/plain.jsonl", "data/text.jsonl"


def bench_lengths(folder: Path, cores: int) -> dict[str, Any]:
    """Measure rows per second of both ways, and our peak memory at two sizes.

    folder: an empty folder, to be filled.

    Returns rates, the ratio with one core each, and peaks above an idle process with tokenizer and picture manifest
    loaded. It checks that both ways give the same lengths.
    """
    _prepare(folder, cores)
    ours, plain = {1: [], cores: []}, []
    both: dict[str, list[Any]] = {f"{way} {file}": [] for file in (PLAIN, TEXT) for way in ("plain", "template")}
    for _ in range(ROUNDS):
        for processes, outcomes in ours.items():
            outcomes.append(_said(_run("measure", TRAIN, processes, folder=folder), folder))
        for name, outcomes in both.items():
            outcomes.append(_said(_run(*name.split(), folder=folder), folder))
    plain = both[f"plain {PLAIN}"]
    for file in (PLAIN, TEXT):
        if both[f"plain {file}"][0]["lengths"] != both[f"template {file}"][0]["lengths"]:
            sys.exit("ms-swift's template gives other lengths by the sizes of pictures")
    if plain[0]["lengths"] != ours[1][0]["lengths"]:
        sys.exit("the two ways give different lengths")
    one, all_cores, swift = (
        max(run["rows"] / run["seconds"] for run in runs) for runs in (ours[1], ours[cores], plain)
    )
    seconds = {name: min(run["seconds"] for run in runs) for name, runs in both.items()}
    return {
        "rows": ours[1][0]["rows"],
        "cores": cores,
        "rows_per_second": round(all_cores),
        "rows_per_second_one_core": round(one),
        "plain_rows_per_second_one_core": round(swift, 1),
        "ratio_one_core": round(one / swift, 1),
        "time_by_template_to_plain_with_pictures": round(seconds[f"template {PLAIN}"] / seconds[f"plain {PLAIN}"], 2),
        "time_by_template_to_plain_of_texts": round(seconds[f"template {TEXT}"] / seconds[f"plain {TEXT}"], 2),
        "memory_mb": _peak(folder, TRAIN, cores),
        "memory_mb_at_ten_times_the_rows": _peak(folder, LARGE, cores),
    }


def _prepare(folder: Path, cores: int) -> None:
    """Write raw rows with pictures of COCO's size, convert and validate them, and make a tiny model."""
    prepare(folder, ROWS, cores)
    for picture in (folder / "pictures").rglob("*.*"):
        Image.open(picture).convert("RGB").resize(SIZE).save(picture)
    resolve(folder, cores)
    tiny = script("make_tiny_model", folder=folder / MODEL, text=f"[{folder / 'train.json'}]")
    for command in [*stages(folder, cores).values(), tiny]:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = (folder / TRAIN).read_bytes()
    lines = rows.splitlines(keepends=True)
    (folder / PLAIN).write_bytes(b"".join(lines[:PLAIN_ROWS]))
    (folder / TEXT).write_bytes(b"".join(map(_without_picture, lines[:TEXT_ROWS])))
    (folder / LARGE).write_bytes(rows * 10)


def _without_picture(line: bytes) -> bytes:
    row = json.loads(line) | {"images": []}
    for turn in row["conversations"]:
        turn["value"] = turn["value"].replace(IMAGE_TAG, "")
    return json.dumps(row).encode() + b"\n"


def _run(way: str, *words: object, folder: Path) -> list[str]:
    return [sys.executable, __file__, way, str(folder), *map(str, words)]


def _said(command: list[str], folder: Path) -> Any:
    """Run one of the two ways in its own process, and return the JSON in its last line."""
    env = environment(folder / "store" / "bench", IMAGE_MAX_TOKENS, folder / "cache", 1)
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)  # PYTHONSAFEPATH leaves it out
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, name: str, processes: int) -> None:
    """Our way: measure all rows of a file; print the seconds and the first lengths."""
    counter = _counter(folder)
    begun = time.perf_counter()
    lengths = measure_rows(folder / name, counter, processes)
    first = [row.tokens for row in islice(lengths, PLAIN_ROWS)]
    rows = len(first) + sum(1 for _ in lengths)
    print(json.dumps({"seconds": time.perf_counter() - begun, "rows": rows, "lengths": first}))


def template_way(folder: Path, name: str) -> None:
    """By ms-swift's template in a child, as models without a fast form are counted."""
    decoder = msgspec.json.Decoder(ShareGptRow)
    rows = [decoder.decode(line) for line in (folder / name).read_bytes().splitlines()]
    data = TrainingData(folder / name, folder / name, folder / "store" / "bench", "", False)
    with tempfile.TemporaryDirectory() as scratch:
        model = BaseModel(folder / MODEL, "qwen3_vl", "")
        counter = TemplateCounter.of_run(model, data, IMAGE_MAX_TOKENS, {}, Path(scratch), whole=False)
        counter.measure(rows[:1])  # the child has imported ms-swift
        begun = time.perf_counter()
        counted = [sum(tokens[:2]) for tokens in counter.measure(rows)]
        print(json.dumps({"seconds": time.perf_counter() - begun, "rows": len(rows), "lengths": counted}))


def plain_way(folder: Path, name: str) -> None:
    """ms-swift's way: encode every row of a file, including its picture."""
    from swift import get_processor, get_template
    from swift.dataset import load_dataset

    template = get_template(get_processor(str(folder / MODEL), model_type="qwen3_vl"), max_length=1 << 30)
    template.set_mode("train")
    dataset, _ = load_dataset([str(folder / name)], strict=True)
    begun = time.perf_counter()
    lengths = [len(template.encode(row)["input_ids"]) for row in dataset]
    print(json.dumps({"seconds": time.perf_counter() - begun, "rows": len(lengths), "lengths": lengths}))


def _counter(folder: Path) -> TokenCounter:
    return TokenCounter(folder / MODEL, read_picture_manifest(folder / "images.jsonl"), IMAGE_MAX_TOKENS)


def _peak(folder: Path, name: str, processes: int) -> int:
    """Return the peak of anonymous memory in MB above that of a process that has only loaded its data."""
    with subprocess.Popen(_run("idle", folder=folder), stdout=subprocess.PIPE) as idle:
        idle.stdout.readline()
        before = anonymous(idle.pid)
        idle.kill()
    with subprocess.Popen(_run("measure", name, processes, folder=folder), stdout=subprocess.DEVNULL) as process:
        return round((peak_anonymous(process) - before) / 1e6)


def main(way: str, folder: Path, *words: str) -> None:
    """Run one of the measured processes."""
    if way == "measure":
        measure(folder, words[0], int(words[1]))
    elif way == "plain":
        plain_way(folder, words[0])
    elif way == "template":
        template_way(folder, words[0])
    else:
        counter = _counter(folder)
        print(counter, flush=True)
        time.sleep(9)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            cores = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
            print(json.dumps(bench_lengths(Path(scratch).resolve(), cores), indent=1))
