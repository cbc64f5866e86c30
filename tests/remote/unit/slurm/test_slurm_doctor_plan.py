"""What the doctor reads of a call: the profile, the configuration, and the plan. Nothing here asks Slurm."""

from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.slurm import doctor
from workflow_runs import ROOT

PROFILE = str(ROOT / "profiles/slurm")
DEMO = [ROOT / "profiles/demo/run.yaml"]


def settings_of(*files: Path) -> Config:
    return check_config(read_layers([ROOT / "config.yaml", *files]), [*files])


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("nowhere", "profile directory given (nowhere)"),
        (str(ROOT / "profiles/kubernetes"), "its executor is kubernetes"),
        (str(ROOT / "profiles/demo"), "its executor is none"),
    ],
)
def test_a_profile_that_is_none_of_slurm_is_refused(profile: str, said: str) -> None:
    with pytest.raises(VlmflowError) as refusal:
        doctor.read_profile(profile, [])
    assert said in refusal.value.cause


@pytest.mark.parametrize(
    ("run", "folder", "path", "said"),
    [
        ("mine", ".", "/usr/bin", "--run: unknown run mine"),
        ("qwen3vl-fire", "nowhere", "/usr/bin", "nowhere: no such folder"),
        ("qwen3vl-fire", ".", "/nowhere", "this machine has no sbatch"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    run: str, folder: str, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path)
    with pytest.raises(VlmflowError) as refusal:
        doctor.main(Namespace(configfile=DEMO, profile=PROFILE, run=[run], directory=Path(folder)))
    assert said in refusal.value.cause
    assert "\n" not in refusal.value.cause


def test_the_plan_has_the_jobs_of_slurm_with_the_profiles_resources(tmp_path: Path) -> None:
    """Stages that fetch run on the login node, and those that make data share a job."""
    (tmp_path / "sample" / "pictures").mkdir(parents=True)
    (tmp_path / "tiny-model").mkdir()
    for file in ("tiny-model/model.safetensors", "sample/FIRE-train-100K.json", "sample/FIRE-test.json"):
        (tmp_path / file).touch()
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    profile["set-resources"]["train_model"] |= {"slurm_partition": "a100,h100"}
    profile["default-resources"]["slurm_account"] = "vision"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump(profile))
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump({"slurm": {"gpu_model": "a100"}}))
    options = doctor.read_profile(str(tmp_path / "mine"), [*DEMO, tmp_path / "gpu.yaml"])
    planned = doctor.planned(options, settings_of(*options.configfile), "qwen3vl-fire", tmp_path)
    requests = {request.rule: request for request, _ in planned}
    assert {"train_smoke", "train_model", "merge_weights", "verify_merged", "the group data"} <= set(requests)
    assert not [rule for rule in requests if rule.startswith("fetch_")]
    train = requests["train_model"]
    assert (train.run, train.partitions, train.account, train.model) == (
        "qwen3vl-fire",
        ("a100", "h100"),
        "vision",
        "a100",
    )
    assert (train.threads, train.mem_mb, train.gpus, train.runtime, train.warning) == (2, 6_000, 0, 30, 180)
    assert requests["merge_weights"].partitions == ("cpu",)
    assert requests["merge_weights"].warning == 0
    (words,) = [words for request, words in planned if request.rule == "train_model"]
    assert {"sbatch", "a100,h100", "vision", "--mem", "6000", "--signal=TERM@180"} <= set(words)
