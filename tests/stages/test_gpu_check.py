"""`make gpu-check` and `make gpu-pack` on the CPU with a tiny model, and the command lines of the benchmarks."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from PIL import Image

from gpu import pack
from gpu.bounded import bounded
from gpu.long_rows import LONGEST, MEAN, lengths_of_rows, write_rows
from gpu.parts import NO_FLASH, NO_GPU, NO_TIME, Part, in_time, table
from gpu.road import REAL, STRATEGIES
from gpu.trainings import figures_of, figures_of_swift
from vlmflow.demo.tiny_model import TinyShape, fire_texts, write_tiny_model
from vlmflow.in_trainer.messages import Begin, Log
from vlmflow.lengths.count import TokenCounter
from vlmflow.pictures.manifest import PictureEntry
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.trajectories import trajectory_row
from vlmflow.swift.chat_form import ChatForm
from workflow_runs import ROOT

GPU_CHECK = ROOT / "tests" / "gpu" / "gpu_check.py"
PACKED = 60e6
"""The most bytes of the archive."""


@pytest.mark.slow
def test_the_check_measures_every_part_that_needs_no_gpu_and_leaves_only_its_results(tmp_path):
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    command = [sys.executable, GPU_CHECK, "--shape", "tiny", "--minutes", "90", "--out", out]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TMPDIR": str(temporary)}
    )
    figures = json.loads((out / "gpu-check.json").read_bytes())
    parts = figures["parts"]
    statuses = {name: part["status"] for name, part in parts.items()}
    not_run = dict.fromkeys(STRATEGIES, NO_GPU) | {"swift-padding-free": NO_FLASH}
    assert statuses == dict.fromkeys(parts, "done") | not_run, done.stdout
    assert done.returncode == 0
    assert table(figures) in done.stdout
    assert list(temporary.glob("gpu-check-*")) == []

    assert {"train_smoke/road", "train_model/road", "verify_tensors/road"} <= set(parts["road"]["stages"])
    same_steps = ("batch-8", "plan-32-rows", "swift")
    for name in (*same_steps, "batch-8-by-length", "plan-16-rows", "plan-8-rows", "resumed"):
        assert parts[name]["tokens_per_second"] > 0
        assert parts[name]["losses"][-1][0] == parts["one-row-each"]["losses"][-1][0]
    one_each = dict(parts["one-row-each"]["losses"])
    for name in same_steps:  # however they are cut; after the first step dropout differs
        assert dict(parts[name]["losses"]) == pytest.approx(one_each, rel=5e-2)
        assert parts[name]["losses"][0][1] == pytest.approx(next(iter(one_each.values())), rel=1e-4)
    assert dict(parts["swift"]["losses"]) == pytest.approx(one_each, rel=1e-4)
    times = [one["seconds"] for one in parts["passes"]["passes"]]
    assert len(times) == 5
    assert times[-1] > times[0]
    assert parts["resumed"]["stopped_at"] < len(parts["resumed"]["losses"])
    whole = dict(parts["plan-16-rows"]["losses"])
    assert dict(parts["resumed"]["losses"]) == pytest.approx(whole, rel=1e-3)


def test_a_part_that_does_not_exist_is_named_before_anything_runs(tmp_path):
    command = [sys.executable, GPU_CHECK, "--shape", "tiny", "--out", tmp_path, "--only", "passes", "zero"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check: --only zero: no such part; there are model, road, ")
    assert list(tmp_path.iterdir()) == []


def test_generated_rows_have_the_lengths_of_fire(tmp_path):
    rows = lengths_of_rows(REAL.rows)
    assert fmean(rows) == pytest.approx(MEAN, rel=0.01)
    assert max(rows) == LONGEST
    raw, pictures = tmp_path / "train.json", tmp_path / "pictures"
    write_rows(raw, pictures, rows, seed=1)
    write_tiny_model(tmp_path / "base", fire_texts([raw]), TinyShape(), seed=1)
    made = [
        trajectory_row(str(number), read_trajectory(msgspec.json.encode(row)))
        for number, row in enumerate(json.loads(raw.read_bytes()))
    ]
    sized = [
        PictureEntry(path="", rows=1, name=file.name, sha256="", width=size[0], height=size[1])
        for file in pictures.iterdir()
        for size in [Image.open(file).size]
    ]
    counter = TokenCounter(tmp_path / "base", sized, 1024, ChatForm.of({}, last_answer_only=False))
    counts = counter.count(made)
    text, shown = (sum(count) for count in zip(*counts, strict=True))
    trained = sum(counter.count_trained(made))
    assert (text + shown) / len(made) == pytest.approx(MEAN, rel=0.05)
    assert 0.95 * LONGEST < max(map(sum, counts)) <= LONGEST
    assert shown / (text + shown) == pytest.approx(0.25, abs=0.05)
    assert trained / text == pytest.approx(0.5, abs=0.1)


def test_parts_share_the_minutes_and_a_broken_one_stops_no_other():
    def broken(limit):
        raise ValueError("no such thing")

    parts = [
        Part("first", 0.5, lambda limit: {"status": "done", "seconds": limit}),
        Part("broken", 0.1, broken),
        Part("elsewhere", 0.1, broken, needs=NO_GPU),
        Part("long", 1.1, broken),
        Part("last", 0.5, lambda limit: {"status": "done", "seconds": limit}),
    ]
    found = dict(in_time(parts, 10.0))
    assert found["first"] == found["last"] == {"status": "done", "seconds": 5.0}
    assert found["broken"]["status"] == "failed: ValueError: no such thing"
    assert found["elsewhere"]["status"] == NO_GPU
    assert found["long"]["status"] == NO_TIME


def test_a_program_over_its_time_is_ended_and_its_last_lines_are_kept(tmp_path):
    code = "import time; print('begun', flush=True); time.sleep(100)"
    ended = bounded([sys.executable, "-c", code], tmp_path / "log", 1.0)
    assert ended.figures == {"status": "cut off after 1 s", "seconds": ended.seconds, "log": ["begun"]}
    failed = bounded([sys.executable, "-c", "raise SystemExit('why')"], tmp_path / "log", 60)
    assert failed.figures["log"] == ["why"]
    assert failed.status == "failed with code 1"


def test_the_first_two_steps_are_not_measured(tmp_path):
    logs = [Log(time, step, 4, 100 * step, loss=5.0 - step, memory=7) for step, time in enumerate((9, 12, 14, 16), 1)]
    ours = figures_of([Begin(0, 4, 0, 1, "", ""), *logs], {"rows_per_step": 8})
    log = tmp_path / "logging.jsonl"
    speeds = [9, 6, 14 / 3, 4]
    lines = [
        {"loss": 4.0 - step, "train_speed(s/it)": each, "memory(GiB)": 7 / 2**30} for step, each in enumerate(speeds)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"train_runtime": 16.0}]))
    swift = figures_of_swift(log, [100] * 4, 8)
    for figures in (ours, swift):
        assert figures["measured_steps"] == 2
        assert figures["tokens_per_second"] == pytest.approx(50)
        assert figures["losses"] == [(8, 4.0), (16, 3.0), (24, 2.0), (32, 1.0)]
        assert figures["memory"] == 7


def test_a_package_that_is_missing_or_of_another_version_is_one_line(tmp_path):
    (tmp_path / "transformers-4.57.0.dist-info").mkdir()
    (tmp_path / "transformers-4.57.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.0\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    # -S: without the packages that are installed.
    done = subprocess.run(
        [sys.executable, "-S", GPU_CHECK], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert any(re.fullmatch(r"gpu-check: transformers is 4\.57\.0, 5\.\S+ is needed", line) for line in lines)
    for name in ("torch", "ms-swift", "snakemake", "bitsandbytes"):
        assert f"gpu-check: {name} is missing" in lines
    assert any("make gpu-check PYTHON=.venv/bin/python" in line for line in lines)
    assert not any(name in done.stderr for name in pack.LEFT_OUT)
    assert "make gpu-pack" in lines[-1]


def test_each_package_of_the_archive_has_a_file_for_python_3_12(tmp_path):
    """Without downloading them; uv refuses a package that has none, by the hashes of the lock."""
    said = pack.install(tmp_path / "site", "3.12", "--dry-run")
    found = set(re.findall(r"(?m)^ \+ ([\w.-]+)==", said))
    locked = set(pack.locked())
    assert found < locked
    assert {"ms-swift", "transformers", "peft", "deepspeed", "bitsandbytes", "snakemake", "msgspec"} <= found
    without = locked - found
    assert {*pack.OF_THE_MACHINE, *pack.LEFT_OUT, "triton", "nvidia-cudnn-cu13", "kubernetes", "botocore"} <= without


@pytest.mark.slow
def test_the_archive_is_small_and_has_the_project_and_what_it_lists(tmp_path):
    archive = tmp_path / "vlmflow-gpu.tar.xz"
    command = [sys.executable, ROOT / "tests" / "gpu" / "pack.py", "--out", archive]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert archive.stat().st_size < PACKED
    listed = {name: float(size) for size, name in re.findall(r"(?m)^ *([\d.]+) MB  (\S+)$", done.stdout)}
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
    names = {member.name for member in members}
    assert {"vlmflow/Snakefile", "vlmflow/COMMIT", "vlmflow/tests/gpu/gpu_check.py", "site/swift/__init__.py"} <= names
    libraries = {name for name in names if "libbitsandbytes_" in name}
    assert libraries == {f"site/bitsandbytes/libbitsandbytes_{which}.so" for which in ("cpu", "cuda130")}
    size = sum(member.size for member in members if member.name.startswith("site/transformers/")) / 1e6
    assert listed["transformers"] == pytest.approx(size, abs=0.1)
    assert "gpu_check.py --shape 8b --minutes 8" in done.stdout


BENCH = ROOT / "tests" / "bench"


@pytest.fixture
def bench_rows(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_rows

    return bench_rows


def test_both_ways_over_rows_run(bench_rows: object, tmp_path: Path) -> None:
    bench_rows.prepare(tmp_path, 60, 2)
    for command in bench_rows.stages(tmp_path, 2).values():
        assert bench_rows.seconds(command)[0] > 0
    limit = bench_rows.limit.command("fire", tmp_path, 2)
    assert bench_rows.seconds(limit)[0] > 0
    plain = [sys.executable, str(BENCH / "bench_rows.py"), "plain_way", str(tmp_path)]
    assert float(subprocess.run(plain, check=True, capture_output=True, text=True).stdout) > 0
    assert (tmp_path / "data/stats.json").is_file()


@pytest.mark.slow
def test_the_starts_that_are_measured_reach_validated_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_starts

    monkeypatch.setattr(bench_starts, "ROUNDS", 1)
    monkeypatch.setattr(bench_starts, "TEST_ROWS", 60)
    for name in ("TRAINER", "PLAIN"):  # they take as long as everything else here
        monkeypatch.setattr(bench_starts, name, "import os")
    figures = bench_starts.bench_starts(tmp_path, 600)
    assert (tmp_path / "run-0/data/fire/stats.json").is_file()
    assert figures["data_processor_seconds"] > figures["plan_processor_seconds"] > 0
