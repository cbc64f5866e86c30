import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import fire_row, fire_rows, training_form, write_array
from stages import convert_rows
from vlmflow.config.data_settings import DatasetSettings, RowLimits
from vlmflow.rows.chat import REASONS, Reject
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.sharegpt import first_fault
from vlmflow.rows.trajectories import Trajectory, is_trained, read_score, timestep_rows, trajectory_row


def read(row: Any) -> Trajectory | Reject:
    return read_trajectory(row if isinstance(row, bytes) else json.dumps(row).encode())


def reason(row: Any) -> str:
    result = read(row)
    assert isinstance(result, Reject), result
    return result.reason


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "type": "x", "value": value} for role, value in pairs]


def test_a_valid_row_is_understood() -> None:
    trajectory = read(fire_row(rounds=3, question="<image>\nWhat is it?"))
    assert trajectory.question == "What is it?"
    assert [attempt.answer for attempt in trajectory.attempts] == [f"Thought: t{n}.\nAnswer: a{n}" for n in (1, 2, 3)]
    assert [attempt.score for attempt in trajectory.attempts] == [2, 3, 10]
    assert not trajectory.score_field_differs


def test_tags_in_the_question_are_stripped_and_one_is_put_in_front() -> None:
    """Tags anywhere in the first question are removed, and one is put in front."""
    trajectory = read(fire_row(question="What <image> is it?\n<image>"))
    row = trajectory_row("id", trajectory)
    assert row.conversations[0].value == "<image>\nWhat  is it?"
    assert row.images == ["coco/train2017/000000000001.jpg"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 5.\nFeedback: x", 5),
        ("Score: 5/10.\nx", 5),
        ("Score: 10. Feedback: on one line", 10),
        ("**Score:** 7", 7),
        ("score : 0", 0),
        ("Score: 5 / 10", 5),
        ("Score: 7.5", None),
        ("Score: 11", None),
        ("Score: 8/20", None),
        ("Score: ten", None),
        ("Feedback: good", None),
        ("Score: 100", None),
    ],
)
def test_scores_are_read_from_the_text(text: str, score: int | None) -> None:
    assert read_score(text) == score


@pytest.mark.parametrize("field", [[0, 1], "x", [2, 10, 10], 3])
def test_the_text_decides_over_the_score_field(field: Any) -> None:
    trajectory = read(fire_row(score=field))
    assert [attempt.score for attempt in trajectory.attempts] == [2, 10]
    assert trajectory.score_field_differs


def test_optional_keys_may_be_missing() -> None:
    row = fire_row()
    for key in ("groundtruth", "round", "score", "source"):
        del row[key]
    assert read(row).source == "coco"
    assert not read(row).score_field_differs
    assert not read(row | {"score": None}).score_field_differs


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"{", "bad_json"),
        (b'{"image": NaN}', "bad_json"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "bad_json"),
        (b'"text"', "bad_shape"),
        (fire_row(image=""), "bad_shape"),
        (fire_row(image=["a", "b"]), "bad_shape"),
        (fire_row(question="text"), None),
        (fire_row(conversations=turns(("student", "a"), ("assistant", "b"))), "wrong_role"),
        (fire_row(conversations=turns(("teacher", "Score: 1"), ("student", "b"))), "wrong_role"),
        (fire_row() | {"question": {"role": "system", "value": "x"}}, "wrong_role"),
        (fire_row() | {"question": "What?"}, "bad_shape"),
        (fire_row(conversations=[]), "unbalanced_turns"),
        (fire_row(conversations=turns(("student", "a"))), "unbalanced_turns"),
        (fire_row(conversations=turns(("student", " \n"), ("teacher", "Score: 1"))), "empty_turn"),
        (fire_row(question=" <image> "), "empty_turn"),
        (fire_row(conversations=turns(("student", "a"), ("teacher", "well"))), "unreadable_score"),
    ],
)
def test_unusable_rows_are_rejected_with_their_reason(row: Any, expected: str | None) -> None:
    """Wrong types, wrong roles, odd turns, no picture, bad JSON, empty turns."""
    if expected is None:
        assert isinstance(read(row), Trajectory)
    else:
        assert reason(row) == expected


