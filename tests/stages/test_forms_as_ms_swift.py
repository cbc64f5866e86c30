"""Chats, rounds and JSON in texts: read as ms-swift's own preprocessors read them, but where these are wrong."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from swift.dataset.preprocessor.core import AutoPreprocessor

from made_rows import form_rows
from vlmflow.rows.chat import Reject, call_text, trained_messages_of

pytestmark = pytest.mark.slow  # until ms-swift changes, the forms' own tests say the same

Row = dict[str, Any]

TEXTS = st.text("abcé猫 .{}\"'", min_size=1, max_size=8).map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers(-9, 9) | st.lists(st.booleans(), max_size=2), max_size=2)
PICTURES = st.sampled_from(["a.jpg", "b/c.png", "http://127.0.0.1/d.jpg"])
TOOL = {"name": "see", "description": "é", "parameters": {"type": "object", "properties": {}}}


@st.composite
def openai(draw: st.DrawFn) -> Row:
    """Draw a chat with calls, whose responses come in any order."""
    turns = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(TEXTS)})
        if count := draw(st.integers(0, 3)):
            drawn = [{"name": "see", "arguments": json.dumps(draw(ARGUMENTS))} for _ in range(count)]
            calls = [{"id": str(number), "type": "function", "function": one} for number, one in enumerate(drawn)]
            turns.append({"role": "assistant", "content": draw(TEXTS | st.none()), "tool_calls": calls})
            answered = draw(st.permutations(range(count)))
            turns += [{"role": "tool", "tool_call_id": str(of), "content": draw(TEXTS)} for of in answered]
        turns.append({"role": "assistant", "content": draw(TEXTS), "loss": draw(st.just(True) | st.booleans())})
    turns[-1]["loss"] = True
    return {"messages": turns, "tools": [{"type": "function", "function": TOOL}]}


@st.composite
def anthropic(draw: st.DrawFn) -> Row:
    """Draw a chat with pictures in questions and responses, and calls."""

    def shown() -> list[Row]:
        source = {"type": "url", "url": draw(PICTURES)}
        return [{"type": "image", "source": source}, {"type": "text", "text": draw(TEXTS)}]

    turns: list[Row] = []
    for _ in range(draw(st.integers(1, 2))):
        turns.append({"role": "user", "content": shown()})
        said: list[Row] = [{"type": "text", "text": draw(TEXTS)}] if draw(st.booleans()) else []
        ids = [f"t{number}" for number in range(draw(st.integers(1, 3)))]
        said += [{"type": "tool_use", "id": one, "name": "see", "input": draw(ARGUMENTS)} for one in ids]
        results = [{"type": "tool_result", "tool_use_id": one} for one in draw(st.permutations(ids))]
        contents = [shown() if draw(st.booleans()) else draw(TEXTS) for _ in ids]
        turns += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [one | {"content": text} for one, text in zip(results, contents, strict=True)]},
            {"role": "assistant", "content": [{"type": "text", "text": draw(TEXTS)}]},
        ]
    system = {"system": draw(TEXTS)} if draw(st.booleans()) else {}
    return {"messages": turns, "tools": [{"name": "see", "input_schema": TOOL["parameters"]}], **system}


@st.composite
def sharegpt(draw: st.DrawFn) -> Row:
    turns = [{"from": "human", "value": f"<image>{draw(TEXTS)}"}]
    for _ in range(draw(st.integers(0, 2))):
        turns += [
            {"from": "function_call", "value": call_text("see", draw(ARGUMENTS))},
            {"from": "observation", "value": draw(TEXTS)},
        ]
    turns.append({"from": "gpt", "value": draw(TEXTS)})
    return {"conversations": turns, "images": ["a.jpg"], "tools": json.dumps([TOOL]), "system": draw(TEXTS)}


def as_compared(message: Row) -> Row:
    """Return a message with a call's content as a text, and `loss` only where it is false."""
    content = message["content"] if isinstance(message["content"], str) else call_text(**message["content"])
    role = {"tool": "tool_response"}.get(message["role"], message["role"])
    untrained = message.get("loss") is False and role in ("assistant", "tool_call")
    return {"role": role, "content": content} | ({"loss": False} if untrained else {})


@pytest.mark.parametrize(
    ("kind", "forms"), [("messages", openai()), ("messages", anthropic()), ("sharegpt", sharegpt())]
)
def test_turns_pictures_and_what_is_trained_are_those_of_ms_swift(kind: str, forms: st.SearchStrategy[Row]) -> None:
    from swift.dataset.preprocessor import MessagesPreprocessor

    compared = 0

    @given(row=forms)
    @settings(max_examples=40)
    def check(row: Row) -> None:
        nonlocal compared
        made = form_rows(kind, None, {}, None, None)("id", 0, json.dumps(row).encode())
        assert isinstance(made, list), made
        given_row = copy.deepcopy(row)
        given_row["messages"] = given_row.pop("conversations", None) or given_row["messages"]
        found = MessagesPreprocessor().preprocess(given_row)
        theirs = [as_compared(message) for message in found["messages"]]
        assert [as_compared(message) for message in trained_messages_of(made[0].conversations)] == theirs
        assert made[0].images == list(found.get("images") or [])
        compared += 1

    check()
    assert compared >= 40


