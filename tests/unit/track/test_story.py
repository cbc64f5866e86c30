"""What trackers are told about a run: every figure once, of its own weights; what keeps a row back is named."""

import json
import os
from pathlib import Path

import pytest

from finished_runs import BEGAN, RUN, STEPS, tracked_run
from made_accounts import some_checks, some_provenance
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.in_trainer.messages import Log, as_line
from vlmflow.merging.proof import LimitedFile, Proof, ProvenFile, proven_digest
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.reports.provenance import BaseModelFiles, proven_weights, published_weights
from vlmflow.tools.track_run import main as track_run
from vlmflow.track.send import all_traces, row_traces
from vlmflow.track.story import Story, story_of


def told(folder: Path, evaluated: bool = True) -> Story:
    of = {name: [folder / name / RUN / "val"] if evaluated else [] for name in ("eval", "answers")}
    return story_of(folder / "checkpoints" / RUN / "full", folder / "merged" / RUN, of["eval"], of["answers"])


def test_a_repeated_step_has_the_figures_of_its_last_time(tmp_path: Path) -> None:
    points = {(point.key, point.step): point for point in told(tracked_run(tmp_path)).points}
    losses = {step: point.value for (key, step), point in points.items() if key == "train/loss"}
    assert losses == {1: 9.0, 2: 9.0, **{step: 1 / step for step in range(3, 9)}}
    assert points["eval/loss", 8].value == 0.5
    assert ("train/learning_rate", 1) not in points
    # The first session took 30 s; the second began after it.
    assert points["train/loss", 2].seconds == 20
    assert points["train/loss", 3].seconds == 40


def test_steps_that_were_lost_are_not_told(tmp_path: Path) -> None:
    """A figure that a step has only in the lost session: step 3's validation loss, say."""
    folder = tracked_run(tmp_path)
    full = folder / "checkpoints" / RUN / "full"
    lines = (full / "progress.jsonl").read_text().splitlines(keepends=True)
    lines.insert(4, as_line(Log(31.0, 3, 8, 1500, eval_loss=7.0)))
    (full / "progress.jsonl").write_text("".join(lines))
    digest = sha256_of(full / "progress.jsonl")
    for file in (full / "report.json", folder / "merged" / RUN / "provenance.json"):
        account = json.loads(file.read_text())
        account.get("training", account)["digests"]["progress"] = digest
        file.write_text(json.dumps(account))
    assert [point.step for point in told(folder).points if point.key == "eval/loss"] == [8]


def test_settings_are_flat_and_evaluations_are_figures(tmp_path: Path) -> None:
    story = told(tracked_run(tmp_path))
    assert story.settings["lora.rank"] == 16
    assert story.settings["freeze"] == '["vision_tower"]'
    at = "evaluate/val/uses_feedback"
    assert (story.evaluated[f"{at}/base"], story.evaluated[f"{at}/tuned"]) == (0.5, 0.75)
    assert story.evaluated[f"{at}/difference"] == pytest.approx(0.25)
    assert story.evaluated[f"{at}/difference_low"] < story.evaluated[f"{at}/difference"]
    assert story.evaluated["evaluate/val/loss_own/difference"] == pytest.approx(-1)
    assert story.evaluated["evaluate/val/without_gold/sees/tuned"] == pytest.approx(0.81)
    assert story.evaluated["answer/val/after_1/tuned/right"] == 0.4
    assert story.facts["evaluate.val"].startswith("learned: ")
    assert story.facts["training.digest"] == "job"


def test_an_evaluation_adds_to_the_run_and_another_training_is_another_run(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path / "one")
    before, after = told(folder, evaluated=False), told(folder)
    assert before.digest == after.digest
    assert before.content != after.content
    assert told(folder).content == after.content
    assert told(tracked_run(tmp_path / "two", steps=9)).digest != after.digest


def test_the_story_of_a_copy_is_the_same(tmp_path: Path) -> None:
    """A copy, or a download from an object store, gives files other times."""
    folder = tracked_run(tmp_path)
    before = told(folder)
    for place in folder.rglob("*"):
        os.utime(place, (2_000_000_000, 2_000_000_000))
    assert told(folder) == before
    # The second session began 100 s after the first; its last figure came so many seconds later.
    assert before.ended == BEGAN + 100 + 10 * (STEPS - 2) + 5


def test_what_may_change_is_no_setting(tmp_path: Path) -> None:
    """MLflow never lets a param change; the base's files may come from another source, and be the same."""
    story = told(tracked_run(tmp_path))
    assert (story.facts["base_model"], story.facts["dataset"]) == ("hf://Qwen/Qwen3-8B", "fire")
    assert not {"base_model", "dataset"} & story.settings.keys()


