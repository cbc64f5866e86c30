"""The texts of rows: trained as they are written, or changed by a rule that is counted, or rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import fire_row, fire_rows, form_rows, split_files, split_rules, training_form
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import RowLimits
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.raw_text import RULES, clean, cleaned, untagged
from vlmflow.rows.sharegpt import first_fault, in_words
from vlmflow.rows.validate import validate

CODE = "    y = x + 1\n    return y"


@pytest.mark.parametrize(
    ("raw", "text", "rules"),
    [
        (CODE, CODE, set()),
        (
            "\u3000\u3000从前有一座山。\n\u3000\u3000山上有座庙。",
            "\u3000\u3000从前有一座山。\n\u3000\u3000山上有座庙。",
            set(),
        ),
        (" It.", " It.", set()),
        ("\t- a\n\t- b", "\t- a\n\t- b", set()),
        (f"\n \n{CODE}\n", CODE, {"outer_space"}),
        ("It. \n", "It.", {"outer_space"}),
        ("a\r\nb\rc", "a\nb\nc", {"line_ends"}),
        ("  a\r\n  b\r\n", "  a\n  b", {"line_ends", "outer_space"}),
        ("\r\n a", " a", {"line_ends", "outer_space"}),
        (" \n\r\n ", "", {"line_ends", "outer_space"}),
        ("", "", set()),
    ],
)
def test_a_text_keeps_its_indent(raw: str, text: str, rules: set[str]) -> None:
    assert clean(raw) == text
    assert cleaned(["a", raw]) == (["a", text], rules)
    assert clean(text) == text


@pytest.mark.parametrize(
    ("question", "text", "rules"),
    [
        ("What?", "What?", set()),
        ("<image>\nWhat?", "What?", set()),
        (f"<image>\n{CODE}", CODE, set()),
        (f"<image>\n\n{CODE}", CODE, {"tag_place"}),
        ("<image>What?", "What?", {"tag_place"}),
        ("<image> \t What?", "What?", {"tag_place"}),
        ("  <image>\n What?", " What?", {"tag_place"}),
        ("What?\n<image>", "What?", {"tag_place"}),
        ("Is <image> red?", "Is  red?", {"tag_place"}),
        ("  a <image> b", "  a  b", {"tag_place"}),
        ("<image>\n<image>\nWhat?", "What?", {"further_tags"}),
        ("What <image> is it?\n<image>", "What  is it?", {"further_tags"}),
        ("<image>", "", {"tag_place"}),
    ],
)
def test_a_question_loses_its_tags_and_no_word(question: str, text: str, rules: set[str]) -> None:
    assert untagged(question) == (text, rules)


def converted(kind: str, row: dict[str, Any], modality: str = "text") -> tuple[ConvertedRow | Reject, dict[str, int]]:
    """Return the training row of a raw one, checked, or why there is none; and the counts of changed texts."""
    make = form_rows(kind, modality, {}, "Say it.", None)
    made = make("id", 0, json.dumps(row).encode())
    found = made if isinstance(made, Reject) else first_fault(made[0], RowLimits()) or made[0]
    return found, make.unread.take().counts(()).changed_texts


def test_every_rule_counts_rows_not_texts() -> None:
    asked = [("user", "Is <image> red?\r\n"), ("assistant", "No.\n"), ("user", "a\rb"), ("assistant", "  c")]
    row = {"image": "a.jpg", "messages": [{"role": who, "content": text} for who, text in asked]}
    made, counts = converted("messages", row, "image")
    assert [turn.value for turn in made.conversations] == ["Is <image> red?", "No.", "a\nb", "  c"]
    assert counts == {"line_ends": 1, "outer_space": 1}
    talk = [{"from": "human", "value": asked[0][1]}, {"from": "gpt", "value": "No."}]
    volcano = {"image": "a.jpg", "conversations": talk}
    made, counts = converted("volcano", volcano, "image")
    assert made.conversations[0].value == "<image>\nIs  red?"
    assert counts == {"line_ends": 1, "outer_space": 1, "tag_place": 1}
    assert converted("messages", {"messages": row["messages"][2:]})[1] == {"line_ends": 1}
    assert converted("prompt_completion", {"prompt": " q", "completion": CODE})[1] == {}


SPACES = [" ", "\n", "\t", "\r\n", "\r", "\u3000", "\xa0", "\u2028", "\x85", "a", "B c", "<image>", "<image>\n"]
ODD = [
    *("\ufeff", "\x1f", "é", "e\u0301", '"', "\\", "\\n", "Answer: ", "Score: 5.", "<|im_end|>", "🙂"),
    *("<video>", "{{ROUND0}}", "{{QUERY}}", "{{SYSTEM}}", "{{", "}}", "<img>", "</img>", "<"),
]
TEXTS = st.text(max_size=8)
for pieces in (SPACES, SPACES + ODD):
    TEXTS |= st.lists(st.sampled_from(pieces), min_size=1, max_size=6).map("".join)


def squeezed(text: str) -> str:
    """Return what no rule may change: the characters that are no white space."""
    return "".join(text.replace("<image>", "").split())


def compare(raw: list[str], made: list[str], counts: dict[str, int]) -> None:
    """Compare the raw texts of a row with those that are trained; both without the tags."""
    assert set(counts) <= RULES.keys()
    assert list(map(squeezed, made)) == list(map(squeezed, raw))
    if not counts:
        assert made == [raw[0].removeprefix("<image>\n"), *raw[1:]]
    elif counts.keys() <= {"line_ends"}:
        first, *others = [text.replace("\r\n", "\n").replace("\r", "\n") for text in raw]
        assert made == [first.removeprefix("<image>\n"), *others]
        assert [first, *others] != raw
    elif counts.keys() <= {"outer_space"}:
        assert all(text in before for text, before in zip(made, raw, strict=True))
        assert made != raw


@given(
    asked=TEXTS,
    answer=TEXTS,
    picture=st.booleans(),
    kind=st.sampled_from(["messages", "sharegpt", "volcano", "prompt_completion"]),
)
def test_a_text_is_trained_as_written_or_counted(asked: str, answer: str, picture: bool, kind: str) -> None:
    row: dict[str, Any] = {"image": "a.jpg"} if picture else {}
    if kind == "messages":
        row["messages"] = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    elif kind in ("sharegpt", "volcano"):
        row["conversations"] = [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    else:
        row |= {"prompt": asked, "completion": answer}
    made, counts = converted(kind, row, "image" if picture else "text")
    if not isinstance(made, Reject):
        texts = [turn.value for turn in made.conversations]
        if kind == "volcano" or "<image>" not in asked:
            assert not picture or texts[0].startswith("<image>\n")
            texts[0] = texts[0].removeprefix("<image>\n")
            compare([asked, answer], texts, counts)
        else:  # the tags stay where they are
            compare(["<image>\n" + asked, answer], texts, counts)


@given(asked=TEXTS, answers=st.lists(TEXTS, min_size=1, max_size=3))
def test_a_text_of_fire_is_trained_as_written_or_counted(asked: str, answers: list[str]) -> None:
    feedback = [f"Score: 5.\nFeedback: {answer}" for answer in answers]
    pairs = [turn for pair in zip(answers, feedback, strict=True) for turn in pair]
    turns = [{"role": ("student", "teacher")[n % 2], "value": text} for n, text in enumerate(pairs)]
    make = fire_rows(training_form("trajectory"), RowLimits())
    row = fire_row(conversations=turns)
    row["question"]["value"] = asked
    made = make("id", 0, json.dumps(row).encode())
    if not isinstance(made, Reject) and first_fault(made[0], RowLimits()) is None:
        question, *others = [turn.value for turn in made[0].conversations]
        counts = make.unread.take().counts(()).changed_texts
        if counts.keys() != {"outer_space"} or pairs[-1].rstrip() == pairs[-1]:  # the last feedback is in no row
            compare([asked, *pairs[:-1]], [question.removeprefix("<image>\n"), *others], counts)


@pytest.mark.parametrize(
    ("form", "trained"),
    [
        # The answers of each row have the scores 2, 3 and 10; train has ten rows.
        (training_form("trajectory"), {2: 10, 3: 10, 10: 10}),
        (training_form("timestep", 6), {2: 10, 3: 10, 10: 10}),
        (training_form("trajectory", min_score=3), {3: 10, 10: 10}),
        (training_form("timestep", 6, 3), {3: 10, 10: 10}),
        (training_form("trajectory", None, 8, "last_good"), {10: 20}),
        (training_form("trajectory", None, None, "last_good"), {2: 10, 3: 10, 10: 20}),
    ],
)
def test_the_account_has_what_is_trained_of_each_score(
    tmp_path: Path, form: DatasetSettings, trained: dict[int, int]
) -> None:
    """In train alone, and history does not count."""
    rows = [fire_row(f"gqa/{number}.jpg", f"question {number}", rounds=3) for number in range(12)]
    rules = split_rules(0.1, 1, 0.0, form=form.form)
    stats = validate([split_files(tmp_path, "train", rows, form)], tmp_path / "out", rules, processes=1)
    assert stats.examples["train"] in (10, 20, 30)
    answer = len("Thought: t1.\nAnswer: a1")
    assert stats.trained_characters == {score: answer * count for score, count in trained.items()}


@pytest.mark.parametrize(
    ("trained", "good_run", "said"),
    [
        ({3: 46, 9: 54}, "good", "46% of the trained text is attempts scored below 8; run good trains the others"),
        ({7: 1, 8: 2}, None, "33% of the trained text is attempts scored below 8; datasets.mine.min_score: 8 trains"),
        ({8: 7, 10: 3}, "good", "all of the trained text is attempts scored at least 8"),
        ({}, None, None),
    ],
)
def test_the_share_of_bad_attempts_is_said_with_what_trains_the_others(
    trained: dict[int, int], good_run: str | None, said: str | None
) -> None:
    found = in_words(trained, ["mine"], good_run)
    assert found == said if said is None else found is not None and found.startswith(said)
