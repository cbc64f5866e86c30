"""Convert and validate rows in FIRE's form, compared with the plain way, and the memory at ten times the size.

Run alone: python tests/bench/bench_rows.py [CORES]; it takes 6 GB in the working directory.

The plain way is what people write first: json.load, a loop, jsonschema per row, json.dumps. It and our two
stages run as processes, in turns; the best of each way counts. Seconds are those of the work; the start of the
processes with their imports, which does not grow with the rows, is given separately. Memory is measured in
separate runs, because measuring takes time.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import limit
from anonymous_memory import anonymous, peak_anonymous

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from bulk_rows import write_fire_rows
from vlmflow.harness.stage import run_stage
from vlmflow.rows.sharegpt import json_schema
from workflow_runs import validation

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
FORM = {"form": "trajectory", "max_history_rounds": 6}


def bench_rows(folder: Path, cores: int, rows: int = 100_000) -> dict[str, Any]:
    """Measure rows per second of both ways with `rows` rows, and our peak memory with these and with ten times as many.

    folder: an empty folder, to be filled.

    Returns rates, their ratio (goal: 10), the conversion's share of the limit of limit.py (goal: 0.6), and peaks
    above an idle interpreter with the modules loaded (goal: 300 MB at most).
    """
    small, large = folder / "small", folder / "large"
    prepare(small, rows, cores)
    ours, plain, limits = [], [], []
    for _ in range(ROUNDS):
        ours.append([seconds(command) for command in stages(small, cores).values()])
        plain.append(seconds([sys.executable, __file__, "plain_way", str(small)]))
        limits.append(seconds(limit.command("fire", small, cores))[0])
    (convert, convert_start), (validate, validate_start) = map(min, zip(*ours, strict=True))
    plain_work, plain_start = min(plain)
    result = {
        "rows": rows,
        "cores": cores,
        "convert_seconds": round(convert, 2),
        "validate_seconds": round(validate, 2),
        "start_seconds": round(convert_start + validate_start, 2),
        "plain_seconds": round(plain_work, 2),
        "plain_start_seconds": round(plain_start, 2),
        "rows_per_second": round(rows / (convert + validate)),
        "plain_rows_per_second": round(rows / plain_work),
        "ratio": round(plain_work / (convert + validate), 1),
        "limit_seconds": round(min(limits), 2),
        "convert_share_of_limit": round(min(limits) / convert, 2),
    }
    prepare(large, 10 * rows, cores)
    for name, place in (("", small), ("_at_ten_times_the_rows", large)):
        for script, command in stages(place, cores).items():
            result[f"{script}_memory_mb{name}"] = round((peak(command) - idle_memory(script)) / 1e6)
    return result


def prepare(folder: Path, rows: int, cores: int) -> None:
    """Write `rows` raw rows with their pictures, and resolve these."""
    write_fire_rows(folder / "train.json", rows, seed=1)
    resolve(folder, cores)


def resolve(folder: Path, cores: int) -> None:
    """Resolve the pictures of the raw rows in `folder`."""
    command = script(
        "resolve_images", raw=folder / "train.json", manifest=folder / "images.jsonl", dataset="bench",
        roots=json.dumps([str(folder / "pictures")]), store=folder / "store", limits="{}", threads=cores,
    )  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stages(folder: Path, cores: int) -> dict[str, list[str]]:
    """Return the command lines of the two stages, as their rules call them."""
    raw, converted, rejects = (folder / name for name in ("train.json", "converted.jsonl", "rejects.jsonl"))
    unread, data = folder / "unread.json", folder / "data"
    return {
        "convert_rows": script(
            "convert_rows", raw=raw, converted=converted, rejects=rejects, unread=unread, split="train",
            settings=json.dumps({"kind": "fire", "modality": None, **FORM, "row_limits": {}}), threads=cores,
        ),
        "validate_sharegpt": script(
            "validate_sharegpt", raw_train=raw, converted=f"[{converted}]", rejects=f"[{rejects}]",
            unread=f"[{unread}]", pictures=f"[{folder / 'images.jsonl'}]", stats=data / "stats.json",
            counts=data / "counts.html", threads=cores,
            settings=json.dumps(validation(val_share=0.02, max_reject_share=0.05, **FORM)),
        ),
    }  # fmt: skip


def script(name: str, **values: Any) -> list[str]:
    """Return the command line that runs a stage's script and prints how long its work took."""
    options = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [sys.executable, __file__, name, *options]


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command of `script`; return the seconds of its work, and of the rest: start, imports, end."""
    begun = time.perf_counter()
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    work = float(said)
    return work, time.perf_counter() - begun - work


def work(name: str) -> None:
    """Be the process of `script`: load a script, run its main with the options, and print the seconds of that."""
    plain = name == "plain_way"
    main = partial(plain_way, Path(sys.argv[1])) if plain else importlib.import_module(f"stages.{name}").main
    begun = time.perf_counter()
    if plain:
        main()
    else:
        run_stage(main)
    print(time.perf_counter() - begun)


def peak(command: list[str]) -> int:
    """Run a command and return the peak of the anonymous memory of all its processes together, in bytes."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        return peak_anonymous(process)


def idle_memory(name: str) -> int:
    """Return the anonymous memory of an interpreter that has the script's modules loaded and does nothing."""
    program = f"import sys, time; sys.path[0] = 'scripts'; import stages.{name}; print(flush=True); time.sleep(9)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as idle:
        idle.stdout.readline()
        memory = anonymous(idle.pid)
        idle.kill()
    return memory


def plain_way(folder: Path) -> None:
    """Convert and validate in the plain way."""
    validator = jsonschema.Draft202012Validator(json_schema())
    with (folder / "train.json").open() as file:
        rows = json.load(file)
    with (folder / "plain.jsonl").open("w") as out:
        for number, row in enumerate(rows):
            turns = [{"from": "human", "value": "<image>\n" + row["question"]["value"].replace("<image>", "").strip()}]
            for turn in row["conversations"][:-1]:
                speaker = "gpt" if turn["role"] == "student" else "human"
                turns.append({"from": speaker, "value": turn["value"].strip()})
            made = {
                "id": str(number),
                "source": row["source"],
                "images": [row["image"]],
                "attempts": list(range(1, row["round"] + 1)),
                "scores": row["score"],
                "conversations": turns,
            }
            validator.validate(made)
            out.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        work(sys.argv.pop(1))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            cores = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count()
            print(json.dumps(bench_rows(Path(scratch).resolve(), cores), indent=1))
