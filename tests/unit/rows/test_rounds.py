"""Forms whose rows have questions beside their answers: every file of other makers, and small rows of each rule."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_rows import converted_rows, example_of_a_form, form_rows
from vlmflow.config.raw_forms import form_of
from vlmflow.config.settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.named import name_of
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.sharegpt import first_fault

COLOURS = ["red", "green", "blue", "black", "orange", "purple"]
FILES = [f"{colour}.{'png' if number % 2 else 'jpg'}" for number, colour in enumerate(COLOURS)]
NEXT = dict(zip(COLOURS, [*COLOURS[1:], COLOURS[0]], strict=True))


def converted(kind: str, path: Path, **options: Any) -> list[ConvertedRow | Reject]:
    """Convert all rows of a file."""
    settings = {"columns": {}, "prompt": None, "system_prompt": None} | options
    make = form_rows(kind, None, **settings)
    with open_rows([path], "train") as rows:
        made = [make(f"id{number}", number, row) for number, row in enumerate(rows)]
    return [row if isinstance(row, Reject) else row[0] for row in made]


def row_of(kind: str, row: dict[str, Any], **options: Any) -> ConvertedRow | Reject:
    """Convert one row."""
    settings = {"columns": {}, "prompt": None, "system_prompt": None} | options
    made = form_rows(kind, None, **settings)("id", 0, json.dumps(row).encode())
    return made if isinstance(made, Reject) else made[0]


def talk(row: ConvertedRow | Reject) -> list[str]:
    """Return the turns of a sound row, as `speaker: text`."""
    assert isinstance(row, ConvertedRow), row
    assert first_fault(row, RowLimits()) is None
    return [f"{turn.speaker}: {turn.value}" for turn in row.conversations]


EXAMPLES = {
    "20-query-response-history.jsonl": (
        "query_response",
        lambda c: ["system: Be brief.", "human: What is it?", "gpt: A disc.", "human: And now?", f"gpt: {c}"],
    ),
    "21-alpaca-system-history.json": (
        "alpaca",
        lambda c: ["system: Be brief.", "human: Hello", "gpt: Hi", f"human: Name the colour.\n{c}", f"gpt: {c}"],
    ),
    "23-swift-sharegpt-pairs.jsonl": (
        "pairs",
        lambda c: ["system: S", f"human: Colour of {c}?", f"gpt: {c}"],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_makers_files_become_these_turns(name: str) -> None:
    """No row of these has a picture; all of their answers are trained."""
    kind, turns = EXAMPLES[name]
    rows = converted(kind, example_of_a_form(name))
    assert [talk(row) for row in rows] == [turns(colour) for colour in COLOURS]
    assert all(row.images == [] and row.tools == "" for row in rows)
    assert {turn.loss for row in rows for turn in row.conversations} == {msgspec.UNSET}


def test_llavas_rows_have_one_picture_or_none() -> None:
    *shown, said = converted("sharegpt", example_of_a_form("24-llava.json"))
    assert [talk(row) for row in shown] == [["human: <image>\nWhat is this?", f"gpt: A {c} disc."] for c in COLOURS]
    assert [row.images for row in shown] == [[name] for name in FILES]
    assert (talk(said), said.images) == (["human: Say hi.", "gpt: Hi."], [])


def test_m4_instructs_rows_have_several_pictures_each_at_its_tag() -> None:
    rows = converted("sharegpt", example_of_a_form("25-llava-interleave-m4.json"))
    assert [talk(row) for row in rows] == [
        ["human: <image> <image> Compare.", f"gpt: {one}, {other}."] for one, other in NEXT.items()
    ]
    assert [row.images for row in rows] == [[FILES[n], FILES[(n + 1) % 6]] for n in range(6)]


def test_captions_answer_the_prompt() -> None:
    texts = converted("text", example_of_a_form("32-text.jsonl"), prompt="Say it.")
    assert [talk(row) for row in texts] == [["human: Say it.", f"gpt: The {c} disc is round."] for c in COLOURS]
    named = {"columns": {"image": "file_name"}, "prompt": "What is this?"}
    rows = converted("text", example_of_a_form("62-imagefolder") / "metadata.jsonl", **named)
    assert [talk(row) for row in rows] == [["human: <image>\nWhat is this?", f"gpt: a {c} disc"] for c in COLOURS]
    assert [row.images for row in rows] == [[name] for name in FILES]


ABOUT = ["human: <image>\nWhat is this?", "gpt: {}"]
PAIR = ["human: <image>\n<image>\nWhat is the first?", "gpt: {}.", "human: And the second?", "gpt: {}."]


@pytest.mark.parametrize(
    ("name", "kind", "columns", "turns"),
    [
        ("40-hub-image-column.parquet", "sharegpt", {}, [ABOUT[0], "gpt: A {} disc."]),
        ("41-cauldron-finevision.parquet", "texts", {}, PAIR),
        ("43-hub-vqa.parquet", "vqa", {"answer": "answer"}, ABOUT),
        ("43-hub-vqa.parquet", "vqa", {"answer": "answers"}, ABOUT),
        ("44-pandas-bytes.parquet", "vqa", {}, ABOUT),
        ("45-pandas-base64.csv", "vqa", {}, ABOUT),
    ],
)
def test_tables_with_pictures_become_rows(
    tmp_path: Path, name: str, kind: str, columns: dict[str, str], turns: list[str]
) -> None:
    """The pictures are those in the folder beside, by their content."""
    found = converted_rows(tmp_path, example_of_a_form(name), kind=kind, columns=columns)
    shown = len(turns) // 2
    colours = [[colour, NEXT[colour]][:shown] for colour in COLOURS]
    said = [
        [turn.format(*named[number // 2 : number // 2 + 1]) for number, turn in enumerate(turns)] for named in colours
    ]
    assert found.talks == said
    content = {c: (example_of_a_form("pictures") / file).read_bytes() for c, file in zip(COLOURS, FILES, strict=True)}
    assert [row.images for row in found.rows] == [[name_of(content[colour]) for colour in named] for named in colours]
    assert {row.source for row in found.rows} == {"x" if kind == "texts" else "unknown"}


def test_two_columns_of_answers_stop_and_ask_for_columns(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"answers: 6 of 6 rows, .*`columns: \{answer: …\}` chooses"):
        converted_rows(tmp_path, example_of_a_form("43-hub-vqa.parquet"), kind="vqa")


ASK = {"instruction": "What?", "output": "It."}
ASKED = ["human: What?", "gpt: It."]


@pytest.mark.parametrize(
    ("kind", "row", "turns"),
    [
        ("alpaca", ASK | {"history": [["", " "], ["Hi?", "Hi."]], "system": "NaN"}, ["human: Hi?", "gpt: Hi.", *ASKED]),
        ("alpaca", ASK | {"history": None, "system": None}, ASKED),
        ("alpaca", ASK | {"system": " Be brief.\n"}, ["system:  Be brief.", *ASKED]),
        ("query_response", {"query": "What?", "response": "It.", "history": []}, ASKED),
        ("pairs", {"conversation": [{"human": "What?", "assistant": "It."}] * 2}, ASKED * 2),
        ("texts", {"texts": [{"user": "What?", "assistant": "It.", "source": "vqav2"}] * 2}, ASKED * 2),
        ("texts", {"texts": [{"user": "What?", "assistant": "It.", "source": None}]}, ASKED),
        ("vqa", {"question": "What?", "answer": "It."}, ASKED),
        ("vqa", {"question": "What?", "answer": ["No.", "It.", "It.", "No.", "Red."]}, ["human: What?", "gpt: No."]),
        ("vqa", {"question": "What?", "answer": ["No.", "It.", "It."]}, ASKED),
    ],
)
def test_rounds_become_turns(kind: str, row: dict[str, Any], turns: list[str]) -> None:
    """Blank rounds and system prompts count as none; of several answers to a question the most frequent is trained."""
    assert talk(row_of(kind, row)) == turns
    assert talk(row_of(kind, row, system_prompt="S"))[0].startswith("system: ")
    shown = row_of(kind, row | {"images": ["a/1.png", "a/2.png"]})
    first = next(number for number, turn in enumerate(turns) if turn.startswith("human"))
    turns = [*turns[:first], turns[first].replace("human: ", "human: <image>\n<image>\n"), *turns[first + 1 :]]
    assert talk(shown) == turns
    assert shown.images == ["a/1.png", "a/2.png"]


def test_a_row_is_from_the_source_of_its_first_round() -> None:
    rounds = [{"user": "What?", "assistant": "It.", "source": name} for name in ("vqav2", "ai2d")]
    assert row_of("texts", {"texts": rounds}).source == "vqav2"
    assert row_of("texts", {"texts": rounds, "source": "cauldron"}).source == "vqav2"
    del rounds[0]["source"]
    assert row_of("texts", {"texts": rounds, "source": "cauldron"}).source == "cauldron"
    assert row_of("texts", {"texts": rounds, "image": "coco/1.jpg"}).source == "coco"


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("alpaca", ASK | {"history": [["Hi?"]]}, "bad_shape"),
        ("alpaca", ASK | {"history": [["Hi?", ""]]}, "empty_turn"),
        ("alpaca", ASK | {"system": 1}, "bad_shape"),
        ("query_response", {"query": "What?"}, "bad_shape"),
        ("pairs", {"conversation": []}, "unbalanced_turns"),
        ("pairs", {"conversation": [{"human": "What?"}]}, "bad_shape"),
        ("texts", {"texts": []}, "unbalanced_turns"),
        ("texts", {"texts": [{"user": "<image>?", "assistant": "It."}], "images": ["1.png", "2.png"]}, "image_tag"),
        ("vqa", {"question": "What?", "answer": []}, "empty_turn"),
        ("vqa", {"question": "What?", "answers": ["It."]}, "bad_shape"),
    ],
)
def test_what_is_no_round_is_rejected(kind: str, row: dict[str, Any], reason: str) -> None:
    found = row_of(kind, row)
    assert isinstance(found, Reject)
    assert found.reason == reason


def test_what_is_not_trained_of_a_round_stops_the_conversion() -> None:
    """A round has no speaker: whatever stands there is about its answer."""
    for kind, row in (
        ("pairs", {"conversation": [{"human": "What?", "assistant": "It.", "weight": 0}]}),
        ("texts", {"texts": [{"user": "What?", "assistant": "It.", "weight": 0}]}),
    ):
        make = form_rows(kind, None, {}, None, None)
        make("id", 0, json.dumps(row).encode())
        assert make.unread.take().meant == {f"{next(iter(row))}.weight": 1}


def test_of_two_keys_of_answers_columns_choose_one() -> None:
    """The unread keys that then have no meaning; without a choice, and with choices of the question, rows stop."""
    form = form_of("vqa")
    assert {"answers", "multiple_choice_answer", "choices"} <= form.meanings_of({}).keys()
    assert "columns: {answer: …}" in form.meanings_of({})["answers"].says
    chosen = form.meanings_of({"answer": "answer"}).keys()
    assert "choices" in chosen
    assert not {"answers", "multiple_choice_answer"} & chosen
    row = {"question": "What?", "answer": "No.", "answers": ["It.", "It."]}
    assert talk(row_of("vqa", row, columns={"answer": "answers"})) == ASKED
