"""SIGKILL in the middle of a stage, then the same command again: nothing to unlock, the same bytes as without the kill.

The tests kill (a) only the script, (b) only Snakemake, (c) both, or (d) every process, as when a machine loses power.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bulk_rows import write_fire_rows
from drawn_pictures import drawn
from hub_server import HubServer, served_hub
from tiny_models import file_names, write_wide_adapter, write_wide_base
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of
from vlmflow.fetch.placed import MANIFEST, ModelManifest, digest_of, hash_files, write_raw_account
from warm_programs import fresh
from workflow_runs import CHECKPOINT_STEPS, RUN, command, copy_folder, snakemake, words_of

VICTIMS = ["script", "snakemake", "both", "all"]


def victims(*quick: str) -> pytest.MarkDecorator:
    """Try all four ways with a stage; those that are not named run only before a release."""
    ways = [pytest.param(way, marks=[] if way in quick else pytest.mark.slow) for way in VICTIMS]
    return pytest.mark.parametrize("victims", ways)


@dataclass
class Stage:
    """One rule, ready to run in `folder`.

    words: Snakemake's target and options. begun: whether the rule is in the middle of its work.
    result: what to compare with an uninterrupted run.
    """

    folder: Path
    words: list[str]
    begun: Callable[[Path], bool]
    result: Callable[[Path], object]


def kill_in_the_middle(stage: Stage, victims: str) -> None:
    """Start the stage, kill `victims` once it has begun, and wait until no process is left."""
    with (
        fresh(),
        subprocess.Popen(
            command(stage.folder, *stage.words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as main,
    ):
        while not stage.begun(stage.folder):
            assert main.poll() is None, main.stdout.read()[-3000:]
            time.sleep(0.001)
        everybody = [psutil.Process(main.pid), *psutil.Process(main.pid).children(recursive=True)]
        script = next(process for process in everybody[1:] if ".snakemake/scripts/" in words_of(process))
        doomed = {"script": [script], "snakemake": everybody[:1], "both": [everybody[0], script], "all": everybody}
        first, *others = doomed[victims]
        first.send_signal(signal.SIGKILL)
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with the first one
                process.send_signal(signal.SIGKILL)
        main.stdout.read()
    _, alive = psutil.wait_procs(everybody, timeout=60)
    assert not alive, "processes outlived the kill"


def check(stage: Stage, victims: str, unbroken: object) -> None:
    kill_in_the_middle(stage, victims)
    snakemake(stage.folder, *stage.words)
    assert stage.result(stage.folder) == unbroken


RAW = "raw/fire/FIRE-train-100K.json"
RAW_ACCOUNT = "raw/fire/.fetched/FIRE-train-100K.json.json"


def only(rule: str, target: str) -> list[str]:
    """Request one target, which one rule makes from existing files."""
    return ["--allowed-rules", rule, "--", target]


def digests(*names: str) -> Callable[[Path], dict[str, str]]:
    return lambda folder: {name: sha256_of(folder / name) for name in names}


def grown(name: str, size: int) -> Callable[[Path], bool]:
    """Return whether a file, or a folder's content, has more than `size` bytes."""

    def begun(folder: Path) -> bool:
        files = [folder / name] if not (folder / name).is_dir() else list((folder / name).iterdir())
        try:
            return sum(file.stat().st_size for file in files) > size
        except FileNotFoundError:
            return False

    return begun


# --- the data stages ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bulk")
    write_fire_rows(folder / "train.json", 30_000, seed=1)
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub with FIRE's train file at its pinned revision, slow enough to kill the fetch."""
    with served_hub(monkeypatch) as hub:
        content = b"[" + b",".join(json.dumps({"row": n, "text": "x" * 80}).encode() for n in range(60_000)) + b"]"
        hub.add(
            "datasets/PengxiangLi/FIRE",
            {"FIRE-train-100K.json": content},
            revision="73b9f1397a8a50d944a7650a60ecda39140c2fc1",
        )
        hub.pace = 0.01
        yield hub


@victims("all")
def test_fetch_is_killed_and_resumes(server: HubServer, tmp_path: Path, victims: str) -> None:
    (tmp_path / "quick.yaml").write_text(
        "datasets: {fire: {train: 'hf://datasets/PengxiangLi/FIRE/FIRE-train-100K.json'}}"
    )
    part = "stores/raw/PengxiangLi--FIRE@73b9f1397a8a50d944a7650a60ecda39140c2fc1/FIRE-train-100K.json.part"
    content = server.repos["datasets/PengxiangLi/FIRE"].files["FIRE-train-100K.json"]
    stage = Stage(tmp_path, only("fetch_rows", RAW), grown(part, 1_000_000), lambda at: (at / RAW).read_bytes())
    check(stage, victims, content)
    # Received bytes are not fetched again; a few bytes are sent after the kill.
    assert server.sent("FIRE-train-100K.json") < 1.3 * len(content)


CONVERTED = ["converted/fire/train.jsonl", "converted/fire/train.rejects.jsonl"]
CONVERT = only("convert_rows", CONVERTED[0])


def conversion(folder: Path, rows: Path) -> Stage:
    (folder / "raw" / "fire").mkdir(parents=True)
    os.link(rows / "train.json", folder / RAW)
    write_raw_account(folder / RAW, folder / RAW_ACCOUNT)
    (folder / "quick.yaml").write_text("{}")
    return Stage(folder, CONVERT, grown(f"{CONVERTED[0]}.part", 5_000_000), digests(*CONVERTED))


