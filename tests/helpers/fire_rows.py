"""Valid FIRE rows for tests, and a data set's folder as the stages before validation write it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from vlmflow.config.data_settings import DatasetSettings, NearDuplicates, RowChoice, RowLimits
from vlmflow.config.settings import Take
from vlmflow.raw.split import open_rows
from vlmflow.rows import form_rows as forms
from vlmflow.rows.convert import MakeRows, convert
from vlmflow.rows.validate import SplitFiles

NO_LIMITS = RowLimits(max_turns=10**9, max_turn_chars=10**9)


def fire_row(
    image: str = "coco/train2017/000000000001.jpg", question: str = "What is it?", rounds: int = 2, **changes: Any
) -> dict[str, Any]:
    """Return a valid FIRE row with `rounds` attempts; `changes` replace whole keys."""
    turns = []
    for number in range(1, rounds + 1):
        score = 10 if number == rounds else min(9, number + 1)
        turns.append({"role": "student", "type": "response", "value": f"Thought: t{number}.\nAnswer: a{number}\n\n"})
        turns.append({"role": "teacher", "type": "feedback", "value": f"Score: {score}.\nFeedback: f{number}\n"})
    scores = [10 if number == rounds else min(9, number + 1) for number in range(1, rounds + 1)]
    row = {
        "image": image,
        "question": {"role": "user", "value": question},
        "conversations": turns,
        "groundtruth": {"role": "user", "value": f"a{rounds}"},
        "source": "vqav2",
        "round": rounds,
        "score": scores,
    }
    return row | changes


def training_form(
    form: str,
    max_history_rounds: int | None = None,
    min_score: int | None = None,
    single_turn: str | None = None,
    thoughts: str = "keep",
    feedback_form: str = "raw",
) -> DatasetSettings:
    """Return settings that say how a trajectory becomes training rows."""
    return DatasetSettings.model_construct(
        form=form,
        max_history_rounds=max_history_rounds,
        min_score=min_score,
        single_turn=single_turn,
        thoughts=thoughts,
        feedback_form=feedback_form,
    )


def fire_rows(
    form: DatasetSettings, limits: RowLimits, system_prompt: str | None = None, ignore_keys: Sequence[str] = ()
) -> MakeRows:
    """Return the converter of FIRE's raw rows. form: see `training_form`."""
    own = {"modality": "image", "row_limits": limits, "system_prompt": system_prompt, "ignore_keys": ignore_keys}
    return forms.form_rows("fire", form.model_copy(update=own))


def form_rows(
    kind: str,
    modality: str | None,
    columns: dict[str, str],
    prompt: str | None,
    system_prompt: str | None,
    ignore_keys: Sequence[str] = (),
    take: Take = None,
    frames: int | None = None,
) -> MakeRows:
    """Return the converter of raw rows of a kind."""
    settings = DatasetSettings.model_construct(
        modality=modality, columns=columns, prompt=prompt, system_prompt=system_prompt, ignore_keys=ignore_keys
    )
    return forms.form_rows(kind, settings, take, frames)


def split_rules(
    val_share: float,
    seed: int,
    max_reject_share: float,
    test_share: float = 0.0,
    modality: str | None = "image",
    *,
    kind: str = "fire",
    form: str = "trajectory",
    drop: bool = False,
) -> DatasetSettings:
    """Return settings of checking and splitting rows. drop: whether near-duplicates are dropped."""
    return DatasetSettings.model_construct(
        kind=kind,
        form=form,
        val_share=val_share,
        seed=seed,
        max_reject_share=max_reject_share,
        test_share=test_share,
        modality=modality,
        near_duplicates=NearDuplicates(drop=drop),
    )


def write_array(path: Path, rows: list[Any]) -> Path:
    """Write a JSON array; a row given as bytes is written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"[" + b",\n".join(parts) + b"]\n")
    return path


def write_picture(path: Path, colour: tuple[int, int, int] = (200, 30, 30)) -> Path:
    """Write a small picture in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 48), colour).save(path)
    return path


def split_files(
    folder: Path, split: str, rows: list[Any], form: str | DatasetSettings = "trajectory", **pictures: Any
) -> SplitFiles:
    """Convert `rows` into `folder`, with a manifest in which every picture is usable.

    form: how trajectories become rows, or only its name.
    pictures: entries of the manifest to change, by path: `pictures={"a.jpg": {"reason": "missing"}}`.
    """
    changes = pictures.get("pictures", {})
    raw = write_array(folder / "raw" / f"{split}.json", rows)
    files = SplitFiles(
        split, [raw], folder / f"{split}.jsonl", folder / f"{split}.rejects.jsonl", folder / f"{split}.i"
    )
    with open_rows([raw], split) as raw_rows:
        make = fire_rows(training_form(form, 6) if isinstance(form, str) else form, NO_LIMITS)
        convert(raw_rows, files.converted, files.rejects, split, make, RowChoice(), processes=1)
    entries: dict[str, dict[str, Any]] = {}
    with open_rows([raw], split) as raw_rows:
        for row in raw_rows:
            try:
                path = msgspec.json.decode(row)["image"]
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
            entry = entries.setdefault(path, {"path": path, "rows": 0, "name": path, "sha256": digest(path)})
            entry["rows"] += 1
    lines = [entry | {"format": "JPEG"} | changes.get(path, {}) for path, entry in entries.items()]
    files.pictures.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return files


def digest(text: str) -> str:
    """Return 64 hexadecimal digits, instead of a picture's digest."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
