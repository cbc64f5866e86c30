"""What a mixture draws of its data sets, what it keeps out because one of them holds it out, and the halves of val."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_stats
from made_rows import made_row
from simulated_evaluations import row as row_of_split
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import FEWEST_GROUPS
from vlmflow.pictures.manifest import PictureCounts, PictureEntry, contents_digest
from vlmflow.rows.chat import Turn
from vlmflow.rows.holdout import FEWEST_TO_HALVE, group_of, half_of
from vlmflow.rows.mixture import mix_rows
from vlmflow.rows.mixture_files import SPLITS, Member
from vlmflow.rows.stats import MIXTURE, SplitCounts, Stats


def row(
    split: str, number: int, *pictures: str, prompt: str | None = None, answers: int = 1, **keys: Any
) -> dict[str, Any]:
    """A validated row; the prompt is its own unless one is given."""
    turns = []
    for place in range(answers):
        asked = prompt or f"question {split} {number}"
        turns.append({"from": "human", "value": "<image>\n" * len(pictures) + asked if not place else "And now?"})
        turns.append({"from": "gpt", "value": f"answer {number}.{place}"})
    return {
        "id": f"{split}-{number:07}-0123abcd",
        "source": "unknown",
        "images": list(pictures),
        "attempts": list(range(1, answers + 1)),
        "scores": [],
        "conversations": turns,
    } | keys


def some(split: str, count: int) -> list[dict[str, Any]]:
    return [row(split, number) for number in range(count)]


def member(
    folder: Path,
    name: str,
    drawn: str,
    rows: dict[str, list[dict[str, Any]]],
    pictures: dict[str, str] | None = None,
    **stats: Any,
) -> Member:
    """A data set as its own gate leaves it. pictures: the content of each, by name; two may have the same."""
    data = folder / name
    data.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (data / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows.get(split, [])))
    digests = {name: hashlib.sha256(content.encode()) for name, content in (pictures or {}).items()}
    manifest = folder / f"{name}.manifest.jsonl"
    entries = [
        PictureEntry(path=one, rows=1, name=one, sha256=digest.hexdigest(), format="PNG")
        for one, digest in digests.items()
    ]
    manifest.write_bytes(msgspec.json.Encoder().encode_lines(entries))
    named = {name for split in ("train", "val") for one in rows.get(split, []) for name in one["images"]}
    recorded = {f"{split}.jsonl": sha256_of(data / f"{split}.jsonl") for split in SPLITS}
    recorded["pictures"] = contents_digest({name: digests[name].digest() for name in named})
    account = some_stats(dataset=name, digests=recorded, **({"kind": "messages", "modality": None} | stats))
    return Member(name, drawn, data, account, [manifest] if pictures else [])


def mixed(folder: Path, *members: Member, seed: int = 1) -> Stats:
    out = folder / "blend"
    return mix_rows(members, out, {split: folder / "images" / f"{split}.jsonl" for split in SPLITS}, seed)


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "blend" / f"{name}.jsonl").read_bytes().splitlines()]


def ids(folder: Path, split: str, name: str) -> set[str]:
    return {one["id"] for one in written(folder, split) if one["id"].startswith(f"{name}:")}


def test_a_share_of_a_data_set_is_drawn_and_more_includes_less(tmp_path: Path) -> None:
    def drawn(amount: str, seed: int = 1) -> set[str]:
        mixed(tmp_path, member(tmp_path, "a", amount, {"train": some("train", 400), "val": some("val", 3)}), seed=seed)
        return ids(tmp_path, "train", "a")

    third, half = drawn("33.5%"), drawn("50 %")
    assert 100 < len(third) < 170
    assert third < half < drawn("all")
    assert drawn("33.5%", seed=2) != third


def test_a_number_of_rows_are_the_first_of_the_same_order(tmp_path: Path) -> None:
    def drawn(amount: str) -> set[str]:
        mixed(tmp_path, member(tmp_path, "a", amount, {"train": some("train", 50), "val": some("val", 3)}))
        return ids(tmp_path, "train", "a")

    one, seven, fifty = drawn("1 row"), drawn("7 rows"), drawn("50 rows")
    assert (len(one), len(seven), len(fifty)) == (1, 7, 50)
    assert one < seven < fifty
    share = drawn("20%")
    assert share < drawn(f"{len(share) + 1} rows"), "a share is of the same order"


def test_another_data_set_changes_nothing_of_what_is_drawn(tmp_path: Path) -> None:
    rows = {"train": some("train", 60), "val": some("val", 3)}
    for amount in ("30%", "20 rows"):
        mixed(tmp_path, member(tmp_path, "a", amount, rows))
        alone = ids(tmp_path, "train", "a")
        others = [row("train", number, prompt=f"other {number}") for number in range(9)]
        mixed(tmp_path, member(tmp_path, "b", "all", {"train": others}), member(tmp_path, "a", amount, rows))
        assert ids(tmp_path, "train", "a") == alone
        assert len(ids(tmp_path, "train", "b")) == 9


def test_repeated_rows_have_ids_of_their_own_with_their_ends(tmp_path: Path) -> None:
    rows = [row("train", number) | {"id": f"train-{number:07}-0123abcd-a2"} for number in range(40)]
    stats = mixed(tmp_path, member(tmp_path, "a", "250%", {"train": rows, "val": some("val", 3)}))
    found = [one["id"] for one in written(tmp_path, "train")]
    assert len(found) == len(set(found)) == stats.examples["train"]
    times = Counter(identity.rpartition(":")[2] for identity in found)
    assert Counter(times.values()).keys() == {2, 3}
    assert all(identity.endswith("-a2") for identity in found)
    assert stats.train == SplitCounts(40, 40, {}), "a row counts once, however often it is written"
    assert found[0] == "a:train-0000000-0123abcd-a2"
    assert "a:2:train-0000000-0123abcd-a2" in found


def test_more_rows_than_there_are_is_refused_with_how_many_there_are(tmp_path: Path) -> None:
    taken = row("test", 0, prompt="question train 3")
    one = member(tmp_path, "a", "10 rows", {"train": some("train", 10), "val": some("val", 1)})
    other = member(tmp_path, "b", "all", {"train": some("x", 3), "test": [taken]})
    with pytest.raises(VlmflowError, match=r"datasets\.NAME\.mix\.a: 10 rows, but .* has 9 rows that no data set"):
        mixed(tmp_path, one, other)
    assert not (tmp_path / "blend" / "train.jsonl").exists()


def test_what_any_data_set_holds_out_is_in_no_train_row(tmp_path: Path) -> None:
    """A picture by its content, whatever its name; a prompt of a row without one."""
    pictures = {f"{number}.png": str(number) for number in range(8)}
    a = member(
        tmp_path,
        "a",
        "all",
        {
            "train": [
                *(row("train", 0, "0.png"), row("train", 1, "2.png"), row("train", 2, prompt="Shared?")),
                *(row("train", 3, "3.png", source="gqa"), row("train", 4, "4.png", prompt="Shared?")),
            ],
            "val": [row("val", 0, "6.png"), row("val", 1, "7.png")],
            "test": [row("test", 0, "5.png")],
        },
        pictures,
    )
    theirs = {"same-as-0.png": "0", "same-as-2.png": "2", "same-as-6.png": "6", "own.png": "own"}
    b = member(
        tmp_path,
        "b",
        "all",
        {
            "train": [row("train", 0, "own.png"), row("train", 1, "same-as-6.png")],
            "val": [row("val", 0, prompt="Shared?"), row("val", 1, "same-as-2.png")],
            "test": [row("test", 0, "same-as-0.png"), row("test", 1, "same-as-6.png")],
        },
        theirs,
    )
    stats = mixed(tmp_path, a, b)
    kept = [one["id"] for one in written(tmp_path, "train")]
    assert kept == ["a:train-0000003-0123abcd", "a:train-0000004-0123abcd", "b:train-0000000-0123abcd"]
    assert [one["id"] for one in written(tmp_path, "val")] == [
        *("a:val-0000001-0123abcd", "b:val-0000000-0123abcd", "b:val-0000001-0123abcd")
    ]
    assert [one["id"] for one in written(tmp_path, "test")] == [
        *("a:test-0000000-0123abcd", "b:test-0000000-0123abcd", "b:test-0000001-0123abcd")
    ]
    assert stats.members["a"].train == SplitCounts(5, 2, {"in_test_split": 1, "in_val_split": 2})
    assert stats.members["a"].val == SplitCounts(2, 1, {"in_test_split": 1})
    assert stats.members["b"].train == SplitCounts(2, 1, {"in_test_split": 1})
    assert stats.members["b"].examples == {"train": 1, "val": 2, "test": 2}
    assert stats.train == SplitCounts(7, 3, {"in_test_split": 2, "in_val_split": 2})
    assert stats.val == SplitCounts(4, 3, {"in_test_split": 1})
    assert stats.test == SplitCounts(3, 3, {})
    quarantined = written(tmp_path, "quarantine")
    assert len(quarantined) == 5
    details = [(one["file"], one["row"], one["raw"]["images"], one["detail"]) for one in quarantined]
    of_a, of_b = (str(one.folder / "train.jsonl") for one in (a, b))
    assert (of_b, 1, ["same-as-6.png"], "b: same-as-6.png is a picture of the mixture's test split") in details
    assert (of_a, 2, [], "a: its prompt is one of the mixture's val split") in details


def test_each_of_a_rows_pictures_counts(tmp_path: Path) -> None:
    rows = {"train": [row("train", 0, "1.png", "2.png"), row("train", 1, "1.png", "3.png")], "val": some("val", 1)}
    a = member(tmp_path, "a", "all", rows, {f"{number}.png": str(number) for number in range(1, 4)})
    b = member(
        tmp_path,
        "b",
        "all",
        {"train": some("x", 1), "test": [row("test", 0, "x.png", "y.png")]},
        {"x.png": "7", "y.png": "2"},
    )
    stats = mixed(tmp_path, a, b)
    assert ids(tmp_path, "train", "a") == {"a:train-0000001-0123abcd"}
    assert stats.members["a"].train == SplitCounts(2, 1, {"in_test_split": 1})
    (out,) = written(tmp_path, "quarantine")
    assert out["detail"] == "a: 2.png is a picture of the mixture's test split"


def test_pictures_have_the_names_of_the_store_of_the_mixture(tmp_path: Path) -> None:
    rows = {
        "train": [row("train", 0, "x/1.png", source="gqa"), row("train", 1, "x/1.png"), row("train", 2, "x/2.png")],
        "val": [row("val", 0, "3.png")],
    }
    pictures = {"x/1.png": "1", "x/2.png": "2", "3.png": "3", "nobody.png": "4"}
    one = member(tmp_path, "a", "all", rows, pictures)
    stats = mixed(tmp_path, one, member(tmp_path, "b", "all", {"train": some("train", 1)}))
    assert [one["images"] for one in written(tmp_path, "train")] == [["a/x/1.png"], ["a/x/1.png"], ["a/x/2.png"], []]
    assert [one["source"] for one in written(tmp_path, "train")] == ["a/gqa", "a", "a", "b"]
    manifests = {
        split: [json.loads(line) for line in (tmp_path / "images" / f"{split}.jsonl").read_text().splitlines()]
        for split in SPLITS
    }
    named = {split: [(one["path"], one["name"], one["rows"]) for one in some] for split, some in manifests.items()}
    assert named == {
        "train": [("a/x/1.png", "a/x/1.png", 2), ("a/x/2.png", "a/x/2.png", 1)],
        "val": [("a/3.png", "a/3.png", 1)],
        "test": [],
    }
    contents = {
        f"a/{name}": hashlib.sha256(pictures[name].encode()).digest() for name in ("x/1.png", "x/2.png", "3.png")
    }
    assert stats.digests["pictures"] == contents_digest(contents)
    assert stats.digests["train.jsonl"] == sha256_of(tmp_path / "blend" / "train.jsonl")
    assert stats.pictures["train"] == PictureCounts(2, 2, {"PNG": 2})
    assert stats.kept_by_source["train"] == {"a": 2, "a/gqa": 1, "b": 1}
    assert (stats.kind, stats.modality, stats.kinds) == (MIXTURE, None, ["messages"])
    assert stats.made_of == "mixture of a (all), b (all)"


@pytest.mark.parametrize(
    ("first", "second", "marks", "last_answer_only"),
    [
        ("all", "last", [None, None, False, True], False),
        ("last", "last", [None, None, None, None], True),
        ("all", "all", [None, None, None, None], False),
    ],
)
def test_rows_that_train_their_last_answer_alone_say_so_beside_others(
    tmp_path: Path, first: str, second: str, marks: list[bool | None], last_answer_only: bool
) -> None:
    """One run has one `loss_scale`."""

    def of(name: str, train_on: str) -> Member:
        used = msgspec.structs.replace(some_stats().settings, train_on=train_on)
        rows = {"train": [row("train", 0, answers=2, scores=[3, 9]), row("train", 1)], "val": some("val", 1)}
        return member(tmp_path, name, "all", rows, settings=used)

    stats = mixed(tmp_path, of("a", first), of("b", second))
    long = [one for one in written(tmp_path, "train") if len(one["attempts"]) == 2]
    found = [turn.get("loss") for one in long for turn in one["conversations"] if turn["from"] == "gpt"]
    assert found == marks
    assert all("loss" not in turn for one in long for turn in one["conversations"] if turn["from"] == "human")
    assert stats.last_answer_only is last_answer_only
    trains_all = 2 - (first == "last") - (second == "last")
    assert stats.trained_characters == ({3: 10 * trains_all} if trains_all else {}) | {9: 20}


def test_what_is_said_last_is_trained_with_its_calls(tmp_path: Path) -> None:
    """What follows the last question or response, as ms-swift's `last_round` trains it."""
    speakers = ["human", "gpt", "human", "function_call", "observation", "gpt", "function_call"]
    turns = [{"from": speaker, "value": f"{speaker} {place}"} for place, speaker in enumerate(speakers)]
    rows = {"train": [row("train", 0) | {"conversations": turns, "attempts": [1, 2, 3]}], "val": some("val", 1)}
    last = member(tmp_path, "a", "all", rows, settings=msgspec.structs.replace(some_stats().settings, train_on="last"))
    mixed(tmp_path, last, member(tmp_path, "b", "all", {"train": some("x", 1)}))
    found = [turn.get("loss") for turn in written(tmp_path, "train")[0]["conversations"]]
    assert found == [None, False, None, False, None, True, True]