@pytest.fixture(scope="module")
def converted(raw_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    stage = conversion(tmp_path_factory.mktemp("converted"), raw_rows)
    snakemake(stage.folder, *stage.words)
    return stage.result(stage.folder)


@victims(*VICTIMS)
def test_convert_is_killed_and_done_again(raw_rows: Path, converted: object, tmp_path: Path, victims: str) -> None:
    check(conversion(tmp_path, raw_rows), victims, converted)


RESOLVED = "images/fire/train.jsonl"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with 300 pictures; half of them must be rewritten."""
    root = tmp_path_factory.mktemp("pictures")
    (root / "coco" / "train2017").mkdir(parents=True)
    for number in range(300):
        picture = drawn(320, 240).rotate(number).convert("RGBA" if number % 2 else "RGB")
        picture.save(root / "coco" / "train2017" / f"{number:012}.png")
    return root


def resolving(folder: Path, root: Path) -> Stage:
    (folder / "raw" / "fire").mkdir(parents=True)
    rows = [{"image": f"coco/train2017/{number:012}.png"} for number in range(300)]
    (folder / RAW).write_text(json.dumps(rows))
    write_raw_account(folder / RAW, folder / RAW_ACCOUNT)
    (folder / "quick.yaml").write_text(f"datasets: {{fire: {{image_roots: ['{root}']}}}}")

    def some_are_stored(at: Path) -> bool:
        return len(list(at.glob("stores/pictures/.rewritten/*.png"))) > 20

    return Stage(folder, only("resolve_images", RESOLVED), some_are_stored, digests(RESOLVED))


@pytest.fixture(scope="module")
def resolved(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    stage = resolving(tmp_path_factory.mktemp("resolved"), pictures)
    snakemake(stage.folder, *stage.words)
    return stage.result(stage.folder)


@victims("both")
def test_resolve_is_killed_and_done_again(pictures: Path, resolved: object, tmp_path: Path, victims: str) -> None:
    check(resolving(tmp_path, pictures), victims, resolved)


# --- the stages with weights ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of some hundred MB and an adapter, as written by fetch_model and train_model; and the merge."""
    folder = tmp_path_factory.mktemp("wide")
    base = write_wide_base(folder / "base", layers=8, shards=4)
    (folder / "checkpoints" / RUN).mkdir(parents=True)
    write_wide_adapter(folder / "checkpoints" / RUN / "full", layers=8)
    files = hash_files(base, file_names(base), 2)
    write_account(
        folder / "models" / "tiny" / MANIFEST, ModelManifest("tiny", "base", None, base, files, [], digest_of(files))
    )
    (folder / "quick.yaml").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def merged(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = linked(wide, tmp_path_factory.mktemp("merged") / "demo_run")
    snakemake(folder, *MERGE)
    return merged_digests(folder)


MERGE = ["--notemp", *only("merge_weights", f"work/{RUN}/merged")]


def linked(source: Path, target: Path) -> Path:
    """Copy a folder by hard links; nobody changes its files."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def merged_digests(folder: Path) -> object:
    files = (folder / "work" / RUN / "merged").iterdir()
    return {file.name: sha256_of(file) for file in files if not file.name.startswith(".")}


@victims("snakemake")
def test_merge_is_killed_and_done_again(wide: Path, merged: object, tmp_path: Path, victims: str) -> None:
    begun = grown(f"work/{RUN}/merged.part", 20_000_000)
    check(Stage(linked(wide, tmp_path / "demo_run"), MERGE, begun, merged_digests), victims, merged)


@victims("script")
def test_training_is_killed_and_resumes_from_its_checkpoint(demo_run: Path, tmp_path: Path, victims: str) -> None:
    """The same steps, and each with the loss of an uninterrupted run within float noise.

    The trainers get SIGTERM within the step after which they would evaluate; the resumed ones make up for it.
    """
    folder = copy_folder(demo_run, tmp_path / "demo_run")
    shutil.rmtree(folder / "checkpoints" / RUN / "full")
    shutil.rmtree(folder / "stores" / "runs" / RUN / "full")

    def past_a_checkpoint(at: Path) -> bool:
        steps = [json.loads(line)["step"] for file in at.glob(PROGRESS) for line in file.read_text().splitlines()]
        return bool(steps) and max(steps) > CHECKPOINT_STEPS + 1

    def losses(at: Path) -> dict[str, list[list[float]]]:
        report = json.loads((at / "checkpoints" / RUN / "full" / "report.json").read_text())
        return {key: report[key] for key in ("losses", "eval_losses")}

    stage = Stage(folder, only("train_model", f"checkpoints/{RUN}/full"), past_a_checkpoint, losses)
    kill_in_the_middle(stage, victims)
    said = snakemake(folder, *stage.words)
    assert "resuming from step" in said
    unbroken, resumed = losses(demo_run), losses(folder)
    for key, values in unbroken.items():
        assert [step for step, _ in resumed[key]] == [step for step, _ in values]
        assert [loss for _, loss in resumed[key]] == pytest.approx([loss for _, loss in values], rel=1e-4)


PROGRESS = f"stores/runs/{RUN}/full/*/progress.jsonl"
