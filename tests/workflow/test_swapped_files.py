"""The next stage refuses a file that was swapped between two stages: every stage, every kind of file."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from drawn_pictures import drawn, encoded, put
from forked_snakemake import called
from vlmflow.config.after_training import ChosenBy
from vlmflow.core.account import CLOCK_NS, LEVEL, RECORDS
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.proof import PROOF
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.rows.training_data import first_rows
from workflow_runs import ROOT, RUN, command, copy_folder, snakemake, validation, vlmflow

SETTINGS = {
    "max_steps": 6,
    "checkpoint_steps": 3,
    "learning_rate": 1e-2,
    "max_length": 512,
    "image_max_tokens": 64,
    "dtype": "float32",
    "gradient_accumulation_steps": 1,
    "dataloader_workers": 0,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def finished(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished demo with a picture and a model that may be changed."""
    folder = copy_folder(demo_run, tmp_path_factory.mktemp("swapped") / "demo_run")
    manifest = folder / "models" / "tiny" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"folder": str(folder / "tiny-model")}))
    for name in ("test.jsonl", "train.jsonl"):
        assert (folder / "images" / "fire" / name).exists()
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, whose pictures and model files have been checked; the working directory."""
    folder = copy_folder(finished, tmp_path / "demo_run")
    manifest = folder / "models" / "tiny" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(finished), str(folder)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))
    monkeypatch.setenv(LEVEL, "quick")
    return folder


def run(stage: str, **changed: Any) -> None:
    """Call a stage's script as its rule does, in the working directory."""
    pictures = {"pictures": ["images/fire/train.jsonl"], "picture_store": "stores/pictures"}
    data = {f"{name}_rows": f"data/fire/{name}.jsonl" for name in ("train", "val")} | {"stats": "data/fire/stats.json"}
    length = {"image_max_tokens": 64, "model_type": "qwen3_vl", "text_args": {}}
    rows = {"rows": f"fitted/{RUN}", "model": "models/tiny"}
    trained = {"full": f"checkpoints/{RUN}/full", "smoke": f"checkpoints/{RUN}/smoke"}
    how = {"device": "cpu", "nodes": 1, "processes": 1, "strategy": "ddp", "deepspeed": None, "tuner": "lora"}
    how |= {"model_type": "qwen3_vl", "train": SETTINGS}
    runs = {"run_store": "out/runs"}
    lengths = {f"{name}_lengths": f"lengths/{RUN}/{name}.jsonl" for name in ("train", "val")}
    raw = {"raw": [RAW], "raw_accounts": ["raw/fire/.fetched/FIRE-train-100K.json.json"]}
    form = {
        "settings": {
            "kind": "fire",
            "modality": "image",
            "form": "trajectory",
            "max_history_rounds": None,
            "row_limits": {},
        }
    }
    roots = {"dataset": "fire", "roots": ["sample/pictures"], "limits": {}}
    made = {"converted": ["converted/fire/train.jsonl"], "rejects": ["converted/fire/train.rejects.jsonl"]}
    arguments: dict[str, dict[str, Any]] = {
        "fetch_images": {
            **raw,
            "dataset": "fire",
            "image_roots": ["sample/pictures"],
            "max_bytes": 100_000_000,
            "account": "out/train.fetched.json",
            "store": "out/fetched",
            "sources": {},
        },
        "resolve_images": {**raw, **roots, "manifest": "out/train.jsonl", "store": "out/pictures"},
        "convert_rows": {
            **(raw | form | {name: f"out/{name}" for name in ("converted", "rejects", "unread")}),
            "split": "train",
        },
        "validate_sharegpt": {
            **(made | {"unread": ["converted/fire/train.unread.json"]}),
            "settings": validation(),
            "raw_train": raw["raw"],
            "raw_accounts": raw["raw_accounts"],
            "pictures": pictures["pictures"],
            "stats": "out/fire/stats.json",
            "counts": "out/counts.html",
        },
        "find_near_duplicates": {
            "train_rows": made["converted"][0],
            "test_rows": "data/fire/test.jsonl",
            "stats": "data/fire/stats.json",
            "unread": "converted/fire/train.unread.json",
            "pairs": "out/pairs",
            "picture_distance": 4,
            "one_prompt": False,
        },
        "hash_pictures": {
            "manifest": pictures["pictures"][0],
            "hashes": "out/h",
            "dataset": "fire",
            "picture_store": "stores/pictures",
        },
        "data_page": {
            "stats": "data/fire/stats.json",
            "page": "out/page.html",
            "picture_limits": {},
            "near_duplicates": {},
            **pictures,
        },
        "measure_lengths": {
            **(data | pictures | {"model_files": "model_files/tiny", "settings": length, "template_differs": False}),
            **{name: f"out/{name}" for name in ("train", "val", "summary")},
        },
        "fit_rows": {
            **(data | pictures | lengths | {"model_files": "model_files/tiny"}),
            "summary": f"lengths/{RUN}/summary.json",
            "fitted": "out/f",
            "settings": {**length, "max_length": 512, "over_long": "refuse"},
        },
        "train_smoke": {
            **(rows | pictures | runs | {"smoke": "out/smoke"}),
            "settings": how,
            "smoke_settings": {"steps": 6, "longest": 4, "sample": 4},
        },
        "train_model": {
            **(rows | pictures | runs | {"settings": how}),
            **(trained | {"full": "out/run/full"}),
        },
        "merge_weights": {"model": "models/tiny", "full": trained["full"], "merged": "out/merged"},
        "verify_tensors": {
            "model": "models/tiny",
            "full": trained["full"],
            "merged": f"merged/{RUN}",
            "tensors": "out/tensors",
        },
        "verify_merged": {
            **(rows | pictures | {"full": trained["full"], "merged": f"merged/{RUN}", "verified": f"out/{RUN}"}),
            "tensors": "out/tensors",
            "settings": {"verify": {"rows": 2}, "device": "cpu", "dtype": "float32", **length},
        },
        "publish_merged": {
            **(rows | trained | {"stats": "data/fire/stats.json", "verified": f"verified/{RUN}"}),
            "published": "out/published",
            "settings": {
                "all_addresses": [],
                "licence": None,
                "source_licences": {},
                "require": None,
                "chosen_by": None,
            },
            "picture_licences": {},
        },
    }
    validated(stage)(**(arguments[stage] | changed))


