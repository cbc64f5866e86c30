"""Rows that are longer than a run allows, and the micro-batches of the others, on given lengths."""

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_stats
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.fit import OverLong, fit_rows, in_words
from vlmflow.lengths.steps import FEWEST_TOKENS, Planner, Step
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


KINDS = {
    "fire": lambda draw, most: round(draw.gauss(616, 200)),
    "uniform": lambda draw, most: draw.randint(10, most),
    "long tail": lambda draw, most: round(200 * draw.paretovariate(1.1)),
    "short and long": lambda draw, most: draw.choice([300, most - 1]),
    "exponential": lambda draw, most: round(draw.expovariate(1 / 900)),
}


def drawn(seed: int) -> tuple[Planner, int]:
    """Return a planner of random rows, of at most a micro-batch each; and the rows of a process."""
    draw = random.Random(seed)
    processes, each, most = draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 64]), draw.choice([8192, 16384, 32768])
    length = KINDS[draw.choice(list(KINDS))]
    sizes = [min(most, max(5, length(draw, most))) for _ in range(processes * each)]
    return Planner(sizes, processes, most), each


def check(planner: Planner, step: Step, rows: int) -> None:
    """Check that each row is in one micro-batch, none is too large, and processes have equally many."""
    assert sorted(row for batches in step for batch in batches for row in batch) == list(range(rows))
    assert len(step) == planner.processes
    assert len({len(batches) for batches in step}) == 1
    for batch in (batch for batches in step for batch in batches):
        assert batch
        assert len(batch) == 1 or planner.tokens(batch) <= planner.most


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_is_near_the_least_that_any_could_cost(seed: int) -> None:
    """Within a tenth; a row that fills a micro-batch may leave little to another one, which costs its least."""
    planner, each = drawn(seed)
    rows = planner.processes * each
    step = planner.step(range(rows))
    check(planner, step, rows)
    assert step == planner.step(random.Random(seed).sample(range(rows), rows)), "the order of rows does not matter"
    cost = sum(planner.cost(together) for together in zip(*step, strict=True))
    sizes = planner.sizes
    least = max(sum(sizes) / planner.processes, max(sizes), FEWEST_TOKENS)
    spare = FEWEST_TOKENS if max(sizes) > planner.most / 2 else 0
    assert cost <= 1.1 * least + spare


@pytest.mark.parametrize("seed", range(40))
def test_padded_rows_are_of_similar_length(seed: int) -> None:
    planner, each = drawn(seed)
    padded = Planner(planner.sizes, planner.processes, planner.most, padded=True)
    rows = planner.processes * each
    step = padded.step(range(rows))
    check(padded, step, rows)
    one_each = sum(
        max(FEWEST_TOKENS, *planner.sizes[at : at + planner.processes]) for at in range(0, rows, planner.processes)
    )
    assert sum(padded.cost(together) for together in zip(*step, strict=True)) <= one_each


def test_rows_above_the_number_and_few_rows_stand_alone() -> None:
    planner = Planner([20_000, 500, 500, 9_000], 2, 8192)
    step = planner.step([0, 1, 2, 3])
    check(planner, step, 4)
    assert sorted(map(len, (batch for batches in step for batch in batches))) == [1, 1, 2] or len(step[0]) == 2
    assert planner.step([1, 2]) == [[[1]], [[2]]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "processes"), [(5, 2), (3, 2), (1, 2), (9, 4), (33, 2)])
@pytest.mark.parametrize("tokens", [10, 600, 1025])
def test_an_evaluation_may_have_any_number_of_rows(rows: int, processes: int, tokens: int, padded: bool) -> None:
    step = Planner([tokens] * rows, processes, 1024, padded).step(range(rows))
    assert sorted(row for batches in step for batch in batches for row in batch) == list(range(rows))
    counts = [len(batches) for batches in step]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) == 1 or tokens * len(batch) <= 1024 for batches in step for batch in batches)


def test_an_evaluation_of_rows_that_do_not_fit_together_is_planned_in_seconds() -> None:
    begun = time.thread_time()
    step = Planner([4200] * 20_000, 1, 8192).step(range(20_000))
    assert len(step[0]) == 20_000
    assert time.thread_time() - begun < 5  # minutes, if micro-batches grew one by one


def test_three_epochs_of_a_hundred_thousand_rows_are_planned_in_seconds() -> None:
    draw = random.Random(1)
    planner = Planner([max(5, round(draw.gauss(616, 300))) for _ in range(100_000)], 4, 16_384)
    order = list(range(100_000))
    begun = time.thread_time()
    for _ in range(3):
        draw.shuffle(order)
        for at in range(0, len(order), 128):
            planner.step(order[at : at + 128])
    assert time.thread_time() - begun < 5
