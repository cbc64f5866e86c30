"""What models are asked about a row."""

from dataclasses import replace

import msgspec

from made_cases import row
from training_rows import made_row
from vlmflow.evaluation.asking import questions_of
from vlmflow.evaluation.choice import read_case
from vlmflow.rows.chat import Turn, call_text, tools_text

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