@pytest.mark.parametrize(
    ("feedback", "score"),
    [
        ("Score: 5.\nFeedback: good", 5),
        ("Score: 5/10.\nFeedback: good", 5),
        ("Score: **10**", 10),
        ("score: 8 out of 10", 8),
        ("Score: 7\nFeedback: 5-7 are wrong", 7),
        ("Score: -5", None),
        ("Score: .5", None),
        ("Score: 5.5", None),
        ("Score: 1e1", None),
        ("Score: 5-7", None),
        ("Score: 15-7", None),
        ("Score: 8 out of 100", None),
        ("Score: 5/10.5", None),
        ("Score: 50%", None),
        ("Score: 11", None),
        ("Underscore: 7", None),
    ],
)
def test_a_score_is_read_or_refused_never_guessed(feedback: str, score: int | None) -> None:
    assert read_score(feedback) == score


def test_one_unusable_attempt_rejects_the_whole_row() -> None:
    row = fire_row(rounds=3)
    row["conversations"][2]["value"] = ""
    assert reason(row) == "empty_turn"


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@st.composite
def trajectories(draw: Any) -> dict[str, Any]:
    pairs = []
    for _ in range(draw(st.integers(1, 6))):
        pairs.append(("student", draw(TEXT)))
        pairs.append(("teacher", f"Score: {draw(st.integers(0, 10))}.\nFeedback: {draw(TEXT)}"))
    return fire_row(question=draw(TEXT), conversations=turns(*pairs))


@given(raw=trajectories())
def test_trajectory_answers_are_the_timestep_targets_one_by_one(raw: dict[str, Any]) -> None:
    """Compare the two forms, with unlimited history."""
    trajectory = read(raw)
    if isinstance(trajectory, Reject):
        assert trajectory.reason == "empty_turn"
        return
    whole = trajectory_row("id", trajectory)
    steps = timestep_rows("id", trajectory, None)
    answers = [turn.value for turn in whole.conversations if turn.speaker == "gpt"]
    assert [step.conversations[-1].value for step in steps] == answers
    assert steps[-1].conversations == whole.conversations
    for number, step in enumerate(steps):
        assert step.conversations == whole.conversations[: 2 * number + 2]


@given(raw=trajectories(), history=st.integers(0, 4))
def test_a_bounded_history_keeps_the_last_attempts_and_their_numbers(raw: dict[str, Any], history: int) -> None:
    trajectory = read(raw)
    if isinstance(trajectory, Reject):
        return
    for number, step in enumerate(timestep_rows("id", trajectory, history), start=1):
        first = max(1, number - history)
        assert step.attempts == list(range(first, number + 1))
        state = [turn.value for turn in step.conversations[:-1]]
        shown = [(trajectory.attempts[n - 1].answer, trajectory.attempts[n - 1].feedback) for n in step.attempts[:-1]]
        assert state == ["<image>\n" + trajectory.question, *(text for pair in shown for text in pair)][: len(state)]
        assert len(state) == 1 + 2 * (number - first)


@given(raw=trajectories())
def test_both_forms_give_the_trajectory_back(raw: dict[str, Any]) -> None:
    """Round trip: either form gives the raw row's answers and answered feedback, in order."""
    trajectory = read(raw)
    if isinstance(trajectory, Reject):
        return
    spoken = [text for attempt in trajectory.attempts for text in (attempt.answer, attempt.feedback)][:-1]
    whole = trajectory_row("id", trajectory)
    assert [turn.value for turn in whole.conversations[1:]] == spoken
    last = timestep_rows("id", trajectory, 1)
    again = [last[0].conversations[1].value]
    for step in last[1:]:
        again += [turn.value for turn in step.conversations[-2:]]
    assert again == spoken


