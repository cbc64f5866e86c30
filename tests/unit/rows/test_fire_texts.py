"""FIRE's texts: answers without thoughts, feedback as a sentence, right answers by id, and generated files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_rows import PICTURE_COUNT, write_fire_rows
from made_rows import fire_row, fire_rows, real_rows, training_form, write_array
from stages import convert_rows
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows import sharegpt
from vlmflow.rows.chat import Reject, after_mark
from vlmflow.rows.forms.fire import read_gold, read_trajectory
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.trajectories import Trajectory, gold_answers, trajectory_row

ORIGINAL = training_form("trajectory", thoughts="drop", feedback_form="sentence")


def row_of(*pairs: tuple[str, str], **changes: Any) -> dict[str, Any]:
    turns = []
    for answer, feedback in pairs:
        turns.append({"role": "student", "type": "response", "value": answer})
        turns.append({"role": "teacher", "type": "feedback", "value": feedback})
    return fire_row(conversations=turns, **changes)


def said(row: dict[str, Any], form: DatasetSettings = ORIGINAL) -> list[str]:
    made = fire_rows(form, RowLimits())("id", 0, json.dumps(row).encode())
    assert not isinstance(made, Reject), made
    return [turn.value for turn in made[0].conversations]


def original(row: dict[str, Any]) -> list[str]:
    """Return the turns that the original's rules make of a row, as read in its prepare_fire_sharegpt.py (179cae2).

    Of an answer what follows the first `Answer:`; of feedback what follows `Feedback:`, behind a sentence with what
    stands between `Score:` and the end of its line, if that is a number.
    """
    spoken = [row["question"]["value"].strip()]
    for turn in row["conversations"]:
        text = turn["value"]
        if turn["role"] == "student":
            spoken.append(text.partition("Answer:")[2].strip() if "Answer:" in text else text.strip())
            continue
        score = text.partition("Score:")[2].partition("\n")[0].strip().rstrip(".")
        words = text.partition("Feedback:")[2].strip()
        spoken.append(f"A score of {score} is given to the answer. {words}" if score.isdecimal() else words)
    return spoken[:-1]


def without_tag(texts: list[str]) -> list[str]:
    """The tag has its own place here; the original leaves it where it is."""
    return [texts[0].replace("<image>", "").strip(), *texts[1:]]


def test_a_row_becomes_what_the_original_makes_of_it() -> None:
    row = row_of(
        ("Thought: It could be.\nAnswer: A cat.\n\n", "Score: 3.\nFeedback: Look\nagain. Feedback: no.\n"),
        ("Thought: It is.\nAnswer: A dog.\n\n", "Score: 10.\nFeedback: Yes.\n"),
        question="<image>\nWhat is it?",
    )
    made = [
        "<image>\nWhat is it?",
        "A cat.",
        "A score of 3 is given to the answer. Look\nagain. Feedback: no.",
        "A dog.",
    ]
    assert said(row) == original(row) == made
    whole = said(row, training_form("trajectory"))
    assert whole[1:3] == ["Thought: It could be.\nAnswer: A cat.", "Score: 3.\nFeedback: Look\nagain. Feedback: no."]


@pytest.mark.parametrize(("file", "rows", "differing"), [("FIRE-train-100K.json", 94, 0), ("FIRE-test.json", 86, 5)])
def test_real_rows_become_what_the_original_makes_of_them(file: str, rows: int, differing: int) -> None:
    """But for scores that are written as 5/10: the original drops them."""
    raw = json.loads(real_rows(file).read_text())
    assert len(raw) == rows
    differ = 0
    for row in raw:
        ours, theirs = without_tag(said(row)), without_tag(original(row))
        assert len(ours) == len(theirs)
        for own, their, turn in zip(ours[1:], theirs[1:], row["conversations"], strict=False):
            if own != their:
                score, _, words = turn["value"].strip().partition("/10.\nFeedback: ")
                assert (own, their) == (
                    f"A score of {score.removeprefix('Score: ')} is given to the answer. {words}",
                    words,
                )
                differ += 1
    assert differ == differing


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Thought: Answer: is a word.\nAnswer: yes", "yes"),
        ("Thought: x\nanswer : yes", "yes"),
        ("**Answer:** yes", "yes"),
        ("**Answer: yes**", "yes"),
        ("Answer: **yes** and `no`", "**yes** and `no`"),
        ("Answer: __init__", "__init__"),
        ("Answer: #5", "#5"),
        ("Answer: " + "long " * 4_000, ("long " * 4_000).strip()),
        ("Answer:", ""),
        ("**Answer:**", ""),
        ("yes", None),
        ("The answer is: yes", None),
        ("*" * 20_000 + "Answer: yes", "yes"),
    ],
)
def test_the_answer_is_what_follows_the_last_mark(text: str, answer: str | None) -> None:
    assert after_mark(text) == answer


@pytest.mark.parametrize(
    ("feedback", "sentence"),
    [
        ("Score: 5.\nFeedback: Look.", "A score of 5 is given to the answer. Look."),
        ("Score: 5/10. Feedback: Look.", "A score of 5 is given to the answer. Look."),
        ("**Score:** 5\n**Feedback:** Look.", "A score of 5 is given to the answer. Look."),
        ("score: 5 out of 10\nfeedback : Look.", "A score of 5 is given to the answer. Look."),
        ("Score: 5.\nLook.", None),
        ("Score: 5.\nFeedback:", None),
        ("Well.\nScore: 5.\nFeedback: Look.", None),
        ("Score: 5 (nearly).\nFeedback: Look.", None),
    ],
)
def test_feedback_becomes_a_sentence_or_stays(feedback: str, sentence: str | None) -> None:
    """No word of it is lost."""
    row = row_of(("a", feedback), ("b", "Score: 1.\nFeedback: No."))
    assert said(row)[2] == (sentence or feedback)


@given(words=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).map(str.strip).filter(bool))
def test_every_word_of_feedback_is_kept(words: str) -> None:
    assert words in said(row_of(("a", f"Score: 5.\nFeedback: {words}"), ("b", "Score: 1")))[2]


def test_what_stays_as_it_is_is_counted_and_an_empty_answer_is_rejected(tmp_path: Path) -> None:
    """Rows are counted, in the account that the data page shows; the feedback on the last attempt is in no row."""
    whole = row_of(("Yes.", "Score: 5.\nFeedback: x"), ("No.", "Score: 9.\nWell done."))
    other = row_of(("Answer: Yes.", "Score: 5.\nx"), ("Answer: No.", "Score: 9."))
    empty = row_of(("Answer: Yes.", "Score: 5."), ("Thought: It is.\nAnswer: \n", "Score: 9."))
    raw = write_array(tmp_path / "raw.json", [fire_row(), whole, other, empty])
    files = {"converted": tmp_path / "made", "rejects": tmp_path / "rejects", "unread": tmp_path / "unread.json"}
    settings = DatasetSettings(kind="fire", train=str(raw))
    shorter = settings.model_copy(update={"thoughts": "drop", "feedback_form": "sentence"})
    convert_rows.main(raw=[raw], **files, split="train", settings=shorter)
    account = json.loads(files["unread"].read_text())
    assert (account["answers_without_mark"], account["feedback_of_other_form"]) == (1, 1)
    (reject,) = map(json.loads, files["rejects"].read_bytes().splitlines())
    detail = "conversations[2].value has nothing after `Answer:` (thoughts: drop)"
    assert reject == {"raw_row": 3, "reason": "empty_turn", "detail": detail}
    convert_rows.main(raw=[raw], **files, split="train", settings=settings)
    assert "answers_without_mark" not in json.loads(files["unread"].read_text())
    assert files["rejects"].read_bytes() == b""


def raw_file(folder: Path, *truths: Any) -> tuple[Path, list[str]]:
    """Write raw rows, and return the file with the ids of the rows."""
    rows = [json.dumps({"groundtruth": truth}).encode() for truth in truths]
    file = folder / "raw.jsonl"
    file.write_bytes(b"\n".join(rows) + b"\n")
    return file, [row_id("train", number, row) for number, row in enumerate(rows)]


def test_answers_are_those_of_the_rows(tmp_path: Path) -> None:
    file, ids = raw_file(tmp_path, *({"role": "user", "value": f" gold {n}\r\n"} for n in range(3)))
    wanted = [ids[2], f"{ids[0]}-a3", f"{ids[1]}-single", "made-by-hand"]
    found = gold_answers(wanted, {"train": [file], "test": []}, [], read_gold)
    assert found == {ids[2]: "gold 2", f"{ids[0]}-a3": "gold 0", f"{ids[1]}-single": "gold 1"}
    assert gold_answers(ids, {"train": [], "test": [file]}, [], read_gold) == {}


@pytest.mark.parametrize("truth", [None, "a text", {"value": 3}, {"role": "user", "value": "  "}, ["a"], {}])
def test_a_row_without_a_readable_answer_has_none(tmp_path: Path, truth: Any) -> None:
    file, ids = raw_file(tmp_path, truth)
    assert gold_answers(ids, {"train": [file]}, [], read_gold) == {}


def test_nothing_that_is_not_json_has_an_answer() -> None:
    assert [read_gold(row) for row in (b"", b"\xff", b"[" * 100_000, b"{}")] == [None] * 4


def test_a_fixed_row_gives_its_own_answer(tmp_path: Path) -> None:
    file, _ = raw_file(tmp_path, {"role": "user", "value": "old"})
    fixed = b'{"groundtruth":{"role":"user","value":"new"}}'
    old = file.read_bytes().rstrip()
    line = {"split": "train", "row": 0, "file": file.name, "checksum": row_id("train", 0, old)[-8:]}
    copy = tmp_path / "fixed.jsonl"
    copy.write_bytes(json.dumps(line).encode()[:-1] + b', "raw": ' + fixed + b"}\n")
    identity = row_id("train", 0, fixed)
    assert gold_answers([identity], {"train": [file]}, [copy], read_gold) == {identity: "new"}


def test_another_raw_row_is_refused(tmp_path: Path) -> None:
    file, ids = raw_file(tmp_path, {"role": "user", "value": "a"}, {"role": "user", "value": "b"})
    for identity in (ids[0].replace("train-0000000", "train-0000001"), ids[0].replace("0000000", "0000009")):
        with pytest.raises(VlmflowError, match=rf"row \d is not the one from which row {identity} was made"):
            gold_answers([identity], {"train": [file]}, [], read_gold)


ROWS = 4_000


def test_every_row_is_valid_and_its_picture_exists(tmp_path):
    write_fire_rows(tmp_path / "rows.json", ROWS, seed=1)
    seen = set()
    images = set()
    rounds = 0
    with JsonRows(tmp_path / "rows.json") as rows:
        assert len(rows) == ROWS
        for row in rows:
            trajectory = read_trajectory(row)
            assert isinstance(trajectory, Trajectory), trajectory
            assert not trajectory.score_field_differs
            assert sharegpt.first_fault(trajectory_row("id", trajectory), RowLimits()) is None
            rounds += len(trajectory.attempts)
            images.add(trajectory.image)
            seen.add(row)
    assert len(seen) == ROWS
    assert len(images) == PICTURE_COUNT
    assert all((tmp_path / "pictures" / image).is_file() for image in images)
    assert 2.55 < rounds / ROWS < 2.71
    assert 2_000 < (tmp_path / "rows.json").stat().st_size / ROWS < 2_270


@pytest.mark.lengthy
def test_two_runs_write_the_same_bytes_and_another_seed_others(tmp_path):
    files = [tmp_path / str(number) / "rows.json" for number in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        write_fire_rows(file, 200, seed)
    first, second, third = (file.read_bytes() for file in files)
    assert first == second
    assert first != third
