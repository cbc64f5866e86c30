"""The turns of chats as their makers write them, each rule with a small input of its own."""

import base64
import hashlib
import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import form_rows
from vlmflow.config.settings import RowLimits
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.forms import messages
from vlmflow.rows.raw_messages import SPEAKERS, reading_of
from vlmflow.rows.raw_text import PARTS
from vlmflow.rows.sharegpt import first_fault

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
BASE64 = base64.b64encode(PNG).decode()
SHA = hashlib.sha256(PNG).hexdigest()
EMBEDDED = f"embedded/{SHA[:2]}/{SHA}.png"

SEE = {"name": "see", "parameters": {"type": "object", "properties": {}}}
TOOLS = json.dumps([{"type": "function", "function": SEE}])
CALL = {"id": "a", "type": "function", "function": {"name": "see", "arguments": '{"what": "é"}'}}
OTHER = {"id": "b", "type": "function", "function": {"name": "see", "arguments": {}}}
SAID = '{"name": "see", "arguments": {"what": "é"}}'
SAID_OTHER = '{"name": "see", "arguments": {}}'

Row = dict[str, Any]


def user(content: Any = "Q", **more: Any) -> Row:
    return {"role": "user", "content": content} | more


def answer(content: Any = "A", **more: Any) -> Row:
    return {"role": "assistant", "content": content} | more


def response(content: Any, of: str | None = None, role: str = "tool") -> Row:
    return {"role": role, "content": content} | ({"tool_call_id": of} if of else {})


def text(content: str, **more: Any) -> Row:
    return {"type": "text", "text": content} | more


def made(*messages: Row, kind: str = "messages", **beside: Any) -> ConvertedRow | Reject:
    key = "messages" if kind == "messages" else "conversations"
    make = form_rows(kind, None, {}, None, None)
    found = make("id", 0, json.dumps({key: messages} | beside).encode())
    if isinstance(found, Reject):
        return found
    return first_fault(found[0], RowLimits()) or found[0]


def read(*messages: Row, **more: Any) -> ConvertedRow:
    row = made(*messages, **more)
    assert isinstance(row, ConvertedRow), row
    return row


def spoken(*messages: Row, **more: Any) -> list[tuple[str, str]]:
    return [(turn.speaker, turn.value) for turn in read(*messages, **more).conversations]


def fault(*messages: Row, **more: Any) -> tuple[str, str]:
    found = made(*messages, **more)
    assert isinstance(found, Reject), found
    return found.reason, found.detail


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.jpg"},
        {"type": "image", "image": "file://a.jpg"},
        {"image": "a.jpg"},
        {"type": "image", "path": "a.jpg"},
        {"type": "image", "url": "a.jpg"},
        {"type": "image_url", "image_url": {"url": "a.jpg", "detail": "low"}},
        {"type": "input_image", "image_url": "a.jpg"},
        {"type": "image_url", "value": "a.jpg"},
        {"type": "image_path", "content": "a.jpg"},
        {"type": "image", "image": {"path": "a.jpg", "bytes": None}},
        {"type": "image", "index": 0, "image": "a.jpg"},
        {"type": "image", "source": {"type": "url", "url": "a.jpg"}},
        {"type": "image", "text": None, "image": "a.jpg"},
    ],
    ids=str,
)
def test_every_makers_picture_is_a_tag_in_its_place(part: Row) -> None:
    row = read(user([text("Is "), part, text(" red?")]), answer())
    assert (row.conversations[0].value, row.images) == ("Is <image> red?", ["a.jpg"])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "image", "base64": BASE64},
        {"type": "image", "image": {"bytes": BASE64, "path": "a.png"}},
        {"type": "image", "image": BASE64},
        {"type": "image_url", "image_url": f"DATA:image/png;base64,{BASE64}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    ],
)
def test_an_embedded_picture_has_a_name_by_its_content(part: Row) -> None:
    assert read(user([part, text("Q")]), answer()).images == [EMBEDDED]


def test_pictures_are_in_the_order_of_their_tags() -> None:
    one, two, three = ({"type": "image", "image": f"{name}.jpg"} for name in "abc")
    looks = answer(None, tool_calls=[CALL, OTHER])
    # The responses come in another order than the calls.
    responses = [response([three, text("late")], "b"), response([two, text("early")], "a")]
    row = read(user([one, text("Q")]), looks, *responses, answer(), tools=TOOLS)
    assert row.images == ["a.jpg", "b.jpg", "c.jpg"]
    assert [turn.value for turn in row.conversations if turn.speaker == "observation"] == [
        "<image>early",
        "<image>late",
    ]


