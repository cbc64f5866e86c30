"""Every answer is kept as soon as it is there, and one that fails stops the rest and names its row."""

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from chat_server import ChatServer, chat_server, last_text
from made_cases import row
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.evaluation import asking
from vlmflow.evaluation.asking import ModelAtUrl, Question, answers_to, ask_own, questions_of
from vlmflow.evaluation.choice import read_case
from vlmflow.serving.client import Client
from vlmflow.serving.server import environment, free_port, running

MORTAL = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("out of memory", flush=True)
        os._exit(7)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that dies of the first question."""


def echo(model: str, messages: list[dict[str, Any]]) -> str:
    return f"{model}: {last_text(messages)}"


def questions(count: int = 3) -> list[Question]:
    return [question for n in range(count) for question in questions_of(read_case(row(n, f"c{n}"), {}), 3, True)]


def at(server: ChatServer, name: str = "base", digest: str = "0" * 64) -> ModelAtUrl:
    return ModelAtUrl("the base", digest, server.url, name, key="sesame")


def test_answers_are_asked_for_once(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        asked = questions()
        answers, new = answers_to([*asked, *asked[:2]], at(server), tmp_path, 9, tmp_path)
        assert (new, len(server.requests)) == (6, 6)
        assert {question.key: f"base: {question.turns[-1].value}" for question in asked} == {
            key: answer.text for key, answer in answers.items()
        }
        assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0, 9)}
        assert set(server.keys) == {"Bearer sesame"}
        again, none = answers_to(asked, at(server), tmp_path, 9, tmp_path)
        assert (again, none, len(server.requests)) == (answers, 0, 6)
        more, new = answers_to(questions(4), at(server), tmp_path, 9, tmp_path)
        assert (new, len(more)) == (2, 8)
    kept, none = answers_to(asked, at(server), tmp_path, 9, tmp_path)
    assert (kept, none) == (answers, 0), "no server is needed for answers that are kept"
    assert b"sesame" not in b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_each_model_and_limit_has_its_own_answers(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        answers_to(questions(), at(server), tmp_path, 9, tmp_path)
        for model, limit in ((at(server, "tuned"), 9), (at(server, digest="1" * 64), 9), (at(server), 8)):
            assert answers_to(questions(), model, tmp_path, limit, tmp_path)[1] == 6


def test_answers_to_another_way_of_asking_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server(echo) as server:
        answers_to(questions(), at(server), tmp_path, 9, tmp_path)
        monkeypatch.setattr(asking, "ASKING", asking.ASKING + 1)
        assert answers_to(questions(), at(server), tmp_path, 9, tmp_path)[1] == 6


def test_a_line_that_a_kill_cut_is_asked_again(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        answers, _ = answers_to(questions(), at(server), tmp_path, 9, tmp_path)
        (file,) = tmp_path.rglob("*.jsonl")
        file.write_bytes(file.read_bytes()[:-5])
        assert answers_to(questions(), at(server), tmp_path, 9, tmp_path) == (answers, 1)


@pytest.mark.parametrize(("status", "kind"), [(400, VlmflowError), (503, PassingError)])
def test_an_answer_that_fails_names_its_row_and_keeps_those_before(
    tmp_path: Path, status: int, kind: type[VlmflowError]
) -> None:
    asked = questions()
    good = [3]

    def fails(model: str, messages: list[dict[str, Any]]) -> str | int:
        good[0] -= 1
        return "yes" if good[0] >= 0 else status

    with chat_server(fails) as server:
        with pytest.raises(VlmflowError) as caught:
            answers_to(asked, at(server), tmp_path, 9, tmp_path)
        assert type(caught.value) is kind
        assert f"row {asked[3].row}, after 1 rounds: " in caught.value.cause
        assert f"HTTP {status}" in caught.value.cause
        assert "\x1b" not in str(caught.value)
        good[0] = 9
        assert answers_to(asked, at(server), tmp_path, 9, tmp_path)[1] == 3


def test_pictures_are_sent_as_they_are_stored(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "1.png")
    seeing = row(1, "c", images=["1.png"])
    seeing.conversations[0].value = "<image>\nWhat is it?"
    asked = questions_of(read_case(seeing, {"1.png": "d"}), 0, True)
    with chat_server(echo) as server:
        answers_to(asked, at(server), tmp_path, 9, tmp_path / "store")
        picture, text = server.requests[0]["messages"][0]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
        assert text == {"type": "text", "text": "\nWhat is it?"}
        (tmp_path / "1.png").write_bytes(b"no picture")
        with pytest.raises(VlmflowError, match=rf"row {seeing.id}, after 0 rounds: .*1.png: cannot be read"):
            answers_to(asked, at(server), tmp_path, 8, tmp_path / "store")


def test_half_a_surrogate_pair_is_kept_as_a_question_mark(tmp_path: Path) -> None:
    with chat_server(lambda model, messages: "a\ud800b") as server:
        answers, _ = answers_to(questions(1), at(server), tmp_path, 9, tmp_path)
    assert {answer.text for answer in answers.values()} == {"a?b"}


def test_the_end_of_our_own_server_is_explained_by_its_output(tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-c", MORTAL, str(port)]
    with (
        running(words, "m", port, tmp_path, tmp_path / "log", environment(tmp_path)) as server,
        Client(server.url, server.model) as client,
        pytest.raises(PassingError, match="the server of the base ended with code 7") as caught,
    ):
        ask_own("the base", server, client, [{"role": "user", "content": "?"}], 9)
    assert caught.value.next_step.endswith("out of memory")
