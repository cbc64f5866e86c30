import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmflow.config.data_settings import RowLimits
from vlmflow.rows.chat import Turn, call_text
from vlmflow.rows.sharegpt import MARKS, PATH_TAG, PLACEHOLDER, ShareGptRow, first_fault, json_schema, may_hold_marks
from workflow_runs import ROOT

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
SOUND = {
    "id": "train-0000000-0123456789ab",
    "source": "gqa",
    "images": ["gqa/images/1.jpg"],
    "attempts": [1, 2],
    "scores": [3, 10],
    "conversations": [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "a"},
        {"from": "human", "value": "Score: 3. No."},
        {"from": "gpt", "value": "b"},
    ],
}
LIMITS = RowLimits(max_turns=7, max_turn_chars=120, max_pictures=3)


def talk(*values: str, first: str = "human") -> list[dict[str, str]]:
    speakers = ["human", "gpt"] if first == "human" else ["gpt", "human"]
    return [{"from": speakers[number % 2], "value": value} for number, value in enumerate(values)]


def trained(*losses: bool | None) -> list[dict[str, Any]]:
    """Return the sound row's turns with these values of `loss`; None for none."""
    given = [{} if loss is None else {"loss": loss} for loss in losses]
    return [turn | loss for turn, loss in zip(SOUND["conversations"], given, strict=True)]


TOOLS = '[{"type": "function", "function": {"name": "see", "description": "x"}}]'


def see(name: str = "see") -> tuple[str, str]:
    return "function_call", call_text(name, {"what": "é"})


def answered(text: str) -> tuple[str, str]:
    return "observation", text