def test_weights_of_another_training_are_refused(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    report = folder / "checkpoints" / RUN / "full" / "report.json"
    report.write_text(report.read_text().replace('"job": "job"', '"job": "other"'))
    with pytest.raises(VlmflowError, match="come from another training"):
        told(folder)


def test_a_changed_log_is_refused(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    with (folder / "checkpoints" / RUN / "full" / "progress.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(VlmflowError, match="not what the training wrote"):
        told(folder)


@pytest.mark.parametrize("kind", ["missing", "folder", "loop"])
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    folder = tracked_run(tmp_path)
    full = folder / "checkpoints" / RUN / "full"
    log = full / "progress.jsonl"
    log.unlink()
    if kind == "folder":
        log.mkdir()
    if kind == "loop":
        log.symlink_to(log)
    with pytest.raises(VlmflowError, match=r"full/progress\.jsonl: ") as caught:
        told(folder)
    assert caught.value.next_step == f"remove {full}, and make it again"


def changed(file: Path, *keys: str, value: str) -> None:
    """Set a field of an account, which is below these keys."""
    account = at = json.loads(file.read_text())
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    file.write_text(json.dumps(account))


OUTSIDE = "../../../../out\x1b[31m"


@pytest.mark.parametrize("keys", [("run",), ("data", "dataset")])
def test_a_name_in_the_provenance_leads_nowhere_else(tmp_path: Path, keys: tuple[str, ...]) -> None:
    folder = tracked_run(tmp_path / "a" / "b" / "c" / "d")
    provenance = folder / "merged" / RUN / "provenance.json"
    changed(provenance, *keys, value=OUTSIDE)
    with pytest.raises(VlmflowError, match=rf"provenance\.json: {'.'.join(keys)} is '\.\./") as caught:
        track_run(RUN, [], folder, {"wandb": "mine", "otlp": "http://127.0.0.1:9"})
    assert "\x1b" not in str(caught.value)
    assert not (folder / "stores").exists()


@pytest.mark.parametrize("name", [OUTSIDE, "other"])
def test_an_evaluation_of_another_data_set_is_refused(tmp_path: Path, name: str) -> None:
    folder = tracked_run(tmp_path)
    report = folder / "eval" / RUN / "val" / "report.json"
    changed(report, "dataset", value=name)
    with pytest.raises(VlmflowError, match=r"report\.json: dataset is .*, but the weights in .* 'fire'") as caught:
        track_run(RUN, [], folder, {"otlp": "http://127.0.0.1:9"})
    assert caught.value.next_step == f"remove {report.parent}, and make it again"
    assert "\x1b" not in str(caught.value)


def traces(folder: Path):
    return all_traces(
        [folder / "eval" / RUN / "val"],
        [folder / "answers" / RUN / "val"],
        {"val": folder / "data" / "fire" / "val.jsonl"},
        [folder / "images" / "fire" / "train.jsonl"],
        told(folder).ended,
    )


def test_each_row_is_a_trace_of_each_model(tmp_path: Path) -> None:
    found = traces(tracked_run(tmp_path))
    assert [(trace.row, trace.model) for trace in found] == [
        (f"row-{number}", model) for number in range(3) for model in ("base", "tuned")
    ]
    assert len({trace.identity for trace in found}) == 6
    base, tuned = found[2:4]
    assert [turn.name for turn in tuned.turns] == ["after 1 round", "gold answer"]
    assert (base.turns[0].answer, tuned.turns[0].answer) == ("wrong", "gold 1")
    assert tuned.turns[0].scores == dict.fromkeys(["right", "exact_match", "token_f1", "anls", "relaxed_accuracy"], 1.0)
    assert tuned.turns[1].answer is None, "the model did not say the gold answer"
    assert "user: look again" in tuned.turns[1].prompt
    assert tuned.turns[1].facts == {"gold": "gold 1", "wrong": "wrong"}
    scores = tuned.turns[1].scores
    assert (scores["margin_own"], scores["margin_other"], scores["loss_own"]) == (1.0, 0.0, 0.5)
    shares = ("right_first", "right_with_feedback", "uses_feedback", "sees")
    assert [scores[name] for name in shares] == [0, 1, 1, 1]
    assert [base.turns[1].scores[name] for name in shares] == [0, 0.5, 0.5, 1], "equal sides count one half"
    assert tuned.pictures == ["ab" * 32]


def test_rows_that_changed_since_the_evaluation_are_refused(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    file = folder / "data" / "fire" / "val.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["conversations"][0]["value"] = "<image>\nanother?"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(VlmflowError, match="has changed since"):
        traces(folder)


FILES = {name: ProvenFile(1, name) for name in ("a.safetensors", "README.md", "preprocessor_config.json")}


def of_older_weights(report: Path) -> None:
    account = json.loads(report.read_text())
    account["tuned"]["digest"] = "older"
    report.write_text(json.dumps(account))


@pytest.mark.parametrize("stage", ["eval", "answers"])
def test_a_story_of_other_weights_is_refused(tmp_path: Path, stage: str) -> None:
    folder = tracked_run(tmp_path)
    of_older_weights(folder / stage / RUN / "val" / "report.json")
    places = ([folder / name / RUN / "val"] for name in ("eval", "answers"))
    with pytest.raises(VlmflowError, match=f"{stage}/{RUN}/val: it is of other weights than those in"):
        story_of(folder / "checkpoints" / RUN / "full", folder / "merged" / RUN, *places)


def test_the_provenance_tells_the_proven_weights_as_the_proof_does(tmp_path: Path) -> None:
    """With a file of the base that the card replaces, and one that got picture limits when it was published."""
    verified, merged = tmp_path / "verified" / "mine", tmp_path / "merged" / "mine"
    assert proven_weights(verified, merged) is None
    proof = Proof(some_checks(), FILES, None, {})
    limited = LimitedFile("preprocessor_config.json", "preprocessor_config.json", "limited", ScaleLimits(1, 2))
    facts = some_provenance(
        merged={"a.safetensors": "a.safetensors", "preprocessor_config.json": "limited"},
        picture_limits=limited,
        base_model=BaseModelFiles("hf://a/b", "abc", "digest", {"a.safetensors": "x", "README.md": "README.md"}, []),
    )
    write_account(merged / "provenance.json", facts)
    assert published_weights(merged) == proven_weights(verified, merged) == proven_digest(proof)
    write_account(verified / "proof.json", Proof(some_checks(), {}, None, {}))
    assert proven_weights(verified, merged) != proven_digest(proof)


def traces_of_val(folder: Path) -> list:
    return row_traces(
        folder / "eval" / RUN / "val",
        folder / "answers" / RUN / "val",
        folder / "data" / "fire" / "val.jsonl",
        [folder / "images" / "fire" / "train.jsonl"],
        9.0,
    )


def test_all_spans_have_the_given_time(tmp_path: Path) -> None:
    assert {trace.at for trace in traces_of_val(tracked_run(tmp_path))} == {9.0}


def test_a_missing_file_of_rows_is_named(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    (folder / "data" / "fire" / "val.jsonl").unlink()
    with pytest.raises(VlmflowError, match=r"data/fire/val\.jsonl: is missing") as caught:
        traces_of_val(folder)
    assert "vlmflow run … data/fire/val.jsonl" in caught.value.next_step


@pytest.mark.parametrize("stage", ["eval", "answers"])
def test_a_missing_file_of_results_is_named(tmp_path: Path, stage: str) -> None:
    folder = tracked_run(tmp_path)
    (folder / stage / RUN / "val" / "rows.jsonl").unlink()
    with pytest.raises(VlmflowError, match=rf"{stage}/{RUN}/val/rows\.jsonl: is missing") as caught:
        traces_of_val(folder)
    assert caught.value.next_step == f"remove {folder / stage / RUN / 'val'}, and make it again"


@pytest.mark.parametrize(("stage", "there", "counted"), [("eval", 1, 3), ("answers", 0, 1)])
def test_rows_that_were_lost_are_not_left_out_silently(tmp_path: Path, stage: str, there: int, counted: int) -> None:
    folder = tracked_run(tmp_path)
    file = folder / stage / RUN / "val" / "rows.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:there]))
    with pytest.raises(VlmflowError, match=rf"rows\.jsonl: has {there} rows, .* {counted}\n") as caught:
        traces_of_val(folder)
    assert caught.value.next_step == f"remove {folder / stage / RUN / 'val'}, and make it again"


def test_a_picture_in_no_manifest_is_named_with_its_row(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    manifest = folder / "images" / "fire" / "train.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": "b.png"}) + "\n")
    with pytest.raises(VlmflowError, match=r"val\.jsonl, row row-0: picture a\.png is in no image manifest") as caught:
        traces_of_val(folder)
    assert str(manifest) in caught.value.cause
    assert caught.value.next_step == "check the pictures again: vlmflow refresh-pictures FILE fire"