def test_a_picture_without_a_name_is_named_beside() -> None:
    row = read(user([{"type": "image"}, {"type": "image", "text": None}, text("Q")]), answer(), images=["a", "b"])
    assert (row.conversations[0].value, row.images) == ("<image><image>Q", ["a", "b"])
    assert fault(user([{"type": "image"}, text("Q")]), answer(), images=["a", "b"])[0] == "image_tag"
    one, other = ({"type": "image", "index": index, "text": None} for index in range(2))
    assert read(user([one, other, text("Q", index=None)]), answer(), images=["a", "b"]).images == ["a", "b"]
    reason, detail = fault(user([other, one, text("Q")]), answer(), images=["a", "b"])
    assert (reason, detail) == ("bad_shape", "messages[0].content[0] shows picture 1 of the row, not 0, the next one")
    named = user([{"type": "image", "image": "a"}, text("Q")])
    assert fault(named, answer(), images=["b"]) == ("bad_shape", "pictures are named in the turns and beside them")


CALLS = [
    [answer(None, tool_calls=[CALL, OTHER]), response("2", "b"), response("1", "a"), answer("Both.")],
    [answer("", tool_calls=[CALL, OTHER]), response("1"), response("2"), answer("Both.")],
    [
        answer([{"type": "tool_use", "id": "a", "name": "see", "input": {"what": "é"}}]),
        answer([{"type": "tool_use", "id": "b", "name": "see", "input": {}}]),
        user([{"type": "tool_result", "tool_use_id": "b", "content": [text("2")]}]),
        user([{"type": "tool_result", "tool_use_id": "a", "content": "1"}]),
        answer([text("Both.")]),
    ],
    [
        {"role": "tool_call", "content": SAID},
        {"role": "function_call", "content": SAID_OTHER},
        response("1", role="tool_response"),
        response("2", role="function"),
        answer("Both."),
    ],
    [{"role": "tool_call", "content": f"[{SAID}, {SAID_OTHER}]"}, response("1"), response("2"), answer("Both.")],
    [
        answer(f"<tool_call>\n{SAID}\n</tool_call>\n<tool_call>\n{SAID_OTHER}\n</tool_call>"),
        response("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"),
        answer("Both."),
    ],
    [
        answer([{"type": "tool_call", "value": SAID}, {"type": "tool_call", "value": SAID_OTHER}]),
        response([{"type": "text", "value": "1"}]),
        response("2"),
        answer([{"type": "text", "value": "Both."}]),
    ],
]


@pytest.mark.parametrize("turns", CALLS)
def test_calls_and_responses_of_every_maker(turns: list[Row]) -> None:
    called = [("function_call", SAID), ("function_call", SAID_OTHER), ("observation", "1"), ("observation", "2")]
    assert spoken(user(), *turns, tools=TOOLS) == [("human", "Q"), *called, ("gpt", "Both.")]


def test_a_text_before_calls_is_a_turn_of_its_own() -> None:
    says = answer("I look.", function_call={"name": "see", "arguments": ""})
    turns = spoken(user(), says, response("1", role="function"), answer(), functions=[SEE])
    assert turns[1:3] == [("gpt", "I look."), ("function_call", SAID_OTHER)]
    written = answer(f"I look.\n<tool_call>\n{SAID_OTHER}\n</tool_call>")
    assert spoken(user(), written, response("1"), answer(), tools=TOOLS)[1:3] == turns[1:3]
    parts = answer([text("I look."), {"type": "tool_use", "id": "a", "name": "see", "input": {}}])
    result = user([{"type": "tool_result", "tool_use_id": "a", "content": "1"}])
    assert spoken(user(), parts, result, answer(), tools=TOOLS)[1:3] == turns[1:3]


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": SEE}],
        json.dumps([SEE]),
        [json.dumps(SEE)],
        [SEE],
        {"type": "function", "function": SEE},
        [{"name": "see", "input_schema": SEE["parameters"]}],
        [{"type": "function", **SEE}],
    ],
)
def test_declarations_of_every_maker(tools: Any) -> None:
    assert read(user(), answer(), tools=tools).tools == TOOLS


