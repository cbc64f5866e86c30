"""Convert messages with parts, and resolve pictures that are in the data, each compared with the least that is needed.

Run alone: python tests/bench/bench_forms.py

Messages: rows with parts and paths of pictures, against decoding and encoding the same bytes without a type, on as many
cores. Pictures: parquet with bytes and JSON with data URLs, against the same rows and pictures as files, and writing
these files. All run as processes, in turns; the best of each counts.
"""

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import limit
import pyarrow as pa
import pyarrow.parquet as pq
from bench_pictures import write_photographs
from bench_rows import idle_memory, peak, script, seconds

ROWS = 100_000
PHOTOGRAPHS = 1_500
ROUNDS = 3
WORDS = ["count", "the", "shapes", "left", "of", "a", "red", "disc", "and", "name", "their", "colour"]


def bench_forms(folder: Path, cores: int, rows: int = ROWS) -> dict[str, Any]:
    """Measure seconds, and the shares of the least (goals: 0.5 for messages, 0.9 for pictures in the data).

    folder: an empty folder, to be filled.
    """
    write_messages(folder / "train.json", rows)
    files = write_pictures(folder)
    commands = {
        "messages": script(
            "convert_rows", raw=folder / "train.json", converted=folder / "converted.jsonl",
            rejects=folder / "rejects.jsonl", unread=folder / "unread.json", split="train",
            settings="{kind: messages, modality: null}", threads=cores,
        ),
        "messages_limit": limit.command("any", folder, cores),
        **{name: resolving(folder, name, cores) for name in files},
        "writing": [sys.executable, "-c", WRITING, str(folder / "root"), str(folder / "store-copies")],
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            for store in folder.glob("store-*"):
                os.rename(store, Path(tempfile.mkdtemp(dir=folder)) / "old")
            taken[name].append(seconds(command)[0])
    best = {name: min(times) for name, times in taken.items()}
    least = best["files"] + best["writing"]
    memory = {name: round((peak(commands[name]) - idle_memory("resolve_images")) / 1e6) for name in files}
    return {
        "rows": rows,
        "cores": cores,
        **{f"{name}_seconds": round(value, 2) for name, value in best.items()},
        "messages_share_of_limit": round(best["messages_limit"] / best["messages"], 2),
        "parquet_share": round(least / best["parquet"], 2),
        "data_urls_share": round(least / best["data_urls"], 2),
        **{f"{name}_memory_mb": value for name, value in memory.items()},
    }


def write_messages(file: Path, rows: int) -> None:
    """Write rows of two rounds, each with two pictures among its parts."""
    rng = Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    def row(number: int) -> str:
        turns = []
        for place in range(2):
            pictures = [{"type": "image", "image": f"shapes/{number}-{place}-{n}.png"} for n in range(2)]
            asked = [{"type": "text", "text": words(30)}, *pictures, {"type": "text", "text": words(20)}]
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": words(80)}]
        return json.dumps({"messages": turns})

    with file.open("w") as out:
        out.write("[" + ",\n".join(map(row, range(rows))) + "]")


def write_pictures(folder: Path) -> list[str]:
    """Write photographs as files that rows name, in parquet, and as data URLs; returns the names of these ways."""
    every = write_photographs(folder / "root")
    names = every[:PHOTOGRAPHS]
    for name in every[PHOTOGRAPHS:]:
        (folder / "root" / name).unlink()
    asked = [{"prompt": f"What is {number}?", "completion": "It."} for number in range(len(names))]
    contents = [(folder / "root" / name).read_bytes() + number.to_bytes(4) for number, name in enumerate(names)]
    for name, content in zip(names, contents, strict=True):
        (folder / "root" / name).unlink()  # one of several hard links
        (folder / "root" / name).write_bytes(content)
    cells = {
        "files": names,
        "data_urls": [f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" for content in contents],
    }
    for name, pictures in cells.items():
        rows = [row | {"image": picture} for row, picture in zip(asked, pictures, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [row | {"image": {"bytes": content, "path": None}} for row, content in zip(asked, contents, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "parquet.parquet", row_group_size=100)
    return [*cells, "parquet"]


def resolving(folder: Path, name: str, cores: int) -> list[str]:
    """Return the command line that resolves the pictures of one of the files."""
    raw = folder / f"{name}.{'parquet' if name == 'parquet' else 'jsonl'}"
    roots = [str(folder / "root")] if name == "files" else []
    return script(
        "resolve_images", raw=raw, manifest=folder / name / "train.jsonl", dataset="bench", roots=json.dumps(roots),
        store=folder / f"store-{name}", limits="{}", threads=cores,
    )  # fmt: skip


WRITING = """
import sys, time
from pathlib import Path
begun = time.perf_counter()
root, copies = map(Path, sys.argv[1:])
for file in root.rglob("*.jpg"):
    copy = copies / file.relative_to(root)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(file.read_bytes())
print(time.perf_counter() - begun)
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        print(json.dumps(bench_forms(Path(scratch).resolve(), os.cpu_count() or 1), indent=1))
