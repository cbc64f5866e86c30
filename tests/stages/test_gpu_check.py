"""`make gpu-check` without a GPU: the same code on the CPU with a tiny model, and its checks."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from gpu.batches import batches, sound_rows
from gpu.check import check
from gpu.estimated import case_of_check
from gpu.needs import DISTRIBUTIONS, NEEDED
from gpu.plain_trainer import train_plainly
from gpu.random_model import Shape, write_random_model
from gpu.table import table
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.sample import TRAIN_FILE, write_sample
from vlmflow.estimate.work import model_flops
from workflow_runs import ROOT

TESTS = ROOT / "tests"
SCRIPTS = TESTS.parent / "scripts"
GPU_CHECK = TESTS / "gpu" / "gpu_check.py"


def require_sound(figures: dict) -> None:
    training, peak = figures["training"], figures["peak"]
    assert training["losses"][-1] < training["losses"][0]
    assert 0 < training["tokens"] < figures["rows"]["tokens"]
    assert training["tokens_per_second"] == training["tokens"] / training["seconds"]
    assert 0 < peak["share"] < 1
    assert figures["estimate"]["memory"] > 0
    assert 0 < figures["estimate"]["step_seconds"][0] < figures["estimate"]["step_seconds"][1]
    assert figures["estimate"]["memory_error"] is None, "a CPU's memory is not that of tensors alone"
    assert "GB of tensors (not measured here); a step" in table(figures)
    assert figures["tensors"]["touched"] == 2 * 7, "two decoder layers of seven linear layers"
    assert figures["tensors"]["changed_share"] > 0.5
    assert figures["logits"]["effect_found"] == pytest.approx(1, abs=0.1)
    assert figures["logits"]["dtype"] == "bfloat16"
    assert json.dumps(figures), "--json writes them"


@pytest.mark.slow
def test_the_command_prints_the_figures_of_the_workflows_own_trainer_and_leaves_nothing_behind(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    options = ["--device", "cpu", "--small", "--folder", place, "--json", tmp_path / "figures.json"]
    done = subprocess.run([sys.executable, GPU_CHECK, *options], capture_output=True, text=True, check=True)
    figures = json.loads((tmp_path / "figures.json").read_bytes())
    require_sound(figures)
    assert figures["training"]["trainer"].startswith("ms-swift")
    assert table(figures) in done.stdout
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_without_ms_swift_a_plain_loop_trains_on_padded_batches(tmp_path):
    figures = check(tmp_path, "cpu", small=True, trainer="plain", batch=3)
    require_sound(figures)
    assert figures["training"]["trainer"].startswith("plain loop")
    assert figures["training"]["positions"] > figures["training"]["tokens"]


def test_the_formula_is_what_pytorch_counts(tmp_path):
    """Compare every multiplication of one training step, forward and backward, with the documented formula."""
    sample, base, adapter = tmp_path / "sample", tmp_path / "base", tmp_path / "adapter"
    width, rank = 256, 16
    write_sample(sample, 60, 48, seed=1)
    shape = Shape(
        text={"num_hidden_layers": 3, "hidden_size": width, "intermediate_size": 512},
        vision={"depth": 3, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": width},
    )
    write_random_model(base, sample / TRAIN_FILE, shape, "cpu", seed=1)
    (batch,) = batches(sound_rows(sample)[:1], sample, base, size=1)
    settings = TrainSettings(
        max_steps=1, gradient_accumulation_steps=1, gradient_checkpointing=False, attention="eager"
    )
    with FlopCounterMode(display=False) as counter:
        train_plainly(base, [batch], settings, 0, adapter, "cpu")
    (row,) = batch.sizes
    case = case_of_check(base, batch.sizes, settings)
    work = model_flops(case.shape, case.way)
    future = work.token_square * row.tokens**2  # eager attention also computes the half that it masks
    first_inputs = 2 * row.tokens * ((4 + 2 + 2) * 32 * width + 3 * rank * width)  # no gradient of q, k, v's input
    counted = work.of_row(row.tokens, row.trained, row.patches)
    assert counter.get_total_flops() == counted + future - first_inputs


def test_a_machine_without_a_gpu_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(VlmflowError, match="finds no GPU here") as error:
        check(tmp_path, "cuda", small=True, trainer=None, batch=None)
    assert "--device cpu --small" in error.value.next_step


def test_each_module_that_is_missing_broken_or_too_old_is_one_line(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "transformers.py").write_text("")
    (tmp_path / "transformers-4.57.0.dist-info").mkdir()
    (tmp_path / "transformers-4.57.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.0\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    # -S: without the packages that are installed.
    done = subprocess.run(
        [sys.executable, "-S", GPU_CHECK], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == len(NEEDED) + 1
    for module, line in zip(NEEDED, lines, strict=False):
        assert line.startswith(f"gpu-check: {module} (")
        fault = {
            "torchvision": "does not import: operator torchvision::nms does not exist",
            "transformers": "is 4.57.0, 5 or newer is needed",
        }.get(module, "is missing")
        assert fault in line
        assert DISTRIBUTIONS.get(module, module) in line or "made for this GPU" in line
    assert "pip install 'msgspec==" in done.stderr
    assert lines[-1].startswith("gpu-check: without network: ")


def test_the_list_of_needed_modules_is_complete():
    assert set(third_party_imports(TESTS / "gpu" / "check.py")) <= set(NEEDED)


def third_party_imports(start: Path) -> Iterator[str]:
    """Yield the packages that a module, and every module of ours that it imports, import when they load."""
    waiting, seen = [start], set()
    while waiting:
        if (file := waiting.pop()) in seen:
            continue
        seen.add(file)
        for node in ast.parse(file.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = [root.joinpath(*name.split(".")).with_suffix(".py") for name in names for root in (TESTS, SCRIPTS)]
            waiting += [file for file in files if file.is_file()]
            package = names[0].split(".")[0] if names else ""
            if package and package not in {*sys.stdlib_module_names, "gpu", "vlmflow"}:
                yield package