@pytest.mark.parametrize(
    ("turns", "reason", "detail"),
    [
        ([answer(None, tool_calls=[CALL]), response("1", "x")], "bad_call", "responses to the calls x, but calls a"),
        ([answer(None, tool_calls=[CALL, OTHER]), response("1", "a")], "bad_call", "to the calls a, but calls a, b"),
        ([answer(None, tool_calls=[CALL]), response("1", "a"), response("2", "a")], "bad_call", "a, a, but calls a"),
        ([response("1", "a")], "bad_call", "responses to the calls a, but calls none"),
        ([answer(None, tool_calls=[CALL]), response("1"), response("1")], "bad_call", "turn 3 is the response to no"),
        ([answer(None, tool_calls=[{"id": "a"}])], "bad_call", "messages[1]: a call names no function"),
        ([answer(None, function_call={"name": "see", "arguments": "{"})], "bad_call", "messages[1]: the arguments of"),
        ([answer(None, function_call={"name": "see", "arguments": "[1]"})], "bad_call", "are a list, not an object"),
        ([answer(None, function_call={"name": "see", "arguments": []})], "bad_call", "are a list, not an object"),
        ([answer(None, function_call={"name": "see", "arguments": "0"})], "bad_call", "are a number, not an object"),
        (
            [answer(None, function_call={"name": "see", "arguments": '{"a": 1, "a": 2}'})],
            "bad_call",
            "'a' is given twice",
        ),
        ([{"role": "tool_call", "content": "see()"}], "bad_call", "messages[1]: the call: JSON is malformed"),
        ([answer(None, function_call={"name": "hear"}), response("1")], "bad_call", "calls 'hear'; the declared"),
        (
            [answer(None, tool_calls=[CALL, OTHER]), response("<image>", "b"), response("1", "a")],
            "bad_call",
            "responses with picture tags are not in the order of their calls",
        ),
    ],
)
def test_a_call_that_fits_nothing_is_rejected(turns: list[Row], reason: str, detail: str) -> None:
    found = fault(user(), *turns, answer(), tools=TOOLS)
    assert found[0] == reason
    assert detail in found[1]


def test_hostile_rows_take_no_longer_than_their_length() -> None:
    """Each of these took minutes with a search from each of its places."""
    begun = time.process_time()
    assert fault(user(), answer("<tool_call>" * 100_000), tools=TOOLS)[0] == "turn_too_long"
    assert fault(user(), answer("<tool_call>" + " " * 1_000_000 + "x"), tools=TOOLS)[0] == "turn_too_long"
    calls = [CALL | {"id": str(number)} for number in range(20_000)]
    responses = [response("1", str(number)) for number in reversed(range(20_000))]
    assert fault(user(), answer(None, tool_calls=calls), *responses, answer(), tools=TOOLS)[0] == "too_many_turns"
    reason, detail = fault(user(), answer(None, tool_calls=calls), *responses[1:], answer(), tools=TOOLS)
    assert (reason, len(detail) < 300) == ("bad_call", True)
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("tools", ["see", [1], [{"description": "x"}], {"x": 1}])
def test_broken_declarations_are_rejected(tools: Any) -> None:
    assert fault(user(), answer(), tools=tools)[0] == "bad_tools"
    assert fault(user(), answer(), tools=[SEE], functions=[SEE]) == ("bad_tools", "tools are declared under two keys")


def test_the_system_prompt_of_every_maker() -> None:
    expected = [("system", "Be brief."), ("human", "Q"), ("gpt", "A")]
    assert spoken({"role": "developer", "content": [text("Be "), text("brief.")]}, user(), answer()) == expected
    assert spoken(user(), answer(), system="Be brief.") == expected
    assert spoken(user(), answer(), system=[text("Be brief.")]) == expected
    assert spoken({"role": "system", "content": "Be brief."}, user(), answer(), system=None) == expected
    twice = {"role": "system", "content": "Be long."}
    assert fault(twice, user(), answer(), system="Be brief.")[1] == "turn 1 is from system, expected human"
    assert fault(user(), answer(), twice, user(), answer())[0] == "alternation"


@pytest.mark.parametrize("empty", ["", " \n", [text("")], []], ids=repr)
def test_an_empty_system_turn_says_nothing(empty: Any) -> None:
    plain = [("human", "Q"), ("gpt", "A")]
    assert spoken({"role": "system", "content": empty}, user(), answer()) == plain
    assert spoken({"role": "system", "content": empty}, user(), answer(), system="Be brief.")[1:] == plain
    assert spoken(user(), answer(), {"role": "system", "content": empty}) == plain
    if type(empty) is str:
        turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
        assert spoken({"from": "system", "value": empty}, *turns, kind="sharegpt") == plain
    assert fault({"role": "system", "content": "Be brief."}, user(), answer(empty))[0] == "empty_turn"
    assert fault({"role": "system", "content": empty})[0] == "empty_turn"