def test_where_ms_swift_is_wrong_it_still_is() -> None:
    """OpenAI's weight of 0 is trained there, and reasoning is lost. A newer ms-swift that reads them shows here."""
    from swift.dataset.preprocessor import MessagesPreprocessor

    said = {"role": "assistant", "content": "b", "weight": 0, "reasoning_content": "Hm."}
    turns = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "c"}, said | {"weight": 1}]
    row = MessagesPreprocessor().preprocess({"messages": copy.deepcopy(turns)})
    MessagesPreprocessor()._check_messages(row)
    assert row["messages"][1] == {"role": "assistant", "content": "b"}
    (made,) = form_rows("messages", None, {}, None, None)("id", 0, json.dumps({"messages": turns}).encode())
    answer = made.conversations[1]
    assert (answer.value, answer.loss) == ("<think>\nHm.\n</think>\n\nb", False)


ROWS = 200
"""The rows of each form that are compared."""

WORDS = ["What", "is", "a disc?", "Ein Kreis – rot", "赤い", "{x}", "[1]", "<b>", "\n", "\t2.", "It's", '"q"']


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 6))).strip() or "x"


def history(draw: random.Random) -> list[list[str]]:
    return [[text(draw), text(draw)] for _ in range(draw.randint(0, 3))]


def beside(draw: random.Random) -> dict[str, Any]:
    return {"system": draw.choice([None, text(draw)])}


def alpaca(draw: random.Random) -> dict[str, Any]:
    asked = {"instruction": text(draw), "input": draw.choice(["", text(draw)]), "output": text(draw)}
    return asked | beside(draw) | {"history": history(draw)}


def query(draw: random.Random) -> dict[str, Any]:
    return {"query": text(draw), "response": text(draw), "history": history(draw)} | beside(draw)


def pairs(draw: random.Random) -> dict[str, Any]:
    talk = [{"human": text(draw), "assistant": text(draw)} for _ in range(draw.randint(1, 3))]
    return {"conversation": talk} | beside(draw)


def texts_of_json(draw: random.Random) -> dict[str, Any]:
    roles = ["user", "assistant"] * draw.randint(1, 3)
    return {"messages": json.dumps([{"role": role, "content": text(draw)} for role in roles])}


def asked(draw: random.Random) -> dict[str, Any]:
    return {"question": text(draw), "answer": text(draw)}


def prompted(draw: random.Random) -> dict[str, Any]:
    return {"prompt": text(draw), "completion": text(draw)}


def of_swift(rows: list[dict[str, Any]]) -> list[Any]:
    """Return the messages that ms-swift makes of the rows."""
    read = AutoPreprocessor()(Dataset.from_list(rows), load_from_cache_file=False, enable_auto_mapping=True)
    return [[{"role": one["role"], "content": one["content"]} for one in row] for row in read["messages"]]


def own(kind: str, row: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    made = form_rows(kind, None, {}, None, None, **options)("id", 0, json.dumps(row).encode())
    assert not isinstance(made, Reject), made
    return trained_messages_of(made[0].conversations)


@pytest.mark.parametrize(
    ("kind", "maker"),
    [
        ("alpaca", alpaca),
        ("query_response", query),
        ("pairs", pairs),
        ("messages", texts_of_json),
        ("vqa", asked),
        ("prompt_completion", prompted),
    ],
)
def test_both_read_the_same(kind: str, maker: Callable[[random.Random], dict[str, Any]]) -> None:
    draw = random.Random(4)
    rows = [maker(draw) for _ in range(ROWS)]
    assert [own(kind, row) for row in rows] == of_swift(rows)


def test_what_swift_reads_otherwise() -> None:
    """It trains no answer of two columns, drops rounds about pictures, and trains the bad answers of KTO rows."""
    two = {"question": "What?", "answer": "It.", "answers": ["It.", "A disc."]}
    assert of_swift([two]) == [[{"role": "user", "content": "What?"}]]
    assert own("vqa", two, ignore_keys=["answers"])[1]["content"] == "It."
    rounds = {"texts": [{"user": "What?", "assistant": "It."}]}
    assert of_swift([rounds]) == []
    assert len(own("texts", rounds)) == 2
    bad = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "No."}], "label": False}
    assert of_swift([bad])[0][1]["content"] == "No."