def validated(stage: str) -> Callable[..., None]:
    """Return what a stage's script does, with its arguments checked as `run_stage` does."""
    main = importlib.import_module(f"stages.{stage}").main
    return pydantic.validate_call(config={"arbitrary_types_allowed": True})(main)


def other_file(file: Path) -> None:
    """Put a file with one other byte, and the same size and times, in a file's place."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    other = file.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


def forged_file(file: Path) -> None:
    """Change one byte of a file in place, and restore its times."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(before.st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(before.st_size // 2)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def picture(folder: Path, rewritten: bool = False) -> Path:
    """Return the place in the store of the first val row's picture; or of one of train that was rewritten."""
    (row,) = first_rows(folder / "fitted" / RUN / "val.jsonl", 1)
    if not rewritten:
        return folder / "stores" / "pictures" / "fire" / row.images[0]
    named = {name for row in first_rows(folder / "fitted" / RUN / "train.jsonl", 1000) for name in row.images}
    entries = read_picture_manifest(folder / "images" / "fire" / "train.jsonl")
    return folder / "stores/pictures/fire" / next(e.name for e in entries if e.name in named and e.rewritten)


RAW = "raw/fire/FIRE-train-100K.json"
REFRESH = "vlmflow refresh-pictures FILE fire"
OTHER_ROWS = r"records other digests for these rows"


def delete_picture(folder: Path) -> None:
    picture(folder).unlink()


def other_picture(folder: Path) -> None:
    other_file(picture(folder))


def other_copy(folder: Path) -> None:
    """A rewritten copy, changed where it lies."""
    other_file(picture(folder, rewritten=True).resolve())


def shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[0]


def other_proven_shard(folder: Path) -> None:
    other_file(shard(folder / "verified" / RUN))


def other_shard(folder: Path) -> None:
    other_file(shard(folder / "tiny-model"))


def other_tokenizer(folder: Path) -> None:
    other_file(folder / "model_files" / "tiny" / "files" / "tokenizer.json")


def in_folder(name: str) -> Callable[[Path], None]:
    def other_file_in_folder(folder: Path) -> None:
        other_file(folder / name)

    return other_file_in_folder


CHANGED = rf"1 of \d+ pictures have changed since they were checked: .*\n.*{REFRESH}"
GONE = rf"1 of \d+ pictures are missing: .*\n.*{REFRESH}"
SHARD = r"1 of \d+ model files have changed since they were checked: model\S*\.safetensors\n.*remove models/tiny"
TOKENIZER = r"1 of \d+ model files have changed since they were checked: tokenizer\.json\n.*remove model_files/tiny"
ADAPTER = r"1 of 2 released files have changed since they were checked: adapter_\w+\.\w+\n.*remove checkpoints/"

OTHER_RAW = rf"1 of 1 raw files have changed since they were checked: .*\n.*remove {RAW} and run the same command again"

READ_RAW = ("fetch_images", "resolve_images", "convert_rows", "validate_sharegpt")
READ_PICTURES = ("measure_lengths", "fit_rows", "train_smoke", "train_model")
SHOW_PICTURES = ("hash_pictures", "data_page")
READ_FITTED = ("train_smoke", "train_model", "verify_merged", "publish_merged")
READ_TRAINED = ("merge_weights", "verify_tensors", "verify_merged")
COUNT_TOKENS = ("measure_lengths", "fit_rows")
READ_MODEL = (
    *(stage for stage in READ_PICTURES if stage not in COUNT_TOKENS),
    "merge_weights",
    "verify_tensors",
    "verify_merged",
    "publish_merged",
)