@given(raw=trajectories(), least=st.integers(0, 10), history=st.none() | st.integers(0, 4))
def test_attempts_below_the_least_score_are_history(raw: dict[str, Any], least: int, history: int | None) -> None:
    """In both forms an attempt is a target if and only if its own score is high enough; it ends the conversation."""
    trajectory = read(raw)
    if isinstance(trajectory, Reject):
        return
    good = [number for number, attempt in enumerate(trajectory.attempts, start=1) if attempt.score >= least]
    steps = timestep_rows("id", trajectory, history, least)
    assert steps == [row for row in timestep_rows("id", trajectory, history) if row.attempts[-1] in good]
    assert is_trained(trajectory, least) == bool(good)
    if not good:
        return
    row = trajectory_row("id", trajectory, least)
    assert [turn.loss for turn in row.conversations[1::2]] == [number in good for number in range(1, good[-1] + 1)]
    assert (row.attempts, row.scores) == (
        list(range(1, good[-1] + 1)),
        [a.score for a in trajectory.attempts][: good[-1]],
    )
    spoken = [(turn.speaker, turn.value) for turn in row.conversations]
    whole = trajectory_row("id", trajectory).conversations
    assert spoken == [(turn.speaker, turn.value) for turn in whole][: len(spoken)]
    assert first_fault(row, RowLimits()) is None or first_fault(row, RowLimits()).reason != "schema"
    assert all(turn.loss is msgspec.UNSET for step in steps for turn in step.conversations)


@pytest.mark.parametrize("form", ["trajectory", "timestep"])
@pytest.mark.parametrize(
    ("scores", "least", "alone"),
    [
        ((3, 8), None, 2),
        ((3, 9, 8, 5), None, 3),
        ((3, 9, 8, 5), 9, 2),
        ((3, 5), None, None),
        ((3, 5), 4, 2),
        ((9, 3), None, None),
        ((9, 3), 8, None),
        ((10,), 8, None),
    ],
)
def test_the_last_good_attempt_has_a_row_without_feedback(
    form: str, scores: tuple[int, ...], least: int | None, alone: int | None
) -> None:
    """None if it is the first attempt, which has such a row, or such a beginning, already."""
    pairs = [(("student", f"a{n}"), ("teacher", f"Score: {score}")) for n, score in enumerate(scores, start=1)]
    raw = json.dumps(fire_row(conversations=turns(*(turn for pair in pairs for turn in pair)))).encode()
    made = [
        fire_rows(training_form(form, 6, least, single_turn), RowLimits(), "Be brief.")("id", 7, raw)
        for single_turn in (None, "last_good")
    ]
    *others, last = made[1] if alone else [*made[1], None]
    assert others == made[0]
    if last is not None:
        assert (last.id, last.attempts, last.scores, last.raw_row) == ("id-single", [alone], [scores[alone - 1]], 7)
        said = [(turn.speaker, turn.value) for turn in last.conversations]
        assert said == [("system", "Be brief."), ("human", "<image>\nWhat is it?"), ("gpt", f"a{alone}")]
        marked = [turn.loss for turn in others[-1].conversations if turn.speaker == "gpt"][-1:]
        assert [last.conversations[-1].loss] == marked, "all answers of a data set have loss, or none"
        assert first_fault(last, RowLimits()) is None


def test_a_trajectory_without_a_good_attempt_is_left_out() -> None:
    """Before its size is looked at: nobody requested it."""
    make = fire_rows(training_form("trajectory", min_score=10), RowLimits(max_turns=2))
    poor = fire_row(
        conversations=turns(("student", "a"), ("teacher", "Score: 9"), ("student", "b"), ("teacher", "Score: 8"))
    )
    assert make("id", 0, json.dumps(poor).encode()) == Reject("no_good_attempt", "")
    assert make("id", 0, json.dumps(fire_row()).encode()).reason == "too_many_turns"


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["image", "question", "conversations", "score", "source", "round", "groundtruth"]


