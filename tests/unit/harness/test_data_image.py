"""Rules whose pods have the data image need nothing that only the training image has."""

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from workflow_runs import ROOT

TRAINING_ALONE = (
    "datasets",
    "matplotlib",
    "nltk",
    "openai",
    "peft",
    "rapidfuzz",
    "safetensors",
    "scipy",
    "swift",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages of envs/train.lock, imported by their names, that envs/data.lock does not have."""

WITHOUT = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ImportError(f"{name} is not in the data image")

sys.meta_path.insert(0, Missing())
for script in sys.argv[2:]:
    importlib.import_module(script)
"""


def test_scripts_of_the_data_image_import_no_package_of_training() -> None:
    scripts = set()
    for file in (ROOT / "rules").glob("*.smk"):
        for rule in re.split(r"\n(?:use )?rule ", file.read_text())[1:]:
            if "pod_template=" not in rule and (script := re.search(r'"\.\./scripts/stages/(\w+)\.py"', rule)):
                scripts.add(f"stages.{script[1]}")
    assert {"stages.convert_rows", "stages.data_page", "stages.publish_merged", "stages.run_page"} <= scripts
    import_without_training(scripts)


@pytest.mark.lengthy
def test_commands_of_the_data_environment_import_no_package_of_training() -> None:
    scripts = set()
    for target in re.findall(r"^\w+: \.venv/data\.stamp.*(?:\n\t.*)+", (ROOT / "Makefile").read_text(), re.MULTILINE):
        scripts |= {f"vlmflow.tools.{name}" for name in re.findall(r"\$\(TOOL\)\.(\w+)", target)}
    scripts |= {
        "vlmflow.remote.kubernetes.doctor",
        "vlmflow.remote.slurm.doctor",
        "vlmflow.remote.cluster.controller",
        "vlmflow.remote.storage.s3_get",
    }
    assert {"vlmflow.tools.status", "vlmflow.tools.track_run"} <= scripts
    import_without_training(scripts)


def import_without_training(scripts: Iterable[str]) -> None:
    words = [sys.executable, "-c", WITHOUT, " ".join(TRAINING_ALONE), *sorted(scripts)]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT / "scripts")}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
