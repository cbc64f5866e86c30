"""Calls of the pages, as they are written there: recipes, the README's 60 rows, all commands, a run of another name."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageDraw

from cluster.shell import wait_for
from forked_snakemake import called
from vlmflow.config.yaml_file import read_layers
from workflow_runs import ROOT, RUN, copy_folder, vlmflow

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def plan(file: Path, folder: Path) -> tuple[int, str]:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called([*call, "-n", "--cores", "64", "--configfile", str(file)])
    return done.returncode, done.stdout + done.stderr


QUICK = ("8b-lora-80gb", "32b-qlora-80gb")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem, marks=[] if file.stem in QUICK else [pytest.mark.slow]) for file in RECIPES],
)
def test_a_recipe_plans(file: Path, tmp_path: Path) -> None:
    """With nothing but rows and pictures where it says."""
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cube."}]
    rows = [json.dumps({"image": f"{number}.png", "conversations": turns}) for number in range(9)]
    (tmp_path / "my-rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "my-pictures").mkdir()
    code, said = plan(file, tmp_path)
    assert code == 0, said[-4000:]
    for rule in ("convert_rows", "fetch_model_files", "estimate_run", "estimate_page", "train_smoke", "publish_merged"):
        assert f"{rule} " in said


def test_a_recipe_without_its_rows_says_so(tmp_path: Path) -> None:
    code, said = plan(RECIPES[0], tmp_path)
    assert code != 0
    assert said.splitlines()[-2].endswith("my-rows.jsonl does not exist")
    (tmp_path / "my-rows.jsonl").write_text("{}")
    code, said = plan(RECIPES[0], tmp_path)
    assert code != 0
    assert said.splitlines()[-2] == "datasets.my-rows.image_roots: no folder my-pictures"


def readme_block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[number]


def write_sixty_rows(folder: Path) -> None:
    """Write a person's input: mine/rows.jsonl in the form of the README's line, and mine/pictures/."""
    row = json.loads(readme_block("json"))
    pictures = folder / "mine" / "pictures"
    pictures.mkdir(parents=True)
    lines = []
    for number in range(60):
        picture = Image.new("RGB", (160 + number, 120), (4 * number, 80, 255 - 4 * number))
        ImageDraw.Draw(picture).ellipse((10 + number, 10, 60 + number, 60), fill=(255 - 3 * number, 2 * number, 40))
        picture.save(pictures / f"{number}.jpg")
        question, answer = (dict(turn) for turn in row["messages"])
        answer["content"] = f"A ball, the one with number {number}."
        lines.append(json.dumps({"messages": [question, answer], "image": f"{number}.jpg"}))
    (folder / "mine" / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_the_readme_s_run_of_sixty_rows_is_planned(tmp_path: Path) -> None:
    """Its file verbatim, its command, and rows of its form."""
    write_sixty_rows(tmp_path)
    (tmp_path / "my-run.yaml").write_text(readme_block("yaml"))
    model = tmp_path / "runs" / "demo" / "tiny-model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (model / name).write_text("{}")  # a plan does not read weights
    call = next(line for line in readme_block("console", 1).splitlines() if " -n " in line)
    name, *words = call.partition("#")[0].split()
    assert (name, words) == ("vlmflow", ["run", "my-run.yaml", "-n"])
    planned = subprocess.run(vlmflow(*words), cwd=tmp_path, capture_output=True, text=True, check=False)
    said = planned.stdout + planned.stderr
    assert planned.returncode == 0, said[-4000:]
    jobs = said[said.rindex("Job stats:") :]
    for rule in ("convert_rows", "resolve_images", "train_smoke", "train_model", "publish_merged", "data_page"):
        assert re.search(rf"^{rule} +1$", jobs, re.MULTILINE), jobs
    assert "merged/my-run" in said


PAGES = [ROOT / name for name in ("README.md", "docs/how-do-i.md", "docs/kubernetes.md", "docs/slurm.md")]

ELSEWHERE = {
    "vlmflow cluster": "Kubernetes: tests/remote/cluster",
    "vlmflow doctor": "a cluster: tests/remote",
    "snakemake --profile": "a cluster: tests/remote",
    "vlmflow run my-run.yaml merged/my-run --profile": "Slurm: tests/remote/slurm",
    "vlmflow status my-run.yaml": "Slurm: tests/remote/slurm",
    "vlmflow run profiles/demo": "the demo in its clone: test_evaluate.py",
    "vlmflow init": "without a clone: tests/unit/test_wheel.py",
    "vlmflow pins": "the hub: tests/unit/fetch/test_pins.py",
    "vlmflow publish": "an account of the hub: tests/unit/publish",
    "vlmflow env": "a package index: tests/unit/test_command.py",
    "vlmflow run my-run.yaml search/": "val of 100 pictures: test_search.py",
    "vlmflow run my-run.yaml --also search/": "val of 100 pictures: test_search.py",
    "vlmflow serve my-run --what adapter": "a GPU: tests/stages/test_serving.py",
}
"""The commands of the pages that do not run below, by their first words, and what runs them."""

UNTIL_CTRL_C = ("vlmflow serve", "vlmflow board")
ASKS = {"vlmflow try": "Is that so?\n", "vlmflow clean": "n\n"}
"""What a person answers."""

TOO_LATE = "vlmflow rows my-run --step 1200"
"""A step that the small run does not have."""


def documented() -> list[str]:
    """Return each line of the pages' console blocks that starts vlmflow or Snakemake, without its comment, once."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"^ *```console\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = (line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
            found |= {part: None for line in lines for part in re.split(" *&& *", line)}
    return [line for line in found if line.startswith(("vlmflow ", "snakemake "))]


