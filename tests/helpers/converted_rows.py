"""Raw rows converted as the stage does, by the settings of a data set."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from stages import convert_rows
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import RowChoice, RowLimits, part_of
from vlmflow.pictures.resolve import named_paths
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.sharegpt import first_fault, lines_of


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
