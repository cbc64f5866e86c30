"""The choice of rows and of their answers, the files of a split, and whether val also chose what it judges."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from made_accounts import some_choice, some_fitted, some_report, some_stats
from made_rows import made_row, write_picture
from simulated_evaluations import row
from vlmflow.config.after_training import ChosenBy, Requirements
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.choice import Case, draw, last_attempts, read_case, with_right_last, without_single_turns
from vlmflow.evaluation.chosen_split import (
    Candidates,
    ChosenSplit,
    SplitFiles,
    candidates_of,
    choice_of,
    choose_from_split,
    read_candidates,
    trained_on,
)
from vlmflow.evaluation.measure import passes_of, scored_answers, write_lines
from vlmflow.evaluation.report import OTHERS, AlsoChose, LeftOut
from vlmflow.evaluation.verdict import (
    NO_GAIN,
    TOO_FEW,
    Verdict,
    also_chose,
    refuse_too_few,
    with_how_val_was_used,
)
from vlmflow.rows.chat import Turn
from vlmflow.rows.holdout import Part, group_of, half_of
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.stats import MIXTURE, MemberStats, SplitCounts

SHA = {"a.jpg": "a" * 64, "b.jpg": "b" * 64, "copy-of-a.jpg": "a" * 64}

PICTURES = {f"{n}.jpg": str(n) * 64 for n in range(2)}


def test_rows_of_one_picture_are_one_group_whatever_its_name() -> None:
    cases = [read_case(row(n, "c", images=[name]), SHA) for n, name in enumerate(["a.jpg", "copy-of-a.jpg", "b.jpg"])]
    assert cases[0].group == cases[1].group != cases[2].group


def test_rows_without_a_picture_are_grouped_by_their_question() -> None:
    one, same, other = row(1, "x"), row(1, "y"), row(2, "x")
    groups = [read_case(each, {}).group for each in (one, same, other)]
    assert groups[0] == groups[1] != groups[2]


def test_of_a_trajectory_in_timestep_form_the_last_row_is_evaluated() -> None:
    of = [msgspec.structs.replace(row(n, "c"), id=f"val-{n}-a{attempt}") for n in (1, 2) for attempt in (1, 2, 10)]
    kept, out = last_attempts([read_case(each, {}) for each in of])
    assert [case.row.id for case in kept] == ["val-1-a10", "val-2-a10"]
    assert {left.reason for left in out} == {"earlier_attempt"}
    assert len(out) == 4


def test_an_answer_that_also_has_a_row_of_its_own_is_evaluated_once() -> None:
    """In both forms."""
    of = [msgspec.structs.replace(row(1, "c"), id=f"val-1{end}") for end in ("", "-a1", "-a2", "-single")]
    kept, out = without_single_turns([read_case(each, {}) for each in of])
    assert [case.row.id for case in kept] == ["val-1", "val-1-a1", "val-1-a2"]
    assert [(left.id, left.reason) for left in out] == [("val-1-single", "single_turn")]


@given(st.integers(1, 40), st.integers(0, 5))
def test_whole_pictures_are_drawn_and_more_rows_include_fewer(count: int, seed: int) -> None:
    of = [read_case(row(n // 3, f"c{n}"), {}) for n in range(30)]
    drawn, others = draw(of, count, seed, "runs.my-run.answer.rows")
    assert min(count, 30) <= len(drawn) < count + 3
    assert len(drawn) + len(others) == 30
    assert {out.detail for out in others} <= {f"{count} rows were to be drawn (runs.my-run.answer.rows)"}
    assert not {case.group for case in drawn} & {case.group for case in of if case not in drawn}
    assert {case.row.id for case in drawn} <= {case.row.id for case in draw(of, count + 1, seed, "k")[0]}


def dialogue(answers: list[str], scores: list[float]) -> ShareGptRow:
    """Return a row with these answers, and feedback on each but the last."""
    turns = [Turn("human", "What is it?")]
    for number, answer in enumerate(answers):
        turns += [Turn("gpt", answer), Turn("human", f"Feedback {number}.")]
    return made_row("val-1", turns[:-1], "codes", [], scores)


@pytest.mark.parametrize(
    ("scores", "right", "wrong"),
    [
        ([3, 10], "c1", "c0"),
        ([6, 5, 2, 8], "c3", "c1"),
        ([1, 9, 4], "c1", "c0"),
        ([1, 9, 4, 8], "c3", "c0"),
        ([], "c3", None),
    ],
)
def test_right_is_the_last_good_answer_and_wrong_the_first_bad_one(
    scores: list[float], right: str, wrong: str | None
) -> None:
    """What follows the right answer is no part of its history."""
    of = dialogue([f"c{number}" for number in range(len(scores) or 4)], scores)
    found = with_right_last(read_case(of, {}))
    assert isinstance(found, Case)
    assert (found.answer, found.wrong) == (right, wrong)
    assert found.row.scores == scores[: len(found.turns) // 2]
    assert len(found.feedback) == int(right[1])


@pytest.mark.parametrize(
    ("answers", "scores", "reason"),
    [
        (["a", "b"], [9, 7], "no_right"),
        (["a", "b"], [3, 7], "no_right"),
        (["a", "Thought: I see.\nAnswer:"], [3, 9], "no_right"),
        (["a", "b"], [6, 9], "no_wrong"),
        (["The car.", "Thought: hm\nAnswer: car"], [3, 9], "no_wrong"),
    ],
)
def test_a_row_without_two_answers_to_compare_is_out(answers: list[str], scores: list[float], reason: str) -> None:
    found = with_right_last(read_case(dialogue(answers, scores), {}))
    assert isinstance(found, LeftOut)
    assert found.reason == reason
    assert found.detail


def test_both_answers_begin_alike_and_have_no_thought() -> None:
    both = read_case(dialogue(["Thought: I guess.\nAnswer: red", "Thought: I see.\nAnswer: blue"], [3, 9]), {})
    one = read_case(dialogue(["red", "Thought: I see.\nAnswer: blue"], [3, 9]), {})
    for case, begins in ((both, "Answer: "), (one, "")):
        found = with_right_last(case)
        assert isinstance(found, Case)
        answers = {name: turn.value for name, turn in scored_answers(found).items()}
        assert answers == {"right": f"{begins}blue", "wrong": f"{begins}red"}
        passes = passes_of(found, [found], None)
        assert {each.given for each in passes.values()} == {begins.strip()}


def test_the_contexts_differ_in_feedback_and_picture_alone() -> None:
    own, donor = (with_right_last(read_case(row(n, f"c{n}", images=[f"{n}.jpg"]), PICTURES)) for n in range(2))
    assert isinstance(own, Case)
    assert isinstance(donor, Case)
    own.row.conversations.insert(0, Turn("system", "Be brief."))
    passes = passes_of(own, [donor, donor], donor, ["Score: 3. Wrong."])
    texts = {name: [turn.value for turn in made.turns] for name, made in passes.items()}
    question = ["Be brief.", "<image>\nWhat is the code of door 0?"]
    for answer, said in (("right", "Answer: c0"), ("wrong", "Answer: none")):
        assert texts[f"question {answer}"] == [*question, said]
        history = [*question, "Answer: none", "Score: 3. It is c0.", said]
        assert texts[f"own {answer}"] == texts[f"other_picture {answer}"] == history
        for context in OTHERS[:2]:
            assert texts[f"{context} {answer}"] == [*question, "Answer: none", "Score: 3. It is c1.", said]
        assert texts[f"neutral {answer}"] == [*question, "Answer: none", "Score: 3. Wrong.", said]
    pictures = {name.split()[0]: made.images for name, made in passes.items()}
    assert pictures.pop("other_picture") == ["1.jpg"]
    assert pictures == {name: ["0.jpg"] for name in ("question", "own", "neutral", *OTHERS[:2])}


def test_a_feedback_of_another_row_shows_no_pictures() -> None:
    own, donor = (with_right_last(read_case(row(n, f"c{n}", images=[f"{n}.jpg"]), PICTURES)) for n in range(2))
    assert isinstance(own, Case)
    assert isinstance(donor, Case)
    for case in (own, donor):
        case.row.conversations[2].value += " <image>"
        case.row.images.append("1.jpg")
    passes = passes_of(own, [donor], None)
    assert [passes[f"{context} right"].images for context in ("own", "other")] == [["0.jpg", "1.jpg"], ["0.jpg"]]
    assert passes["other right"].turns[2].value == "Score: 3. It is c1. "


def test_a_row_with_calls_is_scored_with_its_tools_and_has_no_feedback() -> None:
    turns = [Turn("human", "?"), Turn("function_call", "{}"), Turn("observation", "1"), Turn("gpt", "one")]
    case = read_case(msgspec.structs.replace(made_row("r", turns), tools="[]"), {})
    assert case.feedback == []
    assert msgspec.to_builtins(passes_of(case, [], None)["question right"])["tools"] == "[]"
    plain = msgspec.to_builtins(passes_of(read_case(row(1, "c"), {}), [], None)["question right"])
    assert plain.keys() == {"turns", "images", "given"}, "what is kept of rows without tools stays"


def test_without_feedback_the_whole_row_is_scored_with_both_pictures() -> None:
    own, donor = (read_case(row(n, "c", images=[f"{n}.jpg"]), PICTURES) for n in range(2))
    passes = passes_of(own, [], donor)
    assert {name: (made.turns, made.images, made.given) for name, made in passes.items()} == {
        "question right": (own.row.conversations, ["0.jpg"], ""),
        "other_picture right": (own.row.conversations, ["1.jpg"], ""),
    }


def test_a_picture_in_no_manifest_is_named(tmp_path: Path) -> None:
    rows, stats, manifest = tmp_path / "val.jsonl", tmp_path / "stats.json", tmp_path / "train.jsonl"
    rows.write_bytes(msgspec.json.encode(row(1, "c1", images=["gqa/1.jpg"])) + b"\n")
    manifest.write_text("")
    write_account(stats, some_stats(digests={"val.jsonl": sha256_of(rows)}))
    with pytest.raises(VlmflowError, match=r"1 pictures are in no image manifest .*train.jsonl\): gqa/1.jpg"):
        choose_from_split(
            SplitFiles(rows, stats, tmp_path, [manifest]), feedback=True, count=1, key="k", seed=1, part=None
        )


def test_the_halves_of_val_are_evaluated_apart_and_give_each_other_controls(tmp_path: Path) -> None:
    rows, stats = tmp_path / "val.jsonl", tmp_path / "stats.json"
    of_val = [row(number, f"c{number % 7}") for number in range(240)]
    rows.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in of_val))
    write_account(stats, some_stats(kind="alpaca", digests={"val.jsonl": sha256_of(rows)}))

    def chosen(part: Part | None) -> ChosenSplit:
        how = {"feedback": True, "count": 1000, "key": "k", "seed": 1}
        return choose_from_split(SplitFiles(rows, stats, tmp_path), part=part, **how)

    halves = {part: {each.case.row.id for each in chosen(part).rows} for part in ("chooses", "judges")}
    judges = half_of((group_of(each, {}) for each in of_val), "judges") or frozenset()
    assert halves["judges"] == {each.id for each in of_val if group_of(each, {}) in judges}
    assert halves["chooses"] | halves["judges"] == {each.id for each in of_val}
    assert not halves["chooses"] & halves["judges"]
    assert {each.id: each.reason for each in chosen("judges").out} == dict.fromkeys(halves["chooses"], "other_half")
    controls = {donor.row.id for each in chosen("judges").rows for donor in each.donors}
    assert controls & halves["chooses"], "as many rows as possible have a control"
    assert len(chosen(None).rows) == len(of_val)


def mixture(folder: Path, *rows: ShareGptRow, kinds: Mapping[str, str]) -> tuple[Path, Path]:
    """Write a val split of a mixture and its account. kinds: of its data sets."""
    file, stats = folder / "val.jsonl", folder / "stats.json"
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in rows))
    none = SplitCounts(0, 0, {})
    members = {
        name: MemberStats("all", kind, "trajectory", "all", none, none, none, {}, {}) for name, kind in kinds.items()
    }
    write_account(stats, some_stats(kind=MIXTURE, members=members, digests={"val.jsonl": sha256_of(file)}))
    return file, stats


def of_mixture(made: ShareGptRow, member: str) -> ShareGptRow:
    return msgspec.structs.replace(made, id=f"{member}:{made.id}", source=f"{member}/{made.source}")


@pytest.mark.parametrize(
    ("feedback", "evaluated", "out"),
    [(None, {"fire"}, "no_feedback"), (True, {"fire", "chats"}, None), (False, {"fire", "chats"}, None)],
)
def test_rows_of_a_data_set_whose_kind_has_no_feedback_are_out_unless_the_run_decides(
    tmp_path: Path, feedback: bool | None, evaluated: set[str], out: str | None
) -> None:
    some = [of_mixture(row(number, f"c{number % 7}"), name) for name in ("fire", "chats") for number in range(30)]
    file, stats = mixture(tmp_path, *some, kinds={"fire": "fire", "chats": "messages"})
    how = {"feedback": feedback, "count": 1000, "key": "k", "seed": 1, "part": None}
    chosen = choose_from_split(SplitFiles(file, stats, tmp_path), **how)
    assert {each.case.row.id.partition(":")[0] for each in chosen.rows} == evaluated
    assert chosen.feedback is (feedback is not False)
    assert {each.reason for each in chosen.out if each.id.startswith("chats:")} == ({out} if out else set())


def test_gold_answers_are_those_of_the_rows_own_data_set(tmp_path: Path) -> None:
    """Two data sets may have rows of the same numbers; each has its own raw files."""
    raw, ids = {}, {}
    for name in ("fire", "good"):
        line = json.dumps({"groundtruth": {"role": "user", "value": f"gold of {name}"}}).encode()
        (tmp_path / "raw" / name).mkdir(parents=True)
        raw[name] = tmp_path / "raw" / name / "train.jsonl"
        raw[name].write_bytes(line + b"\n")
        ids[name] = row_id("train", 0, line)
    some = [of_mixture(msgspec.structs.replace(row(1, "c1"), id=one), name) for name, one in ids.items()]
    others = [of_mixture(row(number, f"c{number % 7}"), "chats") for number in range(9)]
    kinds = {"fire": "fire", "good": "fire", "chats": "messages"}
    file, stats = mixture(tmp_path, *some, *others, kinds=kinds)
    how = {"feedback": False, "count": 1000, "key": "k", "seed": 1, "part": None}
    chosen = choose_from_split(SplitFiles(file, stats, tmp_path, [], {"train": [*raw.values()]}), **how)
    assert chosen.gold == {f"{name}:{one}": f"gold of {name}" for name, one in ids.items()}


def of_val(folder: Path, rows: list[ShareGptRow], manifests: Sequence[Path] = ()) -> SplitFiles:
    """Write a split and its account."""
    folder.mkdir(exist_ok=True)
    file, stats = folder / "val.jsonl", folder / "stats.json"
    write_lines(file, rows)
    write_account(stats, some_stats(kind="alpaca", digests={file.name: sha256_of(file)}))
    return SplitFiles(file, stats, folder.parent / "pictures", manifests)


def fitted_on(folder: Path, rows: list[ShareGptRow]) -> Path:
    """Write the rows of a run on data set `fire`."""
    folder.mkdir()
    write_lines(folder / "train.jsonl", rows)
    write_account(folder / "account.json", some_fitted())
    return folder


def manifest_of(folder: Path, dataset: str, colours: Mapping[str, int]) -> Path:
    """Write pictures of one colour each into a store, and their manifest."""
    manifest = folder / "images" / dataset / "train.jsonl"
    manifest.parent.mkdir(parents=True)
    lines = []
    for name, colour in colours.items():
        file = write_picture(folder / "pictures" / dataset / name, (colour, colour, colour))
        known = {"path": name, "rows": 1, "name": name, "format": "PNG", "sha256": sha256_of(file)}
        lines.append(json.dumps(known | {"rewritten": None}) + "\n")
    manifest.write_text("".join(lines))
    return manifest


def chosen_from(files: SplitFiles, trained: frozenset[str] = frozenset()) -> Candidates:
    return candidates_of(files, feedback=True, seed=1, trained=trained)


def test_what_a_base_was_trained_on_does_not_judge(tmp_path: Path) -> None:
    """By question here, as no row has a picture; whatever else the rows say."""
    files = of_val(tmp_path / "data", [row(number, f"c{number % 7}") for number in range(20)])
    base = fitted_on(tmp_path / "fitted", [row(number, "other") for number in (3, 4, 99)])
    found = chosen_from(files, frozenset(trained_on(base, [])))
    assert [(left.id, left.reason) for left in found.out] == [
        (f"val-{number:07}-aa", "trained_before") for number in (3, 4)
    ]
    assert len(found.lines) == 18
    donors = {donor for line in found.lines for donor in line.donors}
    assert donors == found.cases.keys(), "they give no feedback either"


@pytest.mark.parametrize(
    ("images", "out"), [(["b.png"], 0), (["copy-of-a.png"], 1), (["b.png", "copy-of-a.png"], 1), (["other.png"], 0)]
)
def test_one_picture_that_a_base_knows_is_enough(tmp_path: Path, images: list[str], out: int) -> None:
    """Whatever its name: another data set's `a.png`, which is `other.png` here, is another picture."""
    colours = {"a.png": 10, "copy-of-a.png": 10, "b.png": 20, "other.png": 30}
    ours = manifest_of(tmp_path, "fire", colours)
    others = manifest_of(tmp_path, "another", {"a.png": 30})
    files = of_val(tmp_path / "data", [row(9, "c9", images=images)], manifests=[ours])
    base = fitted_on(tmp_path / "fitted", [row(1, "c1", images=["a.png"])])
    for manifests in ([ours, others], [others, ours]):
        found = candidates_of(files, feedback=False, seed=1, trained=trained_on(base, manifests))
        assert len(found.out) == out


