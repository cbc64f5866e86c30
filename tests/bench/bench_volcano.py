"""Convert and validate rows in Volcano's form, 1.3 GB in one array, compared with the plain way and the limit.

Run alone: python tests/bench/bench_volcano.py [ROWS]; it takes 6 GB in the working directory.

The limit is that of limit.py, also measured without writing. The plain way is what people write first: json.load, a
loop, json.dumps. All run as processes, in turns; the best of each counts. Memory is measured in separate runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import limit
from bench_rows import idle_memory, peak, script, seconds

from bulk_rows import write_volcano_rows
from workflow_runs import validation

ROWS = 939_000
ROUNDS = 3
STAGES = ("convert_rows", "validate_sharegpt")


def bench_volcano(folder: Path, cores: int, rows: int = ROWS) -> dict[str, Any]:
    """Measure the seconds of our two stages, of the limit and of the plain way, and our peak memory.

    folder: an empty folder, to be filled.

    Returns the conversion's share of the limit (goal: 0.6), and peaks above an idle interpreter with the modules
    loaded (goal: 300 MB at most).
    """
    write_volcano_rows(folder / "train.json", rows, seed=1)
    resolve = script(
        "resolve_images", raw=folder / "train.json", manifest=folder / "train.jsonl", dataset="bench",
        roots=json.dumps([str(folder / "pictures")]), store=folder / "store", limits="{}", threads=cores,
    )  # fmt: skip
    subprocess.run(resolve, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    commands = stages(folder, cores) | {
        "limit": limit.command("volcano", folder, cores),
        "unwritten": limit.command("volcano-unwritten", folder, cores),
        "plain": [sys.executable, __file__, "plain", str(folder)],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            taken[name].append(seconds(command)[0])
    best = {name: min(times) for name, times in taken.items()}
    return {
        "rows": rows,
        "raw_megabytes": round((folder / "train.json").stat().st_size / 1e6),
        "cores": cores,
        **{f"{name}_seconds": round(value, 2) for name, value in best.items()},
        "convert_rows_per_second": round(rows / best["convert_rows"]),
        "convert_share_of_limit": round(best["limit"] / best["convert_rows"], 2),
        "convert_times_plain": round(best["plain"] / best["convert_rows"], 1),
        **{
            f"{name}_memory_mb": round((peak(command) - idle_memory(name)) / 1e6)
            for name, command in stages(folder, cores).items()
        },
    }


def stages(folder: Path, cores: int) -> dict[str, list[str]]:
    """Return the command lines of the two stages, as their rules call them."""
    raw, converted, rejects = (folder / name for name in ("train.json", "converted.jsonl", "rejects.jsonl"))
    unread, data = folder / "unread.json", folder / "data"
    return {
        "convert_rows": script(
            "convert_rows", raw=raw, converted=converted, rejects=rejects, unread=unread, split="train",
            settings="{kind: volcano, modality: image}", threads=cores,
        ),
        "validate_sharegpt": script(
            "validate_sharegpt", raw_train=raw, converted=f"[{converted}]", rejects=f"[{rejects}]",
            unread=f"[{unread}]", pictures=f"[{folder / 'train.jsonl'}]", stats=data / "stats.json",
            counts=data / "counts.html", threads=cores,
            settings=json.dumps(validation(kind="volcano", val_share=0.02, test_share=0.02, max_reject_share=0.05)),
        ),
    }  # fmt: skip


def plain(folder: Path) -> None:
    """Convert in the plain way, on one core."""
    with (folder / "train.json").open() as file:
        rows = json.load(file)
    with (folder / "plain.jsonl").open("w") as out:
        for number, row in enumerate(rows):
            if "image" not in row:
                continue
            turns = [{"from": turn["from"], "value": turn["value"].strip()} for turn in row["conversations"]]
            question = turns[0]["value"].replace("<image>", "").strip()
            turns[0]["value"] = "<image>\n" + question
            made = {
                "id": str(number),
                "source": row["image"].split("/")[0],
                "images": [row["image"]],
                "attempts": list(range(1, 1 + len(turns) // 2)),
                "scores": [],
                "conversations": turns,
            }
            out.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        begun = time.perf_counter()
        plain(Path(sys.argv[2]))
        print(time.perf_counter() - begun)
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            count = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
            print(json.dumps(bench_volcano(Path(scratch).resolve(), os.cpu_count(), count), indent=1))
