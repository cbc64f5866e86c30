"""The common raw forms: the result of each row; no row raises, however broken."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fire_rows import form_rows
from vlmflow.config.raw_forms import form_of, kinds
from vlmflow.config.settings import RowLimits
from vlmflow.rows.chat import REASONS, Reject
from vlmflow.rows.convert import ConvertedRow
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
