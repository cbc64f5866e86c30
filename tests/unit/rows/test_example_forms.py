"""Small files of each maker's form, as the makers' own writers wrote them, and what a row of each says.

What is expected is written down by hand: turns by their speakers, pictures, declarations, and the answers that are
trained; the first row for all, with `red` and `green` for its pictures.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fire_rows import form_rows
from real_rows import example_of_a_form
from vlmflow.config.settings import RowChoice, RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import ASSISTANT
from vlmflow.rows.convert import ConvertedRow, convert
from vlmflow.rows.sharegpt import first_fault

SPEAKERS = {"s": "system", "h": "human", "g": "gpt", "c": "function_call", "o": "observation"}

COLOURS = ["red", "green", "blue", "black", "orange", "purple"]
FILES = {colour: f"{colour}.{'png' if number % 2 else 'jpg'}" for number, colour in enumerate(COLOURS)}


def call(colour: str) -> str:
    return json.dumps({"name": "count", "arguments": {"colour": colour}})


def tools(says: str) -> str:
    parameters = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    function = {"name": "count", "description": says, "parameters": parameters}
    return json.dumps([{"type": "function", "function": function}])


COUNT = tools("Count shapes of a colour.")

# file, kind, turns (RED and GREEN are the colours of a row's pictures), pictures (DATA: embedded), tools, untrained
FORMS: list[tuple[str, str, list[str], str, str, list[str]]] = [
    ("01-messages.jsonl", "messages", ["h What colour is shape 'RED'?", "g It is RED."], "", "", []),
    (
        "02-messages-system.jsonl",
        "messages",
        ["s Answer briefly.", "h Which?", "g RED", "h Sure?", "g Yes."],
        "",
        "",
        [],
    ),
    (
        "03-messages-several-pictures.json",
        "messages",
        ["h <image>What is this?", "g A RED disc.", "h And this?<image>", "g A GREEN disc."],
        "RED GREEN",
        "",
        [],
    ),
    (
        "04-sharegpt-system-tools-beside.json",
        "sharegpt",
        ["s Be exact.", "h How many RED?", f"c {call('RED')}", 'o {"n": 1}', "g One RED."],
        "",
        COUNT,
        [],
    ),
    (
        "05-openai-tool-calls.jsonl",
        "messages",
        ["h How many RED?", f"c {call('RED')}", f"c {call('white')}", "o 1", "o 0", "g One RED, no white."],
        "",
        COUNT,
        [],
    ),
    (
        "06-openai-pictures-data-url.jsonl",
        "messages",
        ["s You name colours.", "h What is in the picture?\n<image>", "g A RED disc."],
        "DATA:RED",
        "",
        [],
    ),
    (
        "07-openai-two-pictures.jsonl",
        "messages",
        ["h First: <image> second: <image>. Compare.", "g RED, then GREEN."],
        "DATA:RED DATA:GREEN",
        "",
        [],
    ),
    ("08-openai-weights.jsonl", "messages", ["h Colour?", "g No idea.", "h Try.", "g RED"], "", "", ["No idea."]),
    (
        "09-anthropic.jsonl",
        "messages",
        ["s You name colours.", "h <image>What is this?", "g A RED disc."],
        "DATA:RED",
        "",
        [],
    ),
    (
        "10-anthropic-tools.jsonl",
        "messages",
        ["h How many RED?", "g I count.", f"c {call('RED')}", "o 1", "g One."],
        "",
        tools("Count."),
        [],
    ),
    ("11-parts-qwen.jsonl", "messages", ["h <image><image>Compare.", "g RED, GREEN."], "RED GREEN", "", []),
    ("12-parts-llamafactory-v1.jsonl", "messages", ["h <image>What is this?", "g A RED disc."], "RED", "", []),
    ("14-oumi.jsonl", "messages", ["h <image>What is this?", "g A RED disc."], "RED", "", []),
    ("15-swift-loss.jsonl", "messages", ["h <image>Colour?", "g No idea.", "h Try.", "g RED"], "RED", "", ["No idea."]),
    ("16-swift-loss-last-false.jsonl", "messages", ["h Colour?", "g RED"], "", "", []),
    (
        "18-swift-tool-pictures.jsonl",
        "messages",
        ["h <image>Look again.", f"c {call('RED')}", "o <image>", "g Then it was GREEN."],
        "RED GREEN",
        COUNT,
        [],
    ),
    ("29-reasoning.jsonl", "messages", ["h Colour?", "g <think>\nI look at it.\n</think>\n\nRED"], "", "", []),
    ("30-think.jsonl", "messages", ["h Colour?", "g <think>\nI look.\n</think>\n\nRED"], "", "", []),
    ("33-system-twice-user-user.jsonl", "messages", ["h One.\nTwo.", "g RED\nAnd more."], "", "", []),
    ("46-pandas.jsonl", "messages", ["h Colour of RED?", "g RED"], "", "", []),
    ("47-pandas-messages.parquet", "messages", ["h Colour of RED?", "g RED"], "", "", []),
]


def in_row(text: str, number: int) -> str:
    """Return an expected text for the row of a number."""
    return text.replace("RED", COLOURS[number]).replace("GREEN", COLOURS[(number + 1) % 6])


def name_of(picture: str) -> str:
    """Return the name of a picture: its file, or its digest if the row holds it."""
    kind, _, colour = picture.rpartition(":")
    file = FILES[colour]
    if not kind:
        return file
    digest = hashlib.sha256(example_of_a_form(f"pictures/{file}").read_bytes()).hexdigest()
    return f"embedded/{digest[:2]}/{digest}{Path(file).suffix}"


@pytest.mark.parametrize(
    ("file", "kind", "turns", "pictures", "declared", "untrained"), FORMS, ids=[f[0] for f in FORMS]
)
def test_what_a_row_of_each_form_says(
    file: str, kind: str, turns: list[str], pictures: str, declared: str, untrained: list[str]
) -> None:
    make = form_rows(kind, None, {}, None, None)
    with open_rows([example_of_a_form(file)], "train") as rows:
        made: list[Any] = [make("id", number, row) for number, row in enumerate(rows)]
    assert len(made) == 6
    for number, found in enumerate(made):
        assert isinstance(found, list), found
        (row,) = found
        assert isinstance(row, ConvertedRow)
        assert first_fault(row, RowLimits()) is None
        expected = [(SPEAKERS[turn[0]], in_row(turn[2:], number)) for turn in turns]
        assert [(turn.speaker, turn.value) for turn in row.conversations] == expected
        assert row.images == [name_of(in_row(picture, number)) for picture in pictures.split()]
        assert row.tools == declared
        said = [turn for turn in row.conversations if turn.speaker in ASSISTANT]
        assert [turn.value for turn in said if turn.loss is False] == untrained


@pytest.mark.parametrize(
    ("file", "kind", "keys"),
    [
        ("13-parts-axolotl.jsonl", "messages", ["messages.content.train: 6 of 6"]),
        ("17-swift-loss-scale.jsonl", "messages", ["messages.loss_scale: 6 of 6"]),
        ("19-swift-grounding.jsonl", "messages", ["objects: 6 of 6"]),
        ("26-dpo.json", "sharegpt", ["chosen: 6 of 6", "rejected: 6 of 6"]),
        ("27-trl-preference.jsonl", "messages", ["chosen: 6 of 6", "rejected: 6 of 6"]),
        ("28-kto.json", "messages", ["label: 3 of 6"]),
        ("31-video.jsonl", "messages", ["videos: 6 of 6"]),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, file: str, kind: str, keys: list[str]) -> None:
    make = form_rows(kind, None, {}, None, None)
    with open_rows([example_of_a_form(file)], "train") as rows, pytest.raises(VlmflowError) as raised:
        convert(rows, tmp_path / "made.jsonl", tmp_path / "rejects.jsonl", "train", make, RowChoice(), 1)
    assert [line.strip().partition(" rows")[0] for line in raised.value.cause.splitlines()[1:]] == keys