@given(raw=trajectories(), key=st.sampled_from(KEYS), junk=JUNK, noise=st.binary(max_size=8), at=st.integers(0, 400))
def test_any_row_is_converted_or_rejected(raw: dict[str, Any], key: str, junk: Any, noise: bytes, at: int) -> None:
    """Well-formed or not: nothing raises, every rejection has a known reason, every converted row is valid."""
    text = json.dumps(raw | {key: junk}).encode()
    for row in (text, text[:at] + noise + text[at:], json.dumps(raw, ensure_ascii=False).encode()[:at], noise):
        result = read_trajectory(row)
        if isinstance(result, Reject):
            assert result.reason in REASONS
            continue
        for made in [trajectory_row("id", result), *timestep_rows("id", result, 6)]:
            assert msgspec.json.decode(msgspec.json.encode(made), type=type(made)) == made
            fault = first_fault(made, RowLimits())
            assert fault is None or fault.reason in REASONS


def test_rows_have_an_identity_of_split_number_and_content() -> None:
    assert row_id("train", 7, b"{}") == "train-0000007-a3a6bf43"
    assert row_id("train", 7, b"{}") != row_id("train", 7, b"[]")


@pytest.mark.parametrize("form", ["trajectory", "timestep"])
def test_a_system_prompt_begins_every_conversation(form: str) -> None:
    make = fire_rows(training_form(form, 6), RowLimits(), "Be brief.")
    for row in make("id", 7, json.dumps(fire_row()).encode()):
        assert (row.conversations[0].speaker, row.conversations[0].value) == ("system", "Be brief.")
        assert row.conversations[1].value.startswith("<image>\n")
        assert row.raw_row == 7
        assert first_fault(row, RowLimits()) is None


def convert_one(folder: Path, row: dict[str, Any], form: str, history: int | None) -> tuple[int, list[dict[str, Any]]]:
    """Convert a valid row and this one; return the written bytes, and the rejects."""
    raw = write_array(folder / "raw.json", [fire_row(), row])
    made, rejects = folder / "made.jsonl", folder / "rejects.jsonl"
    settings = DatasetSettings(kind="fire", train=str(raw), form=form, max_history_rounds=history)
    files = {"raw": [raw], "converted": made, "rejects": rejects, "unread": folder / "unread.json"}
    convert_rows.main(**files, split="train", settings=settings)
    return made.stat().st_size, list(map(json.loads, rejects.read_bytes().splitlines()))


@pytest.mark.parametrize(("form", "history"), [("timestep", 6), ("timestep", None), ("trajectory", None)])
def test_ten_thousand_turns_are_one_reject_and_not_ten_thousand_examples(
    tmp_path: Path, form: str, history: int | None
) -> None:
    """The timestep form would write each turn thousands of times: 1 GB from 469 KB. The limits apply to the raw row."""
    size, rejects = convert_one(tmp_path, fire_row(rounds=5_000), form, history)
    assert size < 10_000
    detail = "10000 turns, at most 64 are allowed"
    assert rejects == [{"raw_row": 1, "reason": "too_many_turns", "detail": detail}]
    size, rejects = convert_one(tmp_path, fire_row(rounds=32), form, history)
    assert rejects == []
    long = fire_row(rounds=32)
    long["conversations"][0]["value"] = "x" * 1_000_000
    size, rejects = convert_one(tmp_path, long, form, history)
    assert size < 10_000
    assert [reject["reason"] for reject in rejects] == ["turn_too_long"]
    last = fire_row(rounds=2)
    last["conversations"][-1]["value"] += "x" * 30_000  # nobody answers it, so it is in no example
    assert convert_one(tmp_path, last, form, history)[1] == []
