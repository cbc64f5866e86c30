"""Only what is stale reruns: a table of changes, read from real dry runs over finished outputs."""

import ast
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlmflow.pictures.manifest import read_picture_manifest
from workflow_runs import CHECKPOINT_STEPS, ROOT, RUN, STEPS, clone, copy_folder, snakemake, stale_rules

PUBLISHING = {"publish_merged"}
FROM_MERGING = {"merge_weights", "verify_tensors", "verify_merged", *PUBLISHING}
FROM_TRAINING = {"train_smoke", "train_model", *FROM_MERGING}
FROM_FITTING = {"fit_rows", "choose_rows", *FROM_TRAINING}
ESTIMATE = {"estimate_run"}
FROM_LENGTHS = {"measure_lengths", *ESTIMATE, *FROM_FITTING}
FROM_VALIDATION = {"validate_sharegpt", *FROM_LENGTHS}
FROM_CONVERSION = {"convert_rows", *FROM_VALIDATION}


@dataclass(frozen=True)
class Checkout:
    """A clone of the project, and a demo folder that it finished."""

    root: Path
    folder: Path


@pytest.fixture(scope="module")
def finished(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    base = tmp_path_factory.mktemp("stale")
    return Checkout(clone(base / "clone"), copy_folder(demo_run, base / "demo_run"))


@pytest.fixture
def checkout(finished: Checkout, tmp_path: Path) -> Checkout:
    return Checkout(copy_folder(finished.root, tmp_path / "clone"), copy_folder(finished.folder, tmp_path / "demo_run"))


def edit(name: str, old: str, new: str) -> Callable[[Checkout], None]:
    def change(checkout: Checkout) -> None:
        file = checkout.root / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return change


def overlay(text: str) -> Callable[[Checkout], None]:
    def change(checkout: Checkout) -> None:
        with (checkout.folder / "quick.yaml").open("w") as file:
            file.write(text)

    return change


QUICK_RUN = """
runs:
  qwen3vl-fire:
    verify: {{rows: {rows}}}
    train: {{checkpoint_steps: {saved}, evaluation_steps: {saved}, max_steps: {most}{train}}}
    smoke: {{sample: 4, steps: {steps}, longest: 4}}
{more}
"""


def settings(train: str = "", steps: int = 6, rows: int = 2, more: str = "") -> Callable[[Checkout], None]:
    return overlay(QUICK_RUN.format(saved=CHECKPOINT_STEPS, most=STEPS, train=train, steps=steps, rows=rows, more=more))


def touch_everything(checkout: Checkout) -> None:
    for file in checkout.root.rglob("*"):
        if file.is_file():
            file.touch()


def add_row(checkout: Checkout) -> None:
    raw = checkout.folder / "sample" / "FIRE-test.json"
    raw.write_text(raw.read_text() + " ")


def rename_module(checkout: Checkout, old: str, new: str) -> None:
    """Let all code import another module for `old`, as in a renamed file: dotted names below `vlmflow`."""
    for file in (checkout.root / "scripts").rglob("*.py"):
        text = file.read_text()
        if f"vlmflow.{old}" in text:
            file.write_text(text.replace(f"vlmflow.{old}", f"vlmflow.{new}"))


def rename_file(checkout: Checkout) -> None:
    rows = checkout.root / "scripts" / "vlmflow" / "rows"
    (rows / "holdout.py").rename(rows / "halves.py")
    rename_module(checkout, "rows.holdout", "rows.halves")


def merge_modules(checkout: Checkout) -> None:
    core = checkout.root / "scripts" / "vlmflow" / "core"
    with (core / "errors.py").open("a") as file:
        file.write((core / "progress.py").read_text().replace("from vlmflow.core.errors import log\n", ""))
    (core / "progress.py").unlink()
    rename_module(checkout, "core.progress", "core.errors")


def move_function(checkout: Checkout) -> None:
    """Let a function that conversion uses stand in a module of its own."""
    chat = checkout.root / "scripts" / "vlmflow" / "rows" / "chat.py"
    text = chat.read_text()
    (moved,) = (
        ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "json_text"
    )
    assert moved
    chat.with_name("moved.py").write_text(f"import json\n\n\n{moved}\n")
    first = text.index("\nfrom ")
    chat.write_text(f"{text[:first]}\nfrom vlmflow.rows.moved import json_text{text[first:].replace(moved, '')}")


CHANGES: dict[str, tuple[Callable[[Checkout], None], set[str]]] = {
    "nothing": (lambda checkout: None, set()),
    "the configuration rewritten in another order": (settings(), set()),
    "a fresh clone beside the outputs": (touch_everything, set()),
    "another comment in a rule file": (
        edit("rules/convert_rows.smk", "# Raw rows", "# The raw rows"),
        set(),
    ),
    "another learning rate": (settings(train=", learning_rate: 5e-3"), {*ESTIMATE, *FROM_TRAINING}),
    "another share held out": (settings(more="datasets: {fire: {val_share: 0.2}}"), FROM_VALIDATION),
    "near-duplicates of the test split left out": (
        settings(more="datasets: {fire: {near_duplicates: {drop: true}}}"),
        {"hash_pictures", *FROM_VALIDATION},
    ),
    "another raw test file": (
        add_row,
        {"fetch_rows", "resolve_images", *FROM_CONVERSION},
    ),
    "a function that conversion uses": (
        edit("scripts/vlmflow/rows/trajectories.py", "def timestep_rows(", "def rows_of_timesteps("),
        {"convert_rows", *FROM_VALIDATION},
    ),
    "a function that the estimate alone uses": (
        edit("scripts/vlmflow/estimate/memory.py", "def assumed(", "def as_assumed("),
        ESTIMATE,
    ),
    "another docstring": (
        edit("scripts/vlmflow/rows/trajectories.py", '"""The right answers', '"""Right answers'),
        set(),
    ),
    "a comment in the code that trains": (
        edit("scripts/vlmflow/in_trainer/checkpoints.py", "    def ends_here(", "    # A comment.\n    def ends_here("),
        set(),
    ),
    "a moved function": (move_function, set()),
    "a renamed file": (rename_file, set()),
    "two modules merged": (merge_modules, set()),
    "another text of the model card": (
        edit("scripts/vlmflow/reports/templates/card/card.md.jinja", "## Verification", "## What was verified"),
        PUBLISHING,
    ),
    "a function that the trainers run": (
        edit("scripts/vlmflow/in_trainer/checkpoints.py", "def ends_here(", "def ends_there("),
        FROM_TRAINING,
    ),
}
"""Of the settings only those that show how a change goes on by files, or that change which rules there are; that each
setting is among the params of just the rules that use it: test_params.py."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_reruns_what_depends_on_it_and_nothing_else(checkout: Checkout, name: str) -> None:
    change, expected = CHANGES[name]
    change(checkout)
    assert stale_rules(checkout.folder, root=checkout.root) == expected


def test_a_changed_page_template_reruns_only_the_pages(checkout: Checkout) -> None:
    pages = ["reports/data-fire.html", f"reports/lengths-{RUN}.html", f"reports/run-{RUN}.html"]
    snakemake(checkout.folder, "--", *pages, root=checkout.root)
    assert stale_rules(checkout.folder, *pages, root=checkout.root) == set()
    edit("scripts/vlmflow/reports/templates/style.css", "--train: #2f6fd0", "--train: #2f6fd1")(checkout)
    assert stale_rules(checkout.folder, *pages, root=checkout.root) == {"data_page", "lengths_page", "run_page"}


@pytest.mark.parametrize("cores", ["1", "16"])
def test_another_number_of_cores_reruns_nothing(finished: Checkout, cores: str) -> None:
    assert stale_rules(finished.folder, "--cores", cores, root=finished.root) == set()


def test_two_forms_of_one_source_never_share_a_file(finished: Checkout) -> None:
    more = "runs={qwen3vl-fire: {dataset: fire-timestep}}"
    stale = stale_rules(finished.folder, "--config", more, root=finished.root)
    assert stale == {"fetch_rows", "resolve_images", *FROM_CONVERSION}


def test_pictures_added_to_a_root_are_used_on_request(checkout: Checkout) -> None:
    """`vlmflow refresh-pictures`: 81,000 files are not watched, so the rule is forced; training follows."""
    manifest = ["images/fire/train.jsonl", "images/fire/test.jsonl"]
    entries = read_picture_manifest(checkout.folder / manifest[0])
    picture = checkout.folder / "sample" / "pictures" / next(e.path for e in entries if e.reason == "missing")
    shutil.copyfile(next(picture.parent.glob("*.jpg")), picture)
    snakemake(checkout.folder, "--forcerun", "resolve_images", "--", *manifest, root=checkout.root)
    assert "missing" not in {entry.reason for entry in read_picture_manifest(checkout.folder / manifest[0])}
    assert stale_rules(checkout.folder, root=checkout.root) == FROM_VALIDATION


def test_the_real_runs_plan_without_a_network_or_a_gpu(tmp_path: Path) -> None:
    """With the shipped configuration; the hub's address leads nowhere, so any use of the network fails."""
    done = subprocess.run(
        [
            "snakemake",
            "-n",
            "--directory",
            tmp_path,
            f"merged/{RUN}",
            "merged/qwen3vl-volcano",
            "merged/qwen3-alpaca",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin",
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This was a dry-run" in done.stdout + done.stderr