def elsewhere(line: str) -> list[str]:
    return [words for words in ELSEWHERE if line.startswith(words)]


def test_every_command_of_the_pages_runs_below_or_elsewhere() -> None:
    lines = documented()
    assert len(lines) > 40
    assert {words for line in lines for words in elsewhere(line)} == ELSEWHERE.keys()
    here = [line for line in lines if not elsewhere(line)]
    assert len(here) > 15
    assert all(any(line.startswith(words) for line in here) for words in (*UNTIL_CTRL_C, *ASKS, TOO_LATE))


@pytest.mark.slow
def test_the_commands_of_the_pages_run_as_they_are_written(fresh_demo: Path, tmp_path: Path) -> None:
    """In their order, with the README's file and what the answers of how-do-i add to it."""
    write_sixty_rows(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    copy_folder(fresh_demo / "tiny-model", tmp_path / "runs" / "demo" / "tiny-model")
    written = yaml.safe_load(readme_block("yaml"))
    run = written["runs"]["my-run"]
    run["track"] = {"mlflow": "sqlite:///mlflow.db"}
    run["evaluate"] = {"splits": ["val", "test"]}
    (tmp_path / "my-run.yaml").write_text(yaml.safe_dump(written))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vlmflow").write_text(f'#!/bin/sh\nexec {shlex.join(vlmflow())} "$@"\n')
    (programs / "vlmflow").chmod(0o755)
    output = tmp_path / "output"
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "scripts")}
    for line in documented():
        if elsewhere(line):
            continue
        if "slow" in line:  # from here on the file has several runs
            written["runs"] |= {name: {key: run[key] for key in run.keys() - {"track"}} for name in ("slow", "fast")}
            (tmp_path / "my-run.yaml").write_text(yaml.safe_dump(written))
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=tmp_path,
                env=os.environ | own,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
            )
        assert process.stdin is not None
        if line.startswith(UNTIL_CTRL_C):
            wait_for(f"{line} serves", lambda: "http://" in output.read_text(), 120)
            process.send_signal(signal.SIGINT)
        process.communicate(next((answer for words, answer in ASKS.items() if line.startswith(words)), ""))
        expected = {130, 0} if line.startswith(UNTIL_CTRL_C) else {1} if line.startswith(TOO_LATE) else {0}
        assert process.returncode in expected, (line, output.read_text()[-6000:])
    for page in ("data-mine", "lengths-my-run", "eval-slow", "eval-fast", "index", "estimate-my-run"):
        assert (tmp_path / "reports" / f"{page}.html").is_file(), page
    for made in ("merged/my-run", "tracked/my-run.json", "eval/my-run/test"):
        assert (tmp_path / made).exists(), made


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
