"""Memory does not grow with the rows, except for the few bytes per row that docs/decisions.md names."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from bench.anonymous_memory import peak_anonymous
from hub_server import command
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of
from vlmflow.fetch.placed import write_small_files
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.summary import LengthSummary, MaxLengths, MeasuredFiles, SplitLengths
from workflow_runs import validation

ROWS = (32_000, 96_000)
"""The numbers of rows of the two compared runs: the smaller one fills all buffers, and can be measured."""

TEXT = "It says so. " * 170
"""2 KB in every row: much more than a stage may keep of one."""

TEXT_ARGS = {"template": "qwen3"}

HELD = {"convert_rows": 50, "validate_sharegpt": 400, "fit_rows": 50}
"""The bytes that a stage may keep of a row: its place (16); digests of its group and of itself (280); none. The rest is
for buffers that fill up."""


def make_rows(folder: Path, count: int) -> None:
    """Write raw rows, and a model's files, of which only the manifest is read."""
    with (folder / "raw.jsonl").open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"What does {number} say?", "completion": f"{number}: {TEXT}"}) + "\n")
    (folder / "files").mkdir()
    (folder / "files" / "tokenizer.json").write_text("{}")
    write_small_files(folder / "model", folder / "files", ["tokenizer.json"], "/m", None)


def measure_rows(folder: Path) -> None:
    """Write lengths of the rows as `measure_lengths` would; all rows but every eighth are over-long."""
    data, lengths = folder / "data", folder / "lengths"
    lengths.mkdir()
    encode = msgspec.json.Encoder().encode
    for split in ("train", "val"):
        start = 0
        with (data / f"{split}.jsonl").open("rb") as rows, (lengths / f"{split}.jsonl").open("wb") as file:
            for number, line in enumerate(rows):
                length = RowLength(f"{split}-{number}", start, start + len(line) - 1, 200 if number % 8 else 100)
                file.write(encode(length) + b"\n")
                start += len(line)
    names = ["train.jsonl", "val.jsonl"]
    digests = MeasuredFiles(
        rows={name: sha256_of(data / name) for name in names},
        lengths={name: sha256_of(lengths / name) for name in names},
        model={"tokenizer.json": sha256_of(folder / "files" / "tokenizer.json")},
    )
    unread = SplitLengths(rows=0, tokens=0, text_tokens=0, picture_tokens=0, median=0, p99=0, longest=[])
    summary = LengthSummary(unread, unread, MaxLengths(0, 0), 64, TEXT_ARGS, 0, digests)
    write_account(lengths / "summary.json", summary)


def peak(folder: Path, stage: str, **values: object) -> int:
    """Run a stage on one core; give its largest anonymous memory in bytes."""
    process = subprocess.Popen(command(stage, **values), stderr=(folder / f"{stage}.said").open("w"))
    found = peak_anonymous(process, interval=0.005)
    assert process.returncode == 0, (folder / f"{stage}.said").read_text()
    return found


def peaks(folder: Path, count: int) -> dict[str, int]:
    """Convert, validate and fit `count` rows, each stage in a process of its own, and return what they took."""
    folder.mkdir()
    make_rows(folder, count)
    raw, data, lengths = folder / "raw.jsonl", folder / "data", folder / "lengths"
    converted = {name: folder / name for name in ("converted", "rejects", "unread")}
    what = {"kind": "prompt_completion", "modality": "text"}
    found = {"convert_rows": peak(folder, "convert_rows", raw=raw, split="train", settings=what, **converted)}
    found["validate_sharegpt"] = peak(
        folder,
        "validate_sharegpt",
        raw_train=raw,
        **{name: [str(file)] for name, file in converted.items()},
        stats=data / "stats.json",
        counts=folder / "counts.html",
        settings=validation(max_reject_share=0, **what),
    )
    measure_rows(folder)
    length = {"model_type": "qwen3", "image_max_tokens": 64, "text_args": TEXT_ARGS}
    found["fit_rows"] = peak(
        folder,
        "fit_rows",
        train_rows=data / "train.jsonl",
        val_rows=data / "val.jsonl",
        stats=data / "stats.json",
        model_files=folder / "model",
        train_lengths=lengths / "train.jsonl",
        val_lengths=lengths / "val.jsonl",
        summary=lengths / "summary.json",
        fitted=folder / "fitted",
        settings={**length, "max_length": 150, "over_long": "leave_out"},
        picture_store=folder / "store",
    )
    assert sum(1 for _ in (folder / "fitted" / "over_long.jsonl").open()) == pytest.approx(count * 7 / 8, abs=2)
    return found


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    # On a busy machine the measured peak of a short run may be too low; that of a long run is never too high.
    short = [peaks(tmp_path / f"few-{number}", ROWS[0]) for number in range(2)]
    few = {stage: max(found[stage] for found in short) for stage in short[0]}
    many = peaks(tmp_path / "many", ROWS[1])
    held = {stage: (many[stage] - few[stage]) / (ROWS[1] - ROWS[0]) for stage in few}
    assert {stage: found for stage, found in held.items() if found > HELD[stage]} == {}
