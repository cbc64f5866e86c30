"""What clean-runs never lists: files in a shared store, behind a link, or elsewhere."""

import fcntl
from pathlib import Path

import pytest

from made_accounts import leave_training, some_report
from vlmflow.config.model import Config, check_config
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import MANIFEST, FileRecord, ModelManifest, digest_of, link_files
from vlmflow.harness import patches
from vlmflow.leftovers import find_leftovers, of_trainings, of_trials
from vlmflow.supervisor.report import TrainingDigests


def settings_with(**stores: str) -> Config:
    return check_config({"stores": stores, "models": {}, "datasets": {}, "runs": {}}, [])


def listed(folder: Path, settings: Config, stores: bool = True) -> list[str]:
    """Return what is listed, by its path in the folder."""
    found, _ = find_leftovers(folder, settings, {}, stores)
    return sorted(str(one.path.relative_to(folder)) for one in found)


def made(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")


@pytest.mark.parametrize(
    "stores",
    [
        {"pictures": "stores"},
        {"pictures": "stores", "runs": "stores", "models": "stores", "raw": "stores", "fetched_pictures": "stores"},
        {"fetched_pictures": "stores/pictures/fetched"},
    ],
)
def test_a_store_inside_another_is_refused(tmp_path: Path, stores: dict[str, str]) -> None:
    made(tmp_path / "stores" / "runs" / "my-run", tmp_path / "stores" / "pictures" / "fetched", tmp_path / "images")
    with pytest.raises(VlmflowError, match=r"stores\.\w+ \(.*\) is inside stores\.\w+ \("):
        listed(tmp_path, settings_with(**stores))


def test_files_behind_a_link_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    made(tmp_path / "shared" / "x.part", tmp_path / "big" / "gone", folder / "verified" / "y.part", folder / "images")
    (folder / "merged").symlink_to(tmp_path / "shared")
    (folder / "stores").mkdir()
    (folder / "stores" / "pictures").symlink_to(tmp_path / "big")
    assert listed(folder, settings_with()) == ["verified/y.part"]


def test_without_the_runs_file_only_leftovers_of_runs_are_listed(tmp_path: Path) -> None:
    """The downloads of somebody's own configuration are in no manifest yet."""
    fetched = tmp_path / "stores" / "models" / f"owner--name@{'0' * 40}"
    pictures = tmp_path / "stores" / "pictures" / "mine"
    made(fetched, pictures, tmp_path / "models" / "m", tmp_path / "images", tmp_path / "merged" / "y.part")
    assert listed(tmp_path, settings_with(), stores=False) == ["merged/y.part"]
    assert len(listed(tmp_path, settings_with())) == 3


def test_a_bfloat16_copy_that_no_base_uses_is_listed(tmp_path: Path) -> None:
    """Of a base in use, neither its files nor those in FP8 are."""
    store = tmp_path / "stores" / "models"
    made(store / "bfloat16" / "used", store / "bfloat16" / "old", store / f"o--m@{'0' * 40}")
    files = {"file": FileRecord(1, "")}
    view, _ = link_files(store, "mine", store / "bfloat16" / "used", files, {}, of_target=False)
    source = f"hf://o/m@{'0' * 40}"
    write_account(
        tmp_path / "models" / "mine" / MANIFEST, ModelManifest("mine", source, None, view, files, [], digest_of(files))
    )
    assert listed(tmp_path, settings_with()) == ["stores/models/bfloat16/old"]


def test_targets_elsewhere_say_nothing_about_models_and_pictures(tmp_path: Path) -> None:
    made(tmp_path / "stores" / "models" / "views" / "m-0", tmp_path / "stores" / "pictures" / "mine")
    assert listed(tmp_path, settings_with()) == []


def test_nobody_begins_while_the_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with patches.alone(), patches.LOCK.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with patches.LOCK.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(VlmflowError, match="Snakemake is running here"), patches.alone():
            pass


def test_no_run_has_the_name_of_an_unfinished_folder() -> None:
    with pytest.raises(VlmflowError, match=r"models\.v1\.part.*must not end in"):
        check_config({"models": {"v1.part": {"source": "/m", "model_type": "qwen3"}}, "datasets": {}, "runs": {}}, [])


def test_the_trials_of_a_search_stay_until_it_has_chosen(tmp_path: Path) -> None:
    trial, other = (tmp_path / "stores" / "runs" / "r" / "search" / name for name in ("0123456789abcdef", "notes"))
    made(trial, other, tmp_path / "search" / "done", tmp_path / "search" / "begun")
    (tmp_path / "search" / "done" / "best.yaml").write_text("")
    store = tmp_path / "stores" / "runs" / "r"
    assert list(of_trials(tmp_path, store)) == []
    (tmp_path / "search" / "begun" / "best.yaml").write_text("")
    assert [one.path for one in of_trials(tmp_path, store)] == [trial]


def test_a_former_training_is_called_what_it_is(tmp_path: Path) -> None:
    """Who reads "other data or settings" does not know which of three trainings goes."""
    kept, former = ("0" * 16, "1" * 16)
    report = some_report(digests=TrainingDigests(kept, "data", "model", {}, ""))
    leave_training(tmp_path / "full", kept, [])
    leave_training(tmp_path / "full", former, [], learning_rate=2e-4)
    (tmp_path / "full" / ("2" * 16)).mkdir()
    found = {one.path.name: one.why for one in of_trainings(tmp_path, {"full": report})}
    assert found == {
        former: "a former full training, kept nowhere else: train.learning_rate 0.0002 (now 0.0001); no step was made "
        f"(the finished one is {kept})",
        "2" * 16: f"a former full training, kept nowhere else: it never began (the finished one is {kept})",
    }