def test_what_was_chosen_is_read_as_it_was(tmp_path: Path) -> None:
    files = of_val(tmp_path, [row(number, f"c{number % 7}") for number in range(240)])
    found, folder = chosen_from(files), tmp_path / "chosen"
    choice = choice_of("mine", files, found, halved=True)
    assert (choice.rows, choice.groups, choice.all_groups, choice.feedback) == (120, 120, 120, True)
    folder.mkdir()
    write_account(folder / "account.json", choice)
    write_lines(folder / "rows.jsonl", found.lines)
    write_lines(folder / "left_out.jsonl", found.out)
    assert read_candidates(folder, files) == found
    write_account(folder / "account.json", structs.replace(choice, rows_digest="other"))
    with pytest.raises(VlmflowError, match="its rows were chosen from another"):
        read_candidates(folder, files)


CHOICE = some_choice(groups_without_echo=99)


@pytest.mark.parametrize(
    ("require", "change", "said"),
    [
        ("learned", {}, "rows without echo that can judge have 99 different pictures or questions, and 100 are needed"),
        ([{"sees": "not_worse"}, "learned"], {}, "left out are 3 rows without a wrong answer before the right one"),
        ("learned", {"groups_without_echo": 100}, None),
        ("learned", {"feedback": False}, None),
        ("learned", {"feedback": False, "groups": 99}, "its rows that can judge have 99"),
        ("uses_feedback", {}, None),
        ("uses_feedback", {"groups": 99}, "uses_feedback cannot be shown on val of data set fire"),
        ("not_worse", {"groups": 9}, None),
        ({"sees": "not_worse"}, {"groups": 9}, None),
        (None, {"groups": 9}, None),
    ],
)
def test_a_run_that_cannot_show_what_is_required_is_refused(
    require: Requirements, change: dict[str, int], said: str | None
) -> None:
    choice = structs.replace(CHOICE, **change)
    if said is None:
        refuse_too_few(choice, require)
        return
    with pytest.raises(VlmflowError) as error:
        refuse_too_few(choice, require)
    assert said in str(error.value)


