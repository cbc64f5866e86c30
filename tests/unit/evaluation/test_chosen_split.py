"""A split whose files do not fit together is refused before a model is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from made_cases import row
from made_stats import some_stats
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import ChosenSplit, SplitFiles, choose_from_split
from vlmflow.rows.holdout import Part, group_of, half_of
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.stats import MIXTURE, MemberStats, SplitCounts


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
    controls = {each.donor.row.id for each in chosen("judges").rows if each.donor}
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