def test_a_timestep_form_beside_another_is_marked(tmp_path: Path) -> None:
    rows = {"train": [row("train", 0, answers=2)], "val": some("val", 1)}
    timestep = member(tmp_path, "steps", "all", rows, kind="fire", form="timestep")
    stats = mixed(tmp_path, timestep, member(tmp_path, "chats", "all", rows | {"val": []}))
    assert [turn.get("loss") for turn in written(tmp_path, "train")[0]["conversations"]] == [None, False, None, True]
    assert (stats.form, stats.last_answer_only) == ("trajectory", False)
    assert stats.scored == ["steps"], "messages have no min_score"
    assert mixed(tmp_path, timestep).form == "timestep"


def test_a_data_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    val = {"val": some("val", 2)}
    with pytest.raises(VlmflowError, match="none of the 2 train rows of b is drawn"):
        mixed(
            tmp_path,
            member(tmp_path, "a", "all", {"train": some("train", 2), **val}),
            member(tmp_path, "b", "0.0001%", {"train": some("other", 2)}),
        )
    with pytest.raises(VlmflowError, match=r"val\.jsonl would be empty"):
        mixed(tmp_path, member(tmp_path, "a", "all", {"train": some("train", 2), **val, "test": some("val", 2)}))


def test_pictures_that_are_not_those_of_the_account_are_refused(tmp_path: Path) -> None:
    rows = {"train": [row("train", 0, "1.png")], "val": [row("val", 0, "2.png")]}
    one = member(tmp_path, "a", "all", rows, {"1.png": "1", "2.png": "2"})
    (manifest,) = one.manifests
    text = manifest.read_text()
    manifest.write_text(text.replace(hashlib.sha256(b"1").hexdigest(), "0" * 64))
    with pytest.raises(VlmflowError, match=r"records other digests .*\n.*vlmflow refresh-pictures FILE a"):
        mixed(tmp_path, Member("a", "all", one.folder, one.stats, one.manifests))
    manifest.write_text(text.splitlines()[0])
    with pytest.raises(VlmflowError, match=r"no image manifest has picture '2\.png'"):
        mixed(tmp_path, Member("a", "all", one.folder, one.stats, one.manifests))


