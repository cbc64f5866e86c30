"""Rows as messages for a server."""

import base64
import importlib
import json
from pathlib import Path

import pytest
from PIL import Image

from chat_server import canned_server, chat_server
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import part_of
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.rows.chat import Turn, call_text, messages_of, tools_text
from vlmflow.serving.client import Client, data_uri, picture_part
from vlmflow.serving.server import free_port


@pytest.mark.parametrize(("name", "kind"), [("a.png", "png"), ("a.jpg", "jpeg")])
def test_a_picture_is_sent_as_its_stored_bytes(tmp_path: Path, name: str, kind: str) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / name)
    begin, _, content = data_uri(tmp_path / name).partition(",")
    assert begin == f"data:image/{kind};base64"
    assert base64.b64decode(content) == (tmp_path / name).read_bytes()


def test_the_picture_is_where_its_tag_is(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    turns = [
        Turn("system", "Be short."),
        Turn("human", "<image>\nHow many?"),
        Turn("gpt", "Two."),
        Turn("human", "No."),
    ]
    messages = messages_of(turns, [picture_part(tmp_path / "a.png")])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    picture, text = messages[1]["content"]
    assert (picture["type"], text) == ("image_url", {"type": "text", "text": "\nHow many?"})
    assert [messages[number]["content"] for number in (0, 2, 3)] == ["Be short.", "Two.", "No."]


def test_pictures_without_a_tag_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"0 picture tags \(<image>\) but 1 picture"):
        messages_of([Turn("human", "How many?")], [{"type": "image"}])
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(VlmflowError, match=r"a\.png: cannot be read as a picture"):
        data_uri(tmp_path / "a.png")


def test_a_server_that_is_not_there_may_come_back() -> None:
    with Client(f"http://127.0.0.1:{free_port()}/v1", "mine") as client, pytest.raises(PassingError, match="no answer"):
        client.answer([{"role": "user", "content": "?"}], 5)


def test_a_server_that_answers_too_much_is_named_and_not_asked_again() -> None:
    with (
        canned_server(b" " * 8_000_001) as url,
        Client(url, "mine") as client,
        pytest.raises(VlmflowError, match=r"its answer has more than 8,000,000 bytes") as caught,
    ):
        client.answer([{"role": "user", "content": "?"}], 5)
    assert f"{url}/chat/completions: " in caught.value.cause
    assert not isinstance(caught.value, PassingError)


@pytest.mark.parametrize(
    "reply",
    [
        '"text"',
        "<html>it works</html>",
        "[]",
        "{}",
        '{"choices": []}',
        '{"choices": null}',
        '{"choices": [null]}',
        '{"choices": [{"message": null}]}',
        '{"choices": [{"message": {"content": ["a", "list"]}, "finish_reason": "stop"}]}',
    ],
)
def test_a_reply_that_is_no_completion_says_so(reply: str) -> None:
    with (
        canned_server(reply.encode()) as url,
        Client(url, "mine") as client,
        pytest.raises(VlmflowError, match="its reply is not a chat completion") as caught,
    ):
        client.answer([{"role": "user", "content": "?"}], 5)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("charset", ["bz2", "idna", "punycode", "hex", "no-such"])
def test_no_charset_of_a_reply_is_believed(charset: str) -> None:
    with chat_server(lambda model, messages: 400) as server, Client(server.url, "mine") as client:
        server.form = f"text/plain; charset={charset}"
        with pytest.raises(VlmflowError, match=r"HTTP 400: .*no, "):
            client.answer([{"role": "user", "content": "?"}], 5)


def test_tools_and_calls_are_sent_and_read_in_openai_s_form() -> None:
    tools = tools_text([{"type": "function", "function": {"name": "see"}}])
    turns = [
        *[Turn("human", "?"), Turn("gpt", "I look."), Turn("function_call", call_text("see", {"a": "é"}))],
        *[Turn("function_call", call_text("see", {})), Turn("observation", "1"), Turn("observation", "2")],
        *[Turn("function_call", call_text("see", {"b": 1})), Turn("observation", "3")],
    ]
    calls = [{"function": {"name": "see", "arguments": '{"c":[1]}'}}, {"function": {"name": "see", "arguments": "{"}}]
    message = {"content": "Again.", "tool_calls": calls}
    reply = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
    with chat_server(lambda model, messages: reply) as server, Client(server.url, "mine") as client:
        said = client.answer(messages_of(turns), 5, tools)
        client.answer(messages_of(turns[:1]), 5)
    assert said.text == (
        'Again.\n<tool_call>\n{"name": "see", "arguments": {"c": [1]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "see", "arguments": {}\n</tool_call>'
    )
    body, plain = server.requests
    assert body["tools"] == json.loads(tools)
    assert "tools" not in plain
    text, *responses = body["messages"][1:]
    assert text["content"] == "I look."
    assert [call["function"]["arguments"] for call in text["tool_calls"]] == ['{"a": "é"}', "{}"]
    assert [call["id"] for call in text["tool_calls"]] == [each["tool_call_id"] for each in responses[:2]]
    assert responses[2]["tool_calls"][0]["id"] == responses[3]["tool_call_id"] != responses[0]["tool_call_id"]


def test_half_a_surrogate_pair_is_replaced() -> None:
    """No file in UTF-8 can hold one."""
    reply = rb'{"choices": [{"message": {"content": "a \ud800 b \ud83d\ude00"}, "finish_reason": "stop"}]}'
    with canned_server(reply) as url, Client(url, "mine") as client:
        assert client.answer([], 5).text == "a ? b \U0001f600"


def test_a_key_is_not_repeated_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_ANSWER_KEY", "very-secret")
    reply = b'{"choices": [{"message": {"content": ["no: very-secret"]}, "finish_reason": "stop"}]}'
    with (
        canned_server(reply) as url,
        Client(url, "mine", "very-secret") as client,
        pytest.raises(VlmflowError, match=r"no: \*\*\*"),
    ):
        client.answer([{"role": "user", "content": "?"}], 5)


def test_a_key_that_no_header_can_carry_reaches_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = importlib.import_module("stages.answer")
    settings = part_of(RunSettings, {"answer": {"url": "http://h/v1", "url_base": "b", "url_tuned": "t"}})
    monkeypatch.setenv("VLMFLOW_ANSWER_KEY", "very-secret\n")
    assert answer._model("the base", "digest", Path(), "b", settings, 1).key == "very-secret"
    monkeypatch.setenv("VLMFLOW_ANSWER_KEY", "very\nsecret")
    with pytest.raises(VlmflowError, match="VLMFLOW_ANSWER_KEY: its value"):
        answer._model("the base", "digest", Path(), "b", settings, 1)