@pytest.mark.parametrize("key", ["loss", "weight", "train", "training", "loss_weight"])
@pytest.mark.parametrize("value", [0, 0.0, False, "false", "no"])
def test_an_answer_that_is_not_trained_is_history(key: str, value: Any) -> None:
    row = read(user(**{key: value}), answer("B", **{key: value}), user("R"), answer("C"))
    assert [turn.loss for turn in row.conversations if turn.speaker == "gpt"] == [False, True]
    row = read(user(**{key: value}), answer("B", **{key: 1}), user("R"), answer("C", **{key: None}))
    assert not any(isinstance(turn.loss, bool) for turn in row.conversations)


def test_a_call_that_is_not_trained_is_history() -> None:
    row = read(user(), answer("See.", tool_calls=[CALL], weight=0), response("1", "a"), answer(), tools=TOOLS)
    assert [turn.loss for turn in row.conversations if turn.speaker != "human"][:2] == [False, False]
    assert fault(user(), answer(loss=False)) == ("nothing_trained", "loss is false in every answer")


THOUGHT = "<think>\nHm,\nyes.\n</think>\n\nA"


@pytest.mark.parametrize(
    "said",
    [
        answer(reasoning_content="Hm,\nyes."),
        answer(reasoning="\nHm,\nyes.\n"),
        answer([text("A")], thinking="Hm,\nyes."),
        answer([{"type": "thinking", "thinking": "Hm,\nyes.", "signature": "x"}, text("A")]),
        answer([{"type": "reasoning", "value": "Hm,"}, {"type": "reasoning", "value": "yes."}, text("A")]),
        answer(THOUGHT),
        answer("<think>Hm,\nyes.</think>A"),
        answer("<think>\n\nHm,\nyes.\n\n</think>\n\n\nA"),
    ],
)
def test_reasoning_is_trained_as_chat_templates_write_it(said: Row) -> None:
    """Qwen3's: '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n')."""
    assert spoken(user(), said) == [("human", "Q"), ("gpt", THOUGHT)]
    assert spoken(user("Q"), said, user("R"), answer())[1] == ("gpt", THOUGHT)


def test_an_empty_thought_stays_and_none_is_added() -> None:
    assert spoken(user(), answer("<think>\n\n</think>\n\nA"))[1] == ("gpt", "<think>\n\n</think>\n\nA")
    assert spoken(user(), answer(reasoning_content=" ", reasoning=None))[1] == ("gpt", "A")


def test_reasoning_before_a_call() -> None:
    turns = spoken(
        user(), answer(None, tool_calls=[CALL], reasoning_content="Hm."), response("1"), answer(), tools=TOOLS
    )
    assert turns[1:3] == [("gpt", "<think>\nHm.\n</think>"), ("function_call", SAID)]


@pytest.mark.parametrize(
    "said",
    [
        answer("A <think>Hm.</think>"),
        answer("<think>Hm."),
        answer("</think>A"),
        answer("<think>a</think><think>b</think>A"),
        answer(THOUGHT, reasoning_content="Hm."),
        answer("<think>a <|im_end|></think>A"),
        answer("<tool_call>{}</tool_call> A"),
    ],
)
def test_marks_elsewhere_are_rejected(said: Row) -> None:
    assert fault(user(), said, tools=TOOLS)[0] == "special_token"
    assert fault(user(THOUGHT), answer())[0] == "special_token"


def test_an_unknown_part_or_role_names_all_that_are_read() -> None:
    reason, detail = fault(user([text("Q"), {"type": "input_audio", "input_audio": {}}]), answer())
    assert reason == "bad_shape"
    assert detail == f"messages[0].content[1] is of type 'input_audio', none of {', '.join(PARTS)}"
    reason, detail = fault(user(), {"role": "narrator", "content": "x"})
    assert (reason, detail) == ("wrong_role", f"messages[1]: 'narrator' is none of {', '.join(SPEAKERS)}")


