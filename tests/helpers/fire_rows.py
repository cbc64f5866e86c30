"""Valid FIRE rows for tests, and a data set's folder as the stages before validation write it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from vlmflow.config.data_settings import RowChoice, RowLimits
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import MakeRows, convert
from vlmflow.rows.form_rows import form_rows
from vlmflow.rows.trajectories import TrainingForm
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


def fire_rows(
    trajectories: TrainingForm, limits: RowLimits, system_prompt: str | None = None, ignore_keys: Sequence[str] = ()
) -> MakeRows:
    """Return the converter of FIRE's raw rows."""
    return form_rows("fire", "image", {}, None, system_prompt, ignore_keys, limits, trajectories)


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
    folder: Path, split: str, rows: list[Any], form: str | TrainingForm = "trajectory", **pictures: Any
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
        make = fire_rows(TrainingForm(form, 6) if isinstance(form, str) else form, NO_LIMITS)
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