SEARCH = ChosenBy(search="s", trial=3, trials=12, study="0" * 64, settings={})


@pytest.mark.parametrize(
    ("chosen_by", "trials", "said"),
    [
        (None, 1, "Val also chose the checkpoint, by 20 evaluations: this flatters it."),
        (
            SEARCH,
            12,
            "Val also chose the checkpoint, by 20 evaluations, and its settings, of 12 trials of a search: this "
            "flatters it.",
        ),
    ],
)
def test_evaluations_and_trials_are_counted(tmp_path: Path, chosen_by: ChosenBy | None, trials: int, said: str) -> None:
    report = structs.replace(some_report(), eval_losses=[(step, 1.0) for step in range(20)])
    write_account(tmp_path / "report.json", report)
    found = also_chose(tmp_path, chosen_by)
    assert found == AlsoChose(20, trials)
    assert found.in_words == said


def test_too_few_rows_of_a_half_name_the_other() -> None:
    few, none = (Verdict(name, False, "Said.") for name in (TOO_FEW, NO_GAIN))
    halved = {"other_half": 1200, "no_wrong": 3}
    other = "Said. Val's other 1,200 rows chose the checkpoint, so they cannot judge it."
    assert with_how_val_was_used(few, None, halved) == other
    assert with_how_val_was_used(few, None, {"no_wrong": 3}) == with_how_val_was_used(none, None, halved) == "Said."
    chose = AlsoChose(20, 1)
    assert with_how_val_was_used(none, chose, {}) == f"Said. {chose.in_words}"
