"""What models are asked about a row, how answers are kept, and the figures that models of known behaviour get."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from chat_server import ChatServer, chat_server, last_text
from made_rows import made_row
from simulated_evaluations import row
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.evaluation import asking
from vlmflow.evaluation.answers import Asking, ask_both, figures, sentence_of
from vlmflow.evaluation.asking import ModelAtUrl, Question, answers_to, ask_own, questions_of
from vlmflow.evaluation.choice import Case, read_case
from vlmflow.evaluation.report import AfterRounds, AnsweredRow, AskedModel, Interval
from vlmflow.rows.chat import Turn, call_text, tools_text
from vlmflow.serving.client import Client
from vlmflow.serving.server import environment, free_port, running

TOOLS, CALL = tools_text([{"type": "function", "function": {"name": "see"}}]), call_text("see", {"what": "é"})

LONG = made_row(
    "r",
    [
        Turn("system", "Be brief."),
        Turn("human", "<image>\nWhat is it?"),
        Turn("gpt", "Answer: a cat"),
        Turn("human", "Look again."),
        Turn("gpt", "Answer: a hat"),
        Turn("human", "Closer."),
        Turn("gpt", "Thought: I see.\nAnswer: a bat"),
    ],
    images=["1.png"],
)


def test_each_turn_is_asked_after_the_rows_own_turns() -> None:
    asked = questions_of(read_case(LONG, {"1.png": "d"}), 9, feedback=True)
    assert [question.rounds for question in asked] == [0, 1, 2]
    assert [list(question.turns) for question in asked] == [LONG.conversations[:count] for count in (2, 4, 6)]
    assert [question.reference for question in asked] == [LONG.conversations[place].value for place in (2, 4, 6)]
    assert {question.gold for question in asked} == {"a bat"}, "the last answer is the right one for all turns"
    assert all(question.images == ["1.png"] for question in asked)


def test_the_raw_rows_own_answer_is_the_right_one() -> None:
    case = read_case(LONG, {"1.png": "d"})
    assert {question.gold for question in questions_of(case, 9, feedback=True, gold="bat")} == {"bat"}
    without = questions_of(case, 9, feedback=False, gold="bat")
    assert [question.gold for question in without] == ["a cat", "a hat", "a bat"], "each turn has another question"


def test_no_more_rounds_than_wanted() -> None:
    case = read_case(LONG, {"1.png": "d"})
    assert [len(questions_of(case, rounds, feedback=True)) for rounds in (0, 1, 2, 3)] == [1, 2, 3, 3]


def test_without_feedback_each_turn_has_its_own_right_answer() -> None:
    asked = questions_of(read_case(LONG, {"1.png": "d"}), 9, feedback=False)
    assert [question.gold for question in asked] == ["a cat", "a hat", "a bat"]


def test_another_picture_is_another_question() -> None:
    """Its name does not matter, its bytes do."""
    renamed = msgspec.structs.replace(LONG, images=["2.png"])
    keys = [
        questions_of(read_case(each, {"1.png": "d", "2.png": digest}), 9, True)
        for each, digest in ((LONG, "d"), (renamed, "d"), (renamed, "e"))
    ]
    one, same, other = ([question.key for question in asked] for asked in keys)
    assert one == same
    assert len({*one, *other}) == 6


def test_an_answer_that_is_empty_after_its_mark_is_the_whole_text() -> None:
    empty = msgspec.structs.replace(LONG, conversations=[*LONG.conversations[:-1], Turn("gpt", "None. Answer:")])
    assert questions_of(read_case(empty, {"1.png": "d"}), 0, feedback=True)[0].gold == "None. Answer:"


def test_calls_are_answers_and_responses_are_questions() -> None:
    turns = [
        *LONG.conversations[:2],
        *[Turn("gpt", "I look."), Turn("function_call", CALL), Turn("function_call", CALL)],
        *[Turn("observation", "<image>"), Turn("observation", "2"), Turn("gpt", "Answer: a cat")],
        *[Turn("human", "Closer: <image>"), Turn("gpt", "Answer: a bat")],
    ]
    called = made_row("r", turns, images=["1.png", "2.png", "3.png"])
    called = msgspec.structs.replace(called, tools=TOOLS)
    case = read_case(called, {f"{n}.png": str(n) for n in (1, 2, 3)})
    asked = questions_of(case, 9, feedback=False)
    assert [list(each.turns) for each in asked] == [turns[:2], turns[:7], turns[:9]]
    assert [each.images for each in asked] == [called.images[:count] for count in (1, 2, 3)]
    said = f"<tool_call>\n{CALL}\n</tool_call>"
    assert [each.reference for each in asked] == [f"I look.\n{said}\n{said}", "Answer: a cat", "Answer: a bat"]
    assert {each.tools for each in asked} == {TOOLS}
    bare = replace(case, row=msgspec.structs.replace(called, tools=""))
    assert not {each.key for each in asked} & {each.key for each in questions_of(bare, 9, feedback=False)}


def test_a_row_of_one_turn() -> None:
    alone = msgspec.structs.replace(row(1, "c"), conversations=row(1, "c").conversations[:2])
    assert [question.gold for question in questions_of(read_case(alone, {}), 3, feedback=True)] == ["none"]


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


COUNT = 120

Speaks = Callable[[str], str]
"""Takes the last human turn."""


def copies(said: str) -> str:
    """Answer with the code in the feedback."""
    return f"Thought: so it is.\nAnswer: {said.rpartition('It is ')[2]}"


def never(said: str) -> str:
    return "Answer: none"


def always(said: str) -> str:
    return "Answer: code"


def gives_in(said: str) -> str:
    """Be right at first, and wrong after feedback."""
    return "Answer: code" if said.startswith("What") else "Answer: none"


def cases(code: str = "code", feedback: str | None = None) -> list[Case]:
    made = [row(number, code) for number in range(COUNT)]
    if feedback is not None:
        for each in made:
            each.conversations[2].value = feedback
    return [read_case(each, {}) for each in made]


def ask(
    folder: Path, base: Speaks, tuned: Speaks, some: list[Case], feedback: bool = True, rounds: int = 3
) -> tuple[dict[str, Any], list[AnsweredRow], AskedModel, AskedModel]:
    speak = {"base": base, "tuned": tuned}

    def behave(model: str, messages: list[dict[str, Any]]) -> str:
        return speak[model](last_text(messages))

    how = Asking(rounds=rounds, max_tokens=9, feedback=feedback, gold={}, pictures=folder, store=folder, seed=1)
    with chat_server(behave) as server:
        models = [ModelAtUrl(name, name, server.url, name) for name in ("base", "tuned")]
        rows, of_base, of_tuned = ask_both(some, models[0], models[1], how)
    return dict(figures(rows, how)), rows, of_base, of_tuned


def changes(after: AfterRounds) -> list[tuple[int, int, float | None]]:
    """Give first answers, changes and their rate: the base's corrected and spoiled ones, and the tuned model's."""
    models = (after.base, after.tuned)
    found = [change for model in models for change in (model.corrected, model.spoiled) if change]
    return [(change.first, change.changed, change.rate.mean if change.rate else None) for change in found]


def test_who_copies_from_feedback_corrects_all_and_spoils_nothing(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases())
    first, second = found["all"]
    assert (first.rounds, first.rows, first.groups, second.rounds) == (0, COUNT, COUNT, 1)
    assert (first.base.right.mean, first.tuned.right.mean) == (0, 0)
    assert first.base.corrected is None, "no round of feedback, no transition"
    assert (second.base.right.mean, second.tuned.right.mean) == (0, 1)
    assert second.right.mean == 1
    assert second.right.above_zero
    assert changes(second) == [(COUNT, 0, 0), (0, 0, None), (COUNT, COUNT, 1), (0, 0, None)]
    assert found["holds_gold"] == 1.0
    assert found["with_gold"] == found["all"]
    assert found["without_gold"] is None
    assert [turn.tuned.answer for turn in rows[0].turns] == ["What is the code of door 0?", "code."]
    assert [turn.gold for turn in rows[0].turns] == ["code", "code"]
    assert "after 1 round 0.0% of the base's and 100.0% of the tuned model's answers are right" in sentence_of(
        found["all"], feedback=True
    )


def test_who_gives_in_spoils_what_was_right(tmp_path: Path) -> None:
    found, _, _, _ = ask(tmp_path, always, gives_in, cases(feedback="Look again."))
    _, second = found["all"]
    assert changes(second) == [(0, 0, None), (COUNT, 0, 0), (0, 0, None), (COUNT, COUNT, 1)]
    assert second.right.mean == -1
    assert found["holds_gold"] == 0.0
    assert found["without_gold"] == found["all"]
    assert found["with_gold"] is None


def test_rows_whose_feedback_holds_the_answer_have_figures_of_their_own(tmp_path: Path) -> None:
    some = cases()[: COUNT // 4] + cases(feedback="Look again.")[COUNT // 4 :]
    found, _, _, _ = ask(tmp_path, never, copies, some)
    assert found["holds_gold"] == 0.25
    of = {name: found[name][1] for name in ("all", "with_gold", "without_gold")}
    assert {name: (each.rows, each.tuned.right.mean) for name, each in of.items()} == {
        "all": (COUNT, 0.25),
        "with_gold": (COUNT // 4, 1.0),
        "without_gold": (COUNT * 3 // 4, 0.0),
    }


def test_figures_by_source_and_rule(tmp_path: Path) -> None:
    some = [
        read_case(row(number, "6" if number % 2 else "B", source="odd" if number % 2 else "even"), {})
        for number in range(8)
    ]
    found, _, _, _ = ask(tmp_path, never, copies, some)
    assert {name: after[1].rows for name, after in found["sources"].items()} == {"even": 4, "odd": 4}
    assert {name: after[1].rows for name, after in found["rules"].items()} == {"number": 4, "option": 4}
    assert found["rules"]["option"][1].tuned.right == Interval(1, None, None), "too few rows for an interval"


def test_rows_without_so_many_rounds_are_not_counted_after_them(tmp_path: Path) -> None:
    longer = row(99, "code")
    longer.conversations[4:] = [Turn("human", "Well done. It is code"), Turn("gpt", "Answer: code")]
    found, _, _, _ = ask(tmp_path, never, copies, [*cases()[:3], read_case(longer, {})])
    assert [after.rows for after in found["all"]] == [4, 4, 1]


def test_without_feedback_there_are_no_transitions(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases(), feedback=False)
    first, second = found["all"]
    assert (first.base.right.mean, first.tuned.right.mean) == (1, 0), "the row's own first answer is the right one"
    assert second.base.corrected is None
    assert (found["holds_gold"], found["without_gold"], found["with_gold"]) == (None, None, None)
    assert {each.holds_gold for each in rows} == {None}


def test_feedback_that_no_model_saw_gives_nothing_away(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases(), rounds=0)
    assert [after.rounds for after in found["all"]] == [0]
    assert (found["holds_gold"], found["without_gold"], found["with_gold"]) == (None, None, None)
    assert {each.holds_gold for each in rows} == {None}


def test_overlap_is_with_the_rows_own_turns(tmp_path: Path) -> None:
    some = [
        made_row(f"r{n}", [Turn("human", f"What {n}?"), Turn("gpt", f"the answer to {n} is {n}")]) for n in range(5)
    ]

    def repeats(said: str) -> str:
        number = said.removeprefix("What ").removesuffix("?")
        return f"the answer to {number} is {number}"

    _, _, base, tuned = ask(tmp_path, never, repeats, [read_case(each, {}) for each in some])
    assert (base.overlap.answers, tuned.overlap.bleu) == (5, [1.0] * 4)
    assert tuned.overlap.cider == pytest.approx(10)
    assert base.overlap.bleu[3] < 0.01