GROUPS = [group_of(row_of_split(number, "c"), {}) for number in range(301)]


def test_each_group_is_in_one_half() -> None:
    chooses, judges = half_of(GROUPS, "chooses"), half_of(GROUPS, "judges")
    assert chooses is not None
    assert judges is not None
    assert chooses | judges == set(GROUPS)
    assert not chooses & judges
    assert (len(chooses), len(judges)) == (150, 151)


def test_the_halves_depend_on_the_groups_alone() -> None:
    """Neither on the order of rows, nor on how many a picture has."""
    assert half_of(GROUPS[::-1] + GROUPS[:50], "judges") == half_of(GROUPS, "judges")
    first = half_of(GROUPS, "judges") or frozenset()
    assert 50 < sum(group in first for group in GROUPS[:150]) < 100, "not the first rows, nor the last ones"


def test_a_small_split_is_not_halved() -> None:
    """A half must be large enough for an interval."""
    assert FEWEST_TO_HALVE == 2 * FEWEST_GROUPS
    assert half_of(GROUPS[: FEWEST_TO_HALVE - 1], "judges") is None
    assert len(half_of(GROUPS[:FEWEST_TO_HALVE], "judges") or []) == FEWEST_GROUPS


def test_rows_of_the_same_picture_or_question_are_one_group() -> None:
    same = {"a.jpg": "1" * 64, "copy.jpg": "1" * 64, "b.jpg": "2" * 64}
    a, copy, b = (group_of(row_of_split(number, "c", images=[name]), same) for number, name in enumerate(same))
    assert a == copy != b
    both, turned = (
        group_of(row_of_split(1, "c", images=names), same) for names in (["a.jpg", "b.jpg"], ["b.jpg", "copy.jpg"])
    )
    assert both == turned not in {a, b}, "the set of a row's pictures counts, as in the splits"
    assert (
        group_of(row_of_split(1, "c"), {}) == group_of(row_of_split(1, "d"), {}) != group_of(row_of_split(2, "c"), {})
    )


def test_rows_that_all_have_one_prompt_are_told_apart_by_their_answers() -> None:
    """As the splits do: every row of `kind: text` has the same question."""
    asked = [
        made_row(f"t-{number}", [Turn("human", "Continue."), Turn("gpt", f"Text {number}.")], "s")
        for number in range(3)
    ]
    assert len({group_of(row, {}) for row in asked}) == 1
    assert len({group_of(row, {}, one_prompt=True) for row in asked}) == 3
