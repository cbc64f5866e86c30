"""A run that does not fit its GPU ends before the training, and trains nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked_snakemake import called
from text_run import SWIFT_ARGS
from tiny_models import write_text_model
from workflow_runs import ROOT, vlmflow

SIZE = {"hidden_size": 16384, "intermediate_size": 49152, "num_attention_heads": 128}
"""Of few and wide layers, written into a tiny model's config.json: the shapes of its weights are not read before the
training, but the names of all tensors are."""


def with_a_gpu(folder: Path) -> dict[str, str]:
    """Give the environment of a machine whose driver lists one GPU; without one, Snakemake starts no job."""
    folder.mkdir(exist_ok=True)
    driver = folder / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: a card'\n")
    driver.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def run_snakemake(folder: Path, target: str, **run: Any) -> tuple[int, str]:
    run = {"model": "tiny", "dataset": "alpaca", "train": {"max_length": 512, "swift_args": SWIFT_ARGS}} | run
    mine = {
        "models": {"tiny": {"source": "tiny", "model_type": "qwen3", "template": "qwen3"}},
        "datasets": {"alpaca": {"train": "rows.json", "val_share": 0.1}},
        "runs": {"big": run},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called(
        [*call, "--configfile", str(folder / "mine.yaml"), "--cores", "2", "--", target], env=with_a_gpu(folder / "bin")
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_does_not_fit_its_gpu_ends_before_the_training(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZE))
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    full = {"tuner": "full", "gpu": "rtx-4090"}
    code, said = run_snakemake(tmp_path, "checkpoints/big/smoke", **full)
    assert code != 0
    assert "of GeForce RTX 4090's 24 GB" in said
    assert "estimate: ignore" in said
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "stores" / "runs").exists()
    code, said = run_snakemake(tmp_path, "reports/estimate-big.html", **full)
    assert code == 0, said[-4000:]
    code, said = run_snakemake(tmp_path, "estimates/big.json", **full, estimate="ignore")
    assert code == 0, said[-4000:]
    words = vlmflow("estimate", tmp_path / "mine.yaml", "--json", "--cores", "2", "--directory", tmp_path)
    told = subprocess.run(words, env=with_a_gpu(tmp_path / "bin"), capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == json.loads((tmp_path / "estimates" / "big.json").read_text())