SWAPS = [
    *((stage, other_picture, CHANGED) for stage in (*READ_PICTURES, "verify_merged", *SHOW_PICTURES)),
    ("fit_rows", delete_picture, GONE),
    ("fit_rows", other_copy, CHANGED),
    *((stage, other_shard, SHARD) for stage in READ_MODEL),
    *((stage, other_tokenizer, TOKENIZER) for stage in COUNT_TOKENS),
    *((stage, in_folder(RAW), OTHER_RAW) for stage in READ_RAW),
    *(
        ("find_near_duplicates", in_folder(name), OTHER_ROWS)
        for name in ("data/fire/test.jsonl", "converted/fire/train.jsonl")
    ),
    *((stage, in_folder("data/fire/val.jsonl"), OTHER_ROWS) for stage in ("measure_lengths", "fit_rows", "data_page")),
    *((stage, in_folder(f"fitted/{RUN}/train.jsonl"), OTHER_ROWS) for stage in READ_FITTED),
    *(("train_model", in_folder(f"fitted/{RUN}/{name}"), OTHER_ROWS) for name in ("val.jsonl", "val.lengths.jsonl")),
    ("fit_rows", in_folder(f"lengths/{RUN}/val.jsonl"), "has changed since"),
    *((stage, in_folder(f"checkpoints/{RUN}/full/adapter_model.safetensors"), ADAPTER) for stage in READ_TRAINED),
    ("merge_weights", in_folder(f"checkpoints/{RUN}/full/adapter_config.json"), ADAPTER),
    ("publish_merged", other_proven_shard, SHARD.replace("models/tiny", f"verified/{RUN}")),
]
"""Every stage with a file of each kind that it reads, and every file of a kind with one stage."""

PRODUCTS = [
    *(
        (stage, delete_picture, GONE)
        for stage in (*READ_PICTURES, "verify_merged", *SHOW_PICTURES)
        if stage != "fit_rows"
    ),
    *((stage, other_copy, CHANGED) for stage in (*READ_PICTURES, *SHOW_PICTURES) if stage != "fit_rows"),
    *(
        (stage, in_folder(f"fitted/{RUN}/{name}"), OTHER_ROWS)
        for stage in READ_FITTED
        for name in ("val.jsonl", "val.lengths.jsonl")
        if stage != "train_model"
    ),
    *(
        (stage, in_folder(f"checkpoints/{RUN}/full/adapter_config.json"), ADAPTER)
        for stage in READ_TRAINED
        if stage != "merge_weights"
    ),
]
"""The others."""


