"""Rows that are longer than a run allows, with given lengths: nothing is measured here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_stats import some_stats
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.fit import OverLong, fit_rows, in_words
from vlmflow.lengths.summary import FittedRows
from vlmflow.rows.holdout import group_of, half_of
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData

TOKENS = {"train": [50, 101, 100, 300], "val": [100]}


@pytest.fixture
def fit(tmp_path: Path) -> Callable[[OverLong], FittedRows]:
    """Fit rows of TOKENS tokens each into 100, from `tmp_path` into its folder `fitted`."""
    return fitting(tmp_path, TOKENS)


def fitting(tmp_path: Path, tokens_of: Mapping[str, list[int]], **settings: Any) -> Callable[[OverLong], FittedRows]:
    for split, tokens in tokens_of.items():
        lengths, start = [], 0
        with (tmp_path / f"{split}.jsonl").open("wb") as rows:
            for number, each in enumerate(tokens):
                line = msgspec.json.encode(row(f"{split}-{number}"))
                rows.write(line + b"\n")
                lengths.append(RowLength(f"{split}-{number}", start, start + len(line), each))
                start += len(line) + 1
        (tmp_path / f"{split}.lengths.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lengths))
    stats = some_stats(
        dataset="talks", form="conversation", examples={split: len(tokens) for split, tokens in tokens_of.items()}
    )
    stats.settings = msgspec.structs.replace(stats.settings, **settings)
    (tmp_path / "fitted").mkdir()

    def fit(over_long: OverLong) -> FittedRows:
        data = TrainingData(tmp_path / "train.jsonl", tmp_path / "val.jsonl", tmp_path, "digest", False)
        lengths = {split: tmp_path / f"{split}.lengths.jsonl" for split in tokens_of}
        return fit_rows(data, stats, lengths, pytest.fail, 100, over_long, tmp_path / "fitted")

    return fit


def row(row_id: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": f"Say {row_id}."}, {"from": "gpt", "value": "It."}]
    return {"id": row_id, "images": [], "source": "talks", "attempts": [1], "scores": [], "conversations": turns}


def ids(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_bytes().splitlines()]


def test_rows_that_do_not_fit_are_refused_by_name(fit: Callable[[OverLong], FittedRows], tmp_path: Path) -> None:
    with pytest.raises(VlmflowError) as refusal:
        fit("refuse")
    assert refusal.value.cause == (
        "2 of 5 rows have more than train.max_length = 100 tokens: train-3 (300 tokens), train-1 (101 tokens)"
    )
    assert "raise runs.NAME.train.max_length to 300" in refusal.value.next_step
    assert not (tmp_path / "fitted" / "account.json").exists()


@pytest.mark.parametrize(("train_on", "last"), [("all", False), ("last", True)])
def test_the_account_says_whether_only_last_answers_are_trained(tmp_path: Path, train_on: str, last: bool) -> None:
    """The training stages know it from there alone."""
    account = fitting(tmp_path, TOKENS, train_on=train_on)("leave_out")
    assert account.last_answer_only is last


def test_rows_that_are_left_out_are_counted_and_named(fit: Callable[[OverLong], FittedRows], tmp_path: Path) -> None:
    account = fit("leave_out")
    assert (account.train.rows_in, account.train.left_out, account.train.shortened) == (4, 2, 0)
    assert ids(tmp_path / "fitted" / "train.jsonl") == ["train-0", "train-2"]
    assert ids(tmp_path / "fitted" / "over_long.jsonl") == ["train-1", "train-3"]


def test_half_of_a_large_val_judges_and_is_never_given_to_the_training(tmp_path: Path) -> None:
    """Rows of train are not set aside, and a row of the other half may be as long as it likes."""
    fit = fitting(tmp_path, {"train": [50] * 201, "val": [100, 300] * 100})
    groups = {
        f"val-{number}": group_of(msgspec.convert(row(f"val-{number}"), ShareGptRow), {}) for number in range(200)
    }
    judges = half_of(groups.values(), "judges") or frozenset()
    long = [name for name, group in groups.items() if group not in judges and int(name[4:]) % 2]
    account = fit("leave_out")
    assert (account.train.rows_in, account.train.judging, account.train.lengths.rows) == (201, 0, 201)
    assert (account.val.rows_in, account.val.judging, account.val.left_out) == (200, 100, len(long))
    assert account.val.lengths.rows == 100 - len(long)
    assert account.halved
    kept = [name for name, group in groups.items() if group not in judges and name not in long]
    assert ids(tmp_path / "fitted" / "val.jsonl") == kept
    assert ids(tmp_path / "fitted" / "over_long.jsonl") == long
    assert in_words(account).endswith(f"val: 200 rows, 0 shortened, {len(long)} left out, 100 set aside to judge")


def test_a_small_val_is_given_whole(tmp_path: Path) -> None:
    account = fitting(tmp_path, {"train": [50], "val": [50] * 199})("refuse")
    assert (account.val.lengths.rows, account.val.judging, account.halved) == (199, 0, False)


def test_lengths_of_other_rows_are_refused(fit: Callable[[OverLong], FittedRows], tmp_path: Path) -> None:
    """Two swapped rows no longer have their own lengths."""
    lines = (tmp_path / "train.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"Say ", b"Say again: ")
    (tmp_path / "train.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(VlmflowError, match=r"train\.lengths\.jsonl, line 3: not the length of this line of .*train"):
        fit("leave_out")
