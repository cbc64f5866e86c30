"""Finished runs that were never trained: their files are small, and their accounts fit them."""

import json
from pathlib import Path
from typing import Any

import msgspec

from hub_server import sha256
from made_accounts import an_answer, some_answers, some_evaluation, some_provenance, some_report
from stages.track import main as track
from vlmflow.config.after_training import TrackSettings
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.account import read_account, write_account
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import AnsweredRow, AnsweredTurn, EvaluatedModel, EvaluatedRow, Loss, Margin
from vlmflow.in_trainer.messages import Begin, End, Event, Log, as_line
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import LicenceOfSource, StatedLicences
from vlmflow.reports.provenance import published_weights
from vlmflow.supervisor.report import TrainingDigests
from vlmflow.track.story import Tracked

MERGED = {
    "config.json": b"{}\n",
    "model-00001-of-00002.safetensors": b"first shard" * 9_000,
    "model-00002-of-00002.safetensors": b"second shard" * 9_000,
}
ADAPTER = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "/home/ann/views/tiny", "r": 8}).encode(),
    "adapter_model.safetensors": b"adapter" * 1_000,
}
RUN = "mine"


def rights(licence: str = "cc-by-4.0", pictures: str = "cc-by-nc-4.0") -> StatedLicences:
    return StatedLicences("fire", [], licence, [], [LicenceOfSource("coco", 9, pictures)])


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: sha256(content) for name, content in files.items()}


def finished_run(folder: Path, **facts: Any) -> Path:
    """Make the run in a working directory; return merged/RUN. facts: of the provenance, those that differ."""
    merged, full = folder / "merged" / RUN, folder / "checkpoints" / RUN / "full"
    report = some_report(digests=TrainingDigests("job", "data", "model", digests(ADAPTER), "progress"))
    provenance = some_provenance(**{"merged": digests(MERGED), "training": report, "rights": rights()} | facts)
    for place, files in ((merged, MERGED), (full, ADAPTER)):
        place.mkdir(parents=True)
        for name, content in files.items():
            (place / name).write_bytes(content)
        (place / ".snakemake_timestamp").touch()
    write_account(full / "report.json", report)
    write_account(merged / "provenance.json", provenance)
    (merged / "README.md").write_text(model_card(provenance))
    return merged


STEPS = 8
BEGAN = 1_700_000_000.0
"""When its training began, in seconds since 1970."""


def events(steps: int = STEPS) -> list[Event]:
    """Return a training that was killed after step 3, when step 2 was its last checkpoint, and then ended."""
    return [
        Begin(0, steps, 0, 4, "DISTRIBUTED", "cpu", BEGAN),
        *(Log(10.0 * step, step, steps, 500 * step, loss=9.0) for step in (1, 2, 3)),
        Begin(2, steps, 1000, 4, "DISTRIBUTED", "cpu", BEGAN + 100),
        *(
            Log(10.0 * (step - 2), step, steps, 500 * step, loss=1 / step, learning_rate=1e-4)
            for step in range(3, steps + 1)
        ),
        Log(10.0 * (steps - 2) + 5, steps, steps, 500 * steps, eval_loss=0.5),
        End(steps, [10]),
    ]


def margins(right: float) -> dict[str, Margin]:
    """Return those of a model. right: the loss of the right answer with its own feedback, in nats of two tokens."""
    losses = {"question": 4.0, "own": right, "other": 3.0, "other_picture": 3.5}
    return {context: Margin(Loss(nats, 2), Loss(3.0, 2)) for context, nats in losses.items()}


def rows(count: int) -> list[dict]:
    """Return rows with a picture and one round of feedback."""
    return [
        {
            "id": f"row-{number}",
            "source": "coco",
            "images": ["a.png"],
            "attempts": [1, 2],
            "scores": [1.0, 10.0],
            "conversations": [
                {"from": "human", "value": f"<image>\nquestion {number}?"},
                {"from": "gpt", "value": "wrong"},
                {"from": "human", "value": "look again"},
                {"from": "gpt", "value": f"gold {number}"},
            ],
        }
        for number in range(count)
    ]


def evaluated_row(number: int) -> EvaluatedRow:
    """Return a row of which the base has equal losses with its own and another row's feedback."""
    return EvaluatedRow(
        id=f"row-{number}",
        source="coco",
        images=["a.png"],
        group="a",
        right=f"gold {number}",
        wrong="wrong",
        donors=["row-0"],
        picture_donor="row-0",
        gold_in_feedback=False,
        base=margins(3.0),
        tuned=margins(1.0),
    )


def tracked_run(folder: Path, steps: int = STEPS, count: int = 3) -> Path:
    """Make the run in a working directory. steps: of its training. count: rows of val."""
    full, merged = folder / "checkpoints" / RUN / "full", folder / "merged" / RUN
    data, images = folder / "data" / "fire", folder / "images" / "fire"
    evaluated, answered = folder / "eval" / RUN / "val", folder / "answers" / RUN / "val"
    for place in (full, merged, data, images, evaluated, answered):
        place.mkdir(parents=True)
    (full / "progress.jsonl").write_text("".join(map(as_line, events(steps))))
    digests = TrainingDigests("job", "data", "model", {}, sha256_of(full / "progress.jsonl"))
    settings = TrainSettings(freeze=["vision_tower"]).model_dump()
    report = some_report(digests=digests, settings=settings, steps=steps, target=steps)
    write_account(full / "report.json", report)
    write_account(merged / "provenance.json", some_provenance(training=report, merged={"model.safetensors": "cd" * 32}))
    weights = published_weights(merged)
    (data / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    picture = {"path": "coco/a.png", "rows": count, "name": "a.png", "sha256": "ab" * 32, "rewritten": None}
    (images / "train.jsonl").write_text(json.dumps(picture) + "\n")
    evaluation = some_evaluation(rows_digest=sha256_of(data / "val.jsonl"), tuned=EvaluatedModel(weights), rows=count)
    write_account(evaluated / "report.json", evaluation)
    answers = some_answers()
    tuned = msgspec.structs.replace(answers.tuned, digest=weights)
    write_account(answered / "report.json", msgspec.structs.replace(answers, tuned=tuned, rows=1))
    found = [evaluated_row(number) for number in range(count)]
    (evaluated / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in found))
    wrong, right = an_answer("wrong", right=False), an_answer("gold 1", right=True)
    turn = AnsweredTurn(1, "look again", "gold 1", "gold 1", "words", wrong, right)
    said = AnsweredRow("row-1", "coco", ["a.png"], "a", False, [turn])
    (answered / "rows.jsonl").write_bytes(msgspec.json.encode(said) + b"\n")
    return folder


def send(folder: Path, store: str = "stores/trackers", **trackers: str) -> Tracked:
    """Call the rule's script."""
    track(
        full=folder / "checkpoints" / RUN / "full",
        merged=folder / "merged" / RUN,
        evaluated=[folder / "eval" / RUN / "val"],
        answered=[folder / "answers" / RUN / "val"],
        rows=[folder / "data" / "fire" / "val.jsonl"],
        pictures=[folder / "images" / "fire" / "train.jsonl"],
        tracked=folder / "tracked" / f"{RUN}.json",
        track=TrackSettings.model_validate(trackers),
        tracker_store=folder / store,
    )
    return read_account(folder / "tracked" / f"{RUN}.json", Tracked)