@pytest.mark.parametrize(
    ("stage", "swap", "said"),
    [*SWAPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in PRODUCTS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_file_swapped_between_two_stages_is_refused(
    place: Path, stage: str, swap: Callable[[Path], None], said: str
) -> None:
    """Size and times are as before: only the inode or the digest shows it."""
    swap(place)
    with pytest.raises(VlmflowError) as refusal:
        run(stage)
    assert re.search(said, str(refusal.value)), refusal.value
    assert not list((place / "out").rglob("*.safetensors"))


def test_provenance_and_card_name_the_study_that_chose_the_settings(place: Path) -> None:
    chosen = ChosenBy(search="rates", trial=3, trials=12, study="5" * 64, settings={"learning_rate": 0.01})
    settings = {"all_addresses": [], "licence": None, "source_licences": {}, "require": None}
    run("publish_merged", settings=settings | {"chosen_by": chosen.model_dump()})
    words = f"search rates, trial 3 (best of 12), study.json with sha256 {'5' * 64}"
    assert json.loads((place / "out" / "published" / "provenance.json").read_text())["chosen_by"] == words
    assert f"These settings were chosen by {words}." in (place / "out" / "published" / "README.md").read_text()


def test_merged_weights_that_changed_after_their_tensors_were_verified_are_refused(place: Path) -> None:
    merged = place / "work" / "merged"
    shutil.copytree(place / "verified" / RUN, merged)
    (merged / PROOF).unlink()
    run("verify_tensors", merged="work/merged")
    other_file(shard(merged))
    with pytest.raises(VlmflowError, match=SHARD.replace("models/tiny", "work/merged")):
        run("verify_merged", merged="work/merged")


FORGED = [
    ("fit_rows", lambda folder: forged_file(picture(folder)), CHANGED),
    ("merge_weights", lambda folder: forged_file(shard(folder / "tiny-model")), SHARD),
]


@pytest.mark.parametrize(("stage", "forge", "said"), FORGED, ids=["picture", "shard"])
def test_with_integrity_full_forged_times_help_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, stage: str, forge: Callable[[Path], None], said: str
) -> None:
    """A quick check cannot see a change that keeps size, mtime and inode; docs/decisions.md says so."""
    # The folder's own file, instead of a link to that of the demo.
    forged = picture(place) if stage == "fit_rows" else shard(place / "tiny-model")
    content = forged.read_bytes()
    forged.unlink()
    put(forged, content)
    settle()
    run(stage)
    forge(place)
    shutil.rmtree("out")
    run(stage)
    monkeypatch.setenv(LEVEL, "full")
    with pytest.raises(VlmflowError, match=f"(?s){said}"):
        run(stage)


def settle() -> None:
    """Wait until the new files are old enough to be recorded."""
    time.sleep(2 * CLOCK_NS / 1e9)


def test_a_picture_swapped_while_a_run_trains_is_refused_before_the_adapter_is_handed_on(place: Path) -> None:
    """Nobody resumes from that run folder; once the picture is restored, training starts from step 0."""
    shown = picture(place)
    was = shown.readlink()
    swapped = threading.Event()

    def swap_in_the_middle() -> None:
        while not any('"log"' in file.read_text() for file in place.glob("out/runs/*/full/*/progress.jsonl")):
            time.sleep(0.05)
        other_file(shown)
        swapped.set()

    threading.Thread(target=swap_in_the_middle, daemon=True).start()
    with pytest.raises(VlmflowError) as refusal:
        run("train_model")
    assert swapped.is_set()
    assert "the input changed during training: " in refusal.value.cause
    assert "1 of" in refusal.value.cause
    assert REFRESH in refusal.value.next_step
    assert not (place / "out" / "run").exists()
    (aside,) = (place / "out" / "runs" / "run" / "full").iterdir()
    assert aside.name.endswith(".refused-1")
    assert list((aside / "checkpoints").glob("checkpoint-*/adapter_model.safetensors")), "nothing is lost"
    shown.unlink()
    shown.symlink_to(was)
    run("fit_rows")


def test_the_command_in_a_refusal_checks_the_picture_again(place: Path) -> None:
    """With the call's own folder and files, also under other paths; one entry of the manifest changes."""
    folder = place
    shown = picture(folder)
    source = folder / "sample" / "pictures" / shown.relative_to(folder / "stores" / "pictures" / "fire")
    assert source.read_bytes() == shown.read_bytes()
    shown.unlink()
    shown.symlink_to(source)  # this copy's store knows the pictures of the demo that all tests share
    before = found_of_train(folder)
    source.write_bytes(encoded(drawn(97, 61), "JPEG" if source.suffix == ".jpg" else "PNG"))
    again = command(folder, "--forcerun", "fit_rows", "--allowed-rules", "fit_rows", "--", f"fitted/{RUN}")
    again = [os.path.relpath(folder, ROOT) if word == str(folder) else word for word in again]
    failed = called(again, ROOT)
    said = failed.stdout + failed.stderr
    assert failed.returncode != 0
    assert "1 of " in said
    named = re.search(r"check them again: vlmflow (refresh-pictures .*)", said)
    assert named, said[-3000:]
    words = shlex.split(named[1])
    assert words[-3:] == ["fire", "--directory", str(folder)]
    done = subprocess.run(vlmflow(*words), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    after = found_of_train(folder)
    assert {name for name in before if before[name] != after[name]} == {
        str(source.relative_to(folder / "sample/pictures"))
    }
    snakemake(folder, f"fitted/{RUN}")


def found_of_train(folder: Path) -> dict[str, tuple[str, int]]:
    entries = read_picture_manifest(folder / "images" / "fire" / "train.jsonl")
    return {entry.name: (entry.sha256, entry.rows) for entry in entries if entry.name}


@pytest.mark.parametrize("name", ["train.jsonl", "train.rejects.jsonl"])
def test_converted_rows_that_changed_are_not_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Question {number}?", "completion": "Yes."} for number in range(20)]
    put(tmp_path / "raw.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in [*rows, {"prompt": ""}]))
    what = {"kind": "prompt_completion", "modality": "text"}
    files = {"converted": "c/train.jsonl", "rejects": "c/train.rejects.jsonl", "unread": "c/train.unread.json"}
    validated("convert_rows")(raw=["raw.jsonl"], split="train", settings=what, **files)
    other_file(tmp_path / "c" / name)
    with pytest.raises(VlmflowError, match=rf"c/{name}: c/train\.unread\.json records other digests"):
        validated("validate_sharegpt")(
            **{key: [file] for key, file in files.items()},
            raw_train=["raw.jsonl"],
            stats="data/x/stats.json",
            counts="data/x/counts.html",
            settings=validation(**what),
        )
    assert not (tmp_path / "data").exists()