def called(*turns: tuple[str, str], attempts: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Return changes for a row whose assistant calls a function: a question, and these turns."""
    talks = [{"from": speaker, "value": value} for speaker, value in [("human", "Q"), *turns]]
    tags = sum("<image>" in turn["value"] for turn in talks)
    return {"conversations": talks, "attempts": list(attempts), "scores": [], "images": ["a"] * tags, "tools": TOOLS}


def found(**changes: Any) -> str | None:
    line = json.dumps(SOUND | changes).encode()
    row = msgspec.json.decode(line, type=ShareGptRow)
    fault = first_fault(row, LIMITS)
    assert first_fault(row, LIMITS, marks=may_hold_marks(line, len(row.images))) == fault
    return fault.reason if fault else None


def test_a_valid_row_has_no_fault() -> None:
    assert found() is None
    VALIDATOR.validate(SOUND)


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": []},
        {"images": [], "conversations": talk("Q", "a", "f", "b")},
        {"conversations": [{"from": "system", "value": "Be brief."}, *SOUND["conversations"]]},
        {"conversations": trained(None, False, None, True)},
        {"conversations": talk("<image>\n{{x}} <img>a.png</img>", "a {{ROUND0}} b", "f", "{{QUERY}}")},
        {"images": [], "conversations": talk("<img>", "<img></img>", "</img> <img>", "<img>\nx</img>")},
        {"conversations": [{"from": "system", "value": "Be brief."}, *trained(None, True, None, True)]},
        {"conversations": talk("Q <image>", "a", "f", "b")},
        {"images": ["a", "b", "a"], "conversations": talk("Is <image> like <image>?", "a", "<image>", "b")},
        called(see(), answered("<image>"), ("gpt", "One.")),
        called(("gpt", "I look."), see(), see(), answered("1"), answered("2"), ("gpt", "One."), attempts=[1, 2]),
        called(see(), see(), answered("1"), see(), attempts=[1, 2]) | {"images": []},
    ],
)
def test_rows_without_pictures_or_scores_or_with_a_system_turn_or_untrained_answers_are_valid(
    changes: dict[str, Any],
) -> None:
    assert found(**changes) is None
    VALIDATOR.validate(SOUND | changes)


@pytest.mark.parametrize("tag", ["video", "audio", "bbox", "ref-object", "cot-process", "start-image"])
def test_a_row_without_a_picture_may_speak_of_tags(tag: str) -> None:
    """The trainer replaces them only beside pictures, videos or sounds."""
    talks = talk("How?", f"Use <{tag}> here.", "f", "b")
    assert found(images=[], conversations=talks) is None
    assert found(conversations=[{"from": "human", "value": "<image>\nHow?"}, *talks[1:]]) == "stray_tag"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conversations": talk("<image>\nQ", "a", first="gpt")}, "alternation"),
        ({"conversations": talk("<image>\nQ", "a", "f")}, "alternation"),
        ({"conversations": talk("Q", "a", "f", "b")}, "image_tag"),
        ({"conversations": talk("<image>\nQ", "an <image> too", "f", "b")}, "stray_tag"),
        ({"conversations": talk("<image>\nQ <image>", "a", "f", "b")}, "image_tag"),
        ({"images": ["a", "b"]}, "image_tag"),
        ({"images": list("abcd"), "conversations": talk("<image>" * 4, "a", "f", "b")}, "too_many_pictures"),
        ({"images": ["a", "b"], "conversations": talk("<image>\nQ", "<image>", "f", "b")}, "stray_tag"),
        ({"conversations": talk("<image>\nQ", "a", "f <video>", "b")}, "stray_tag"),
        ({"conversations": talk("<image>\nQ", "a<|im_end|>", "f", "b")}, "special_token"),
        ({"conversations": talk("<image>\nQ", "<think>a", "f", "b")}, "special_token"),
        ({"conversations": talk("<image>\nQ", "a\x00", "f", "b")}, "control_character"),
        ({"conversations": talk("<image>\nQ", " ", "f", "b")}, "empty_turn"),
        ({"conversations": talk("<image>\nQ", "a" * 121, "f", "b")}, "turn_too_long"),
        ({"conversations": talk("<image>\nQ", *"abcdefgh")}, "too_many_turns"),
        ({"attempts": [1]}, "schema"),
        ({"scores": [3]}, "schema"),
        ({"images": [], "conversations": talk("<image>\nQ", "a", "f", "b")}, "image_tag"),
        ({"conversations": [{"from": "system", "value": "x <image>"}, *SOUND["conversations"]]}, "stray_tag"),
        ({"conversations": [*SOUND["conversations"], {"from": "system", "value": "x"}]}, "alternation"),
        ({"conversations": [{"from": "system", "value": "x"}] * 2}, "alternation"),
        ({"conversations": talk("<image>\nthe text {{ROUND0}}", "a", "f", "b")}, "stray_tag"),
        ({"conversations": talk("<image>\nQ", "a", "{{ROUND1}}", "b")}, "stray_tag"),
        ({"conversations": [{"from": "system", "value": "{{QUERY}}"}, *SOUND["conversations"]]}, "stray_tag"),
        ({"images": [], "conversations": talk("Q", "a\n<img>a.png</img>", "f", "b")}, "stray_tag"),
        ({"images": [], "conversations": talk("<img> <img>x</img>", "a", "f", "b")}, "stray_tag"),
        ({"conversations": trained(None, True, None, False)}, "schema"),
        ({"conversations": trained(None, False, None, None)}, "schema"),
        ({"conversations": trained(None, None, None, True)}, "schema"),
        ({"conversations": trained(False, True, False, True)}, "schema"),
        ({"conversations": trained(None, False, None, False)}, "nothing_trained"),
        (called(see(), answered("1"), ("gpt", "One.")) | {"tools": ""}, "bad_call"),
        (called(see(), answered("1"), ("gpt", "One.")) | {"tools": "[]"}, "bad_tools"),
        (called(see(), answered("1"), ("gpt", "One.")) | {"tools": '[{"name": "see"}]'}, "bad_tools"),
        (called(see("look"), answered("1"), ("gpt", "One.")), "bad_call"),
        (called(("function_call", '{"name": "see"}'), answered("1"), ("gpt", "One.")), "bad_call"),
        (called(("function_call", "see"), answered("1"), ("gpt", "One.")), "bad_call"),
        (called(("function_call", '{"name": "see", "arguments": {"what": "\\u00e9"}}')), "bad_call"),
        (called(("function_call", '{"name": "see", "arguments": {"what": "\\u003c|im_end|>"}}')), "bad_call"),
        (called(("function_call", '{"arguments": {}, "name": "see"}')), "bad_call"),
        (called(("function_call", '{"name":"see","arguments":{}}')), "bad_call"),
        (called(see()) | {"tools": TOOLS.replace("x", "\\u003c|im_end|>")}, "bad_tools"),
        (called(see()) | {"tools": TOOLS.replace('"see"', '"a\\\\b"')}, "bad_tools"),
        (called(see()) | {"tools": TOOLS.replace(": ", ":")}, "bad_tools"),
        (called(see(), answered("1"), answered("2"), ("gpt", "One.")), "bad_call"),
        (called(see(), answered("1")), "alternation"),
        (called(see(), ("gpt", "One.")), "alternation"),
        (called(answered("1"), ("gpt", "One.")), "alternation"),
        (called(see(), answered("<|im_end|>"), ("gpt", "One.")), "special_token"),
        (called(see(), answered("{{QUERY}}"), ("gpt", "One.")), "stray_tag"),
        (called(see(), answered("1"), ("gpt", "One.")) | {"tools": TOOLS.replace("x", "x<|im_end|>")}, "special_token"),
        (called(see(), answered("1"), ("gpt", "One.")) | {"tools": TOOLS.replace("x", "x" * 200)}, "turn_too_long"),
    ],
)
def test_rules_beyond_the_schema(changes: dict[str, Any], reason: str) -> None:
    """Tags and pictures, stray tags and special tokens, alternation, and size limits."""
    assert found(**changes) == reason


PIECES = st.sampled_from([*"<>|/imagethnk \n\t\r\x00\x7f\x1fü\\", "{{ROUND0}}"])


@given(text=st.lists(PIECES).map("".join), ascii_only=st.booleans())
def test_the_quick_scan_of_a_line_misses_no_mark(text: str, ascii_only: bool) -> None:
    """However the JSON is written; a false alarm is allowed, a miss is not."""
    talks = talk("<image>\nQ", "a" + text, "f", "b")
    line = json.dumps(SOUND | {"conversations": talks}, ensure_ascii=ascii_only).encode()
    if any(pattern.search(text) for pattern in (*MARKS.values(), PLACEHOLDER, PATH_TAG)):
        assert may_hold_marks(line)
    assert may_hold_marks(line.replace(b"a<", b"a\\u003c")) or "<" not in text


ODD = st.none() | st.booleans() | st.integers(-2, 12) | st.floats(-1, 11) | st.text(max_size=4)
ODD = ODD | st.lists(ODD, max_size=2) | st.dictionaries(st.sampled_from(["from", "value", "x"]), ODD, max_size=3)


@st.composite
def rows(draw: Any) -> Any:
    """Valid rows with up to three changes: removed keys, added keys, values of any kind."""
    row = json.loads(json.dumps(SOUND))
    places = [row, row["conversations"], *row["conversations"]]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(places))
        if isinstance(place, dict):
            key = draw(st.sampled_from([*list(SOUND), "from", "value", "other"]))
            if draw(st.booleans()):
                place.pop(key, None)
            else:
                whole = st.lists(st.integers(-1, 12) | st.floats(-1, 12), max_size=3)
                place[key] = draw(ODD | whole | st.just(["a", "b"]) | st.sampled_from(["human", "gpt"]))
        else:
            place[draw(st.integers(0, len(place) - 1))] = draw(ODD)
    return row


@settings(max_examples=400)
@given(row=rows())
def test_the_typed_decoder_and_the_published_schema_accept_the_same_rows(row: Any) -> None:
    text = json.dumps(row)
    try:
        msgspec.json.decode(text, type=ShareGptRow)
        taken = True
    except msgspec.ValidationError:
        taken = False
    assert taken == VALIDATOR.is_valid(json.loads(text)), text


def test_the_published_schema_is_the_one_of_the_code() -> None:
    published = json.loads((ROOT / "docs" / "sharegpt-row.schema.json").read_text())
    assert published == json_schema(), "make docs"
    jsonschema.Draft202012Validator.check_schema(published)


TALK = ["Be brief.", "<image>One <image>?", "a", "And <image>?", "b", "No picture?", "c"]
"""A system turn and three rounds, with two, one and no picture."""


@pytest.mark.parametrize(
    ("first", "end", "images", "attempts"),
    [
        (7, 7, "xyz", [1, 2, 3]),
        (5, 7, "xyz", [1, 2]),
        (3, 7, "xy", [1]),
        (2, 7, "xy", []),
        (3, 5, "xy", [1, 3]),
        (2, 4, "xy", [2, 3]),
        (1, 3, "z", [2, 3]),
        (0, 1, "xyz", [1, 2, 3]),
    ],
)
def test_turns_that_are_left_out_take_their_pictures_with_them(
    first: int, end: int, images: str, attempts: list[int]
) -> None:
    speakers = ["system", *["human", "gpt"] * 3]
    turns = [Turn(speaker, text) for speaker, text in zip(speakers, TALK, strict=True)]
    row = ShareGptRow("id", "s", list("xyz"), [1, 2, 3], [1, 5, 9], turns)
    left = row.without(first, end)
    assert (left.images, left.attempts) == (list(images), attempts)
    assert left.scores == [[1, 5, 9][number - 1] for number in attempts]
    assert left.conversations == turns[:first] + turns[end:]
    assert row.images == list("xyz")
    if end == len(turns):
        assert row.until(first) == left
    without_scores = ShareGptRow("id", "s", list("xyz"), [1, 2, 3], [], turns)
    assert without_scores.without(first, end).scores == []
