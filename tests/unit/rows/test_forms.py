"""The raw forms: the result of each row, of small files as each maker's own writers wrote them, and of broken ones.

What is expected is written down by hand: turns by their speakers, pictures, declarations, and the answers that are
trained; the first row for all, with `red` and `green` for its pictures.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import example_of_a_form, form_rows
from vlmflow.config.raw_forms import form_of, kinds
from vlmflow.config.settings import RowChoice, RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import ASSISTANT, REASONS, Reject
from vlmflow.rows.convert import ConvertedRow, convert
from vlmflow.rows.sharegpt import first_fault

LLAVA = [{"from": "human", "value": "What?\n<image>"}, {"from": "gpt", "value": " It. \r\n"}]
TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]

SYSTEM = {"role": "system", "content": "Be brief."}


def made(kind: str, row: dict[str, Any], modality: str = "text", **more: Any) -> ConvertedRow | Reject:
    options = {"columns": {}, "prompt": "Say it.", "system_prompt": None} | more
    found = form_rows(kind, modality, **options)("id", 3, json.dumps(row).encode())
    return found if isinstance(found, Reject) else found[0]


def spoken(row: ConvertedRow | Reject) -> list[tuple[str, str]]:
    assert isinstance(row, ConvertedRow), row
    assert first_fault(row, RowLimits()) is None
    return [(turn.speaker, turn.value) for turn in row.conversations]


@pytest.mark.parametrize(
    ("kind", "row", "question"),
    [
        ("volcano", {"id": "1", "conversations": TALK}, "What?"),
        ("sharegpt", {"conversations": [turn | {"weight": 1} for turn in TALK]}, "What?"),
        ("messages", {"messages": CHAT}, "What?"),
        ("alpaca", {"instruction": "What", "input": "is it?", "output": "It."}, "What\nis it?"),
        ("alpaca", {"instruction": "What?", "output": "It.", "text": "all of it"}, "What?"),
        ("prompt_completion", {"prompt": "What?", "completion": "It."}, "What?"),
        ("text", {"text": "It."}, "Say it."),
    ],
)
def test_every_form_becomes_question_and_answer(kind: str, row: dict[str, Any], question: str) -> None:
    assert spoken(made(kind, row)) == [("human", question), ("gpt", "It.")]
    prompted = made(kind, row, system_prompt="Be brief.")
    assert spoken(prompted)[0] == ("system", "Be brief.")
    picture = made(kind, row | {"image": "coco/1.jpg"}, "image")
    assert spoken(picture) == [("human", "<image>\n" + question), ("gpt", "It.")]
    assert (picture.images, picture.source, picture.attempts, picture.raw_row) == (["coco/1.jpg"], "coco", [1], 3)


def test_a_llava_row_gets_its_one_tag_in_front() -> None:
    row = made("volcano", {"image": "gqa/images/1.jpg", "conversations": LLAVA}, "image")
    assert spoken(row) == [("human", "<image>\nWhat?"), ("gpt", " It.")]


def test_a_system_turn_of_its_own_stays() -> None:
    row = made("messages", {"messages": [{"role": "system", "content": "Mine."}, *CHAT]}, system_prompt="Yours.")
    assert spoken(row)[0] == ("system", "Mine.")


def test_an_unanswered_last_turn_is_cut_off() -> None:
    row = made("messages", {"messages": [*CHAT, {"role": "user", "content": "And?"}]})
    assert spoken(row) == [("human", "What?"), ("gpt", "It.")]


def test_keys_may_be_called_otherwise() -> None:
    columns = {"prompt": "the question", "completion": "answer", "image": "file"}
    row = made(
        "prompt_completion", {"the question": "What?", "answer": "It.", "file": "a/1.png"}, "image", columns=columns
    )
    assert spoken(row) == [("human", "<image>\nWhat?"), ("gpt", "It.")]
    assert row.images == ["a/1.png"]


def test_turns_in_a_row_of_one_speaker_are_joined() -> None:
    turns = [SYSTEM, CHAT[0], CHAT[0], CHAT[1], CHAT[1], CHAT[0]]
    row = made("messages", {"messages": turns})
    assert spoken(row)[1:] == [("human", "What?\nWhat?"), ("gpt", "It.\nIt.")]


def test_pictures_stay_in_their_places_and_go_with_their_turns() -> None:
    asked = [*zip(["user", "assistant"] * 2, ["Is <image> like <image>?", "No.", "<image>", "Yes."], strict=True)]
    messages = [{"role": role, "content": text} for role, text in [*asked, ("user", "And <image>?")]]
    row = made("messages", {"messages": messages, "images": list("abca")}, "image")
    assert spoken(row) == [("human", asked[0][1]), ("gpt", "No."), ("human", "<image>"), ("gpt", "Yes.")]
    assert row.images == ["a", "b", "c"]


def test_pictures_without_a_tag_come_first() -> None:
    row = made("messages", {"messages": CHAT, "images": ["a", "b"]}, "image")
    assert spoken(row)[0] == ("human", "<image>\n<image>\nWhat?")


def test_more_or_fewer_tags_than_pictures_are_rejected() -> None:
    messages = [{"role": "user", "content": "Is <image> like <image>?"}, CHAT[1]]
    for pictures in (["a"], ["a", "b", "c"]):
        found = made("messages", {"messages": messages, "images": pictures}, "image")
        number = "1 picture" if len(pictures) == 1 else "3 pictures"
        assert found == Reject("image_tag", f"2 picture tags (<image>) but {number}")


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("volcano", {"conversations": [{"from": "narrator", "value": "x"}]}, "wrong_role"),
        ("volcano", {"conversations": []}, "unbalanced_turns"),
        ("volcano", {"conversations": [{"from": "human", "value": ""}]}, "empty_turn"),
        ("volcano", {"conversations": [{"from": "human", "value": 1}]}, "bad_shape"),
        ("volcano", {"conversations": TALK, "image": "a.jpg"}, "has_picture"),
        ("messages", {"messages": CHAT[::-1]}, "alternation"),
        ("messages", {"messages": CHAT[:1]}, "alternation"),
        ("messages", {"messages": [SYSTEM]}, "alternation"),
        ("messages", {"messages": [SYSTEM, CHAT[0]]}, "alternation"),
        ("messages", {"messages": [SYSTEM, CHAT[1]]}, "alternation"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "alternation"),
        ("messages", {"messages": [{"role": "user", "content": ["x"]}]}, "bad_shape"),
        ("alpaca", {"instruction": "", "input": "", "output": "x"}, "empty_turn"),
        ("alpaca", {"instruction": "x", "input": "", "output": " "}, "empty_turn"),
        ("alpaca", {"instruction": "x"}, "bad_shape"),
        ("text", {"text": None}, "bad_shape"),
    ],
)
def test_unusable_rows_are_rejected_with_their_reason(kind: str, row: dict[str, Any], reason: str) -> None:
    found = made(kind, row)
    assert isinstance(found, Reject)
    assert found.reason == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": TALK}, "text_only"),
        ({"conversations": TALK, "image": None}, "text_only"),
        ({"conversations": TALK, "image": ""}, "text_only"),
        ({"conversations": TALK, "images": []}, "text_only"),
        ({"conversations": TALK, "images": [""]}, "text_only"),
        ({"conversations": [{"from": "human", "value": "<image>\n"}, TALK[1]], "image": "a.jpg"}, "empty_turn"),
    ],
)
def test_rows_of_another_modality_are_left_out(row: dict[str, Any], reason: str) -> None:
    found = made("volcano", row, "image")
    assert isinstance(found, Reject)
    assert found.reason == reason


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.text()
    | st.sampled_from(["human", "gpt", "system", "user", "<image>"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["from", "value", "role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)
KINDS = [kind for kind in kinds() if form_of(kind).read]
KEYS = sorted({key for kind in KINDS for key in form_of(kind).all_keys})


@given(
    row=st.dictionaries(st.sampled_from(KEYS), JUNK) | JUNK,
    kind=st.sampled_from(KINDS),
    modality=st.sampled_from(["image", "text", None]),
    noise=st.binary(max_size=8),
    at=st.integers(0, 80),
)
def test_any_row_is_converted_or_rejected(row: Any, kind: str, modality: str | None, noise: bytes, at: int) -> None:
    """Well-formed or not: nothing raises, every rejection has a known reason, every converted row has the modality."""
    text = json.dumps(row).encode()
    make = form_rows(kind, modality, {}, "Say it.", "Be brief.")
    for raw in (text, text[:at] + noise + text[at:], text[:at], noise):
        found = make("id", 0, raw)
        if isinstance(found, Reject):
            assert found.reason in REASONS
            continue
        (made_row,) = found
        assert modality is None or bool(made_row.images) == (modality == "image")
        fault = first_fault(made_row, RowLimits())
        assert fault is None or fault.reason in REASONS
        msgspec.json.encode(made_row)


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
