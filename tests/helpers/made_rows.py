"""Rows for tests: FIRE rows, raw rows converted as the stage does, and real files beside the checkout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from PIL import Image

from debian import lacking
from stages import convert_rows
from vlmflow.config.data_settings import DatasetSettings, NearDuplicates, RowChoice, RowLimits
from vlmflow.config.settings import Take, part_of
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.split import open_rows
from vlmflow.rows import form_rows as forms
from vlmflow.rows.chat import Turn, times_answered
from vlmflow.rows.convert import ConvertedRow, MakeRows, convert
from vlmflow.rows.sharegpt import ShareGptRow, first_fault, lines_of
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


class Converted(NamedTuple):
    """What a file became.

    rejects: by the number of the raw row. unread: the account. named: its pictures. choice: of all its rows.
    """

    rows: list[ConvertedRow]
    rejects: dict[int, str]
    unread: dict[str, Any]
    named: list[str]
    choice: RowChoice

    @property
    def talks(self) -> list[list[str]]:
        """The turns of each row, as `speaker: text`."""
        assert all(first_fault(row, RowLimits()) is None for row in self.rows)
        return [[f"{turn.speaker}: {turn.value}" for turn in row.conversations] for row in self.rows]


def converted_rows(folder: Path, raw: Path | list[dict[str, Any]], **settings: Any) -> Converted:
    """Convert a file, or rows that are written to one, as data set `mine`. folder: an empty one for the outputs."""
    if isinstance(raw, list):
        rows, raw = raw, folder / "raw.jsonl"
        raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = DatasetSettings(train=str(raw), **settings)
    keys = {"kind", "modality", "columns", "prompt", "system_prompt", "ignore_keys"}
    block = part_of(DatasetSettings, mine.model_dump(include=keys))
    made = folder / "mine" / "train.jsonl"
    files = {"converted": made, "rejects": folder / "rejects.jsonl", "unread": folder / "unread.json"}
    convert_rows.main(raw=[raw], **files, split="train", choice=mine.choice("train"), settings=block)
    rejects = {row["raw_row"]: row["reason"] for row in map(json.loads, files["rejects"].read_bytes().splitlines())}
    choice = mine.choice("train")
    named, unread = list(named_paths([raw], "train", choice)), json.loads(files["unread"].read_bytes())
    return Converted(list(lines_of(made, ConvertedRow)), rejects, unread, named, choice)


def made_row(
    name: str, turns: Sequence[Turn], source: str = "source", images: Sequence[str] = (), scores: Sequence[float] = ()
) -> ShareGptRow:
    """Return a row whose attempts are numbered from 1. name: its id."""
    attempts = list(range(1, times_answered(turns) + 1))
    return ShareGptRow(name, source, list(images), attempts, list(scores), list(turns))


SHARED = Path(__file__).parents[3] / "shared"
FOLDER = SHARED / "data" / "fire-demo"
FORMS = SHARED / "examples" / "forms"


def real_rows(name: str) -> Path:
    """Return a file of real FIRE rows. Without it the test is skipped; under CI it fails."""
    return _there(FOLDER / name)


def example_of_a_form(name: str) -> Path:
    """Return a file, or folder, of rows in another maker's form. Without it the test is skipped; under CI it fails."""
    return _there(FORMS / name)


def _there(file: Path) -> Path:
    if not file.exists():
        lacking(f"there is no {file}")
    return file
