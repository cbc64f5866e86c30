"""docs/training.md, Renaming a run and On another machine: a training is reused under another name and path."""

import json
import shutil
import sys
from pathlib import Path

import yaml

from forked_snakemake import called
from vlmflow.config.yaml_file import read_layers
from workflow_runs import ROOT, RUN, copy_folder

NEW = "my-run"


def test_a_run_is_found_again_under_another_name_in_another_folder(demo_run: Path, tmp_path: Path) -> None:
    """Only rows, pictures, the model and the run's folder are copied; nothing is trained."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("sample", "tiny-model"):
        copy_folder(demo_run / name, folder / name)
    (folder / "stores" / "runs").mkdir(parents=True)
    copy_folder(demo_run / "stores" / "runs" / RUN, folder / "stores" / "runs" / NEW)
    logs = {log: log.stat().st_mtime_ns for log in (folder / "stores" / "runs").rglob("trainer.log")}
    demo = ROOT / "profiles" / "demo" / "run.yaml"
    run = read_layers([ROOT / "config.yaml", demo, demo_run / "quick.yaml"])["runs"][RUN]
    renamed = run | {"verify": run["verify"] | {"logits": False}}  # the merged files are compared below
    (folder / "renamed.yaml").write_text(yaml.safe_dump({"runs": {NEW: renamed}}))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    files = ["--configfile", str(demo), str(folder / "renamed.yaml"), "--cores", "2", "--"]
    done = called([*call, *files, f"merged/{NEW}"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for rule in ("train_smoke", "train_model"):
        assert f"{rule} {NEW}: already trained to step" in (folder / "logs" / rule / f"{NEW}.log").read_text()
    assert len(logs) == 2
    assert {log: log.stat().st_mtime_ns for log in logs} == logs
    before, after = (
        json.loads((place / "merged" / name / "provenance.json").read_text())
        for place, name in ((demo_run, RUN), (folder, NEW))
    )
    assert after["run"] == NEW
    assert after["training"]["digests"] == before["training"]["digests"]
    assert after["merged"] == before["merged"]
    assert (folder / "merged" / NEW / "README.md").read_text().count(f"# {NEW}\n") == 1
    shutil.rmtree(folder)