@pytest.mark.parametrize(
    ("turn", "detail"),
    [
        (user(None), "messages[0]: its content is null, not a text or a list of parts"),
        (user(3), "messages[0]: its content is a number"),
        (user(["x"]), "messages[0].content[0] is a text, not an object"),
        (user([{"type": 3}]), "messages[0].content[0] is of type a number"),
        (user([{"type": "text"}]), "messages[0].content[0]: a part of type text has not one text"),
        (user([{"type": "image", "path": "a", "url": "b"}]), "messages[0].content[0]: not one picture"),
        (user([{"type": "image", "source": {"type": "file", "file_id": "f"}}]), "content[0]: not one picture"),
        (user([{"type": "image", "base64": "no!"}]), "messages[0].content[0]: "),
        (user([{"type": "thinking", "thinking": "x"}]), "a part of type thinking is another speaker's"),
        (answer(reasoning={"text": "x"}), "messages[0]: its reasoning is not one text"),
        (answer([text("A"), {"type": "thinking", "thinking": "x"}]), "type thinking comes behind a text"),
        ({"content": "x"}, "messages[0]: null is none of"),
    ],
)
def test_what_cannot_be_read_is_rejected_with_its_place(turn: Row, detail: str) -> None:
    assert detail in fault(turn, answer())[1]


def test_keys_that_are_not_read_are_counted_wherever_they_are() -> None:
    make = form_rows("messages", None, {}, None, None)
    picture = {"type": "image_url", "image_url": {"url": "a.jpg", "detail": "low"}}
    row = {"messages": [user([picture, text("Q", cache=1)], name="Bob"), answer(refusal=None)], "n": 1}
    assert isinstance(make("id", 0, json.dumps(row).encode()), list)
    paths = ["messages.content.cache", "messages.content.image_url.detail", "messages.name", "messages.refusal", "n"]
    assert sorted(make.unread.take().keys) == paths


def test_a_key_given_twice_in_a_part_is_found() -> None:
    make = form_rows("messages", None, {}, None, None)
    row = json.dumps({"messages": [user([text("Q")]), answer()]}).encode()
    assert isinstance(make("id", 0, row), list)
    found = make("id", 1, row.replace(b'"text": "Q"', b'"text": "P", "text": "Q"'))
    assert isinstance(found, Reject)
    assert (found.reason, found.detail) == ("duplicate_key", "the key 'text' is given twice")


SHAREGPT = [
    {"from": "human", "value": "Q"},
    {"from": "function_call", "value": f"[{SAID}, {SAID_OTHER}]"},
    {"from": "observation", "value": "1"},
    {"from": "tool_response", "value": "2"},
    {"from": "gpt", "value": "Both.", "loss": True},
]


def test_sharegpt_has_calls_and_declarations_beside() -> None:
    turns = spoken(*SHAREGPT, kind="sharegpt", system="Be brief.", tools=json.dumps([SEE]))
    called = [("function_call", SAID), ("function_call", SAID_OTHER), ("observation", "1"), ("observation", "2")]
    assert turns == [("system", "Be brief."), ("human", "Q"), *called, ("gpt", "Both.")]
    plain = [{"from": "user", "value": "Q"}, {"from": "chatgpt", "value": "A", "reasoning": "Hm,\nyes."}]
    assert spoken(*plain, kind="sharegpt") == [("human", "Q"), ("gpt", THOUGHT)]
    assert fault(*SHAREGPT[:2], kind="sharegpt")[0] == "bad_call"  # it declares no tool


DRAWN = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5))
    | st.builds(lambda name: {"type": "image", "image": name}, st.sampled_from(["a.png", "data:,x", "file:///b", ""])),
    max_size=3,
)


@given(
    turns=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text() | DRAWN}),
        min_size=1,
        max_size=4,
    )
)
def test_plain_turns_say_the_same_in_the_quick_way(turns: list[dict[str, Any]]) -> None:
    """Turns that are texts, or texts and paths of pictures, are decoded as such; all others as JSON."""
    quick = msgspec.json.decode(msgspec.json.encode(turns), type=list[messages.Plain])
    raw = SimpleNamespace(messages=quick, **dict.fromkeys(("system", "tools", "functions"), msgspec.UNSET))
    said, whole = messages.read(raw, None), reading_of("messages", turns, "role", "content", msgspec.UNSET)
    if isinstance(said, Reject) or isinstance(whole, Reject):
        assert said == whole
    else:
        assert (said.turns, said.pictures) == (whole.turns, whole.pictures)


def test_pictures_in_the_turns_of_sharegpt_are_rejected_by_name() -> None:
    turns = [{"from": "human", "value": [{"type": "image", "image": "a.png"}]}, {"from": "gpt", "value": "It."}]
    make = form_rows("sharegpt", None, {}, None, None)
    found = make("id", 0, json.dumps({"conversations": turns}).encode())
    assert isinstance(found, Reject)
    assert found.detail == "pictures are named in the turns; this kind reads them under `image` or `images`"
