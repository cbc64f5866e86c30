"""What happens to rows that are longer than a run allows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_rows import fire_row, fire_rows, training_form
from vlmflow.config.data_settings import RowLimits
from vlmflow.config.model import check_config
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths import fit as fit_module
from vlmflow.lengths.against_swift import check_lengths
from vlmflow.lengths.count import TokenCounter, lines_of, measure_rows, read_lengths
from vlmflow.lengths.fit import OverLong, fit_rows, in_words, without_oldest
from vlmflow.lengths.measure import refuse_other_lengths
from vlmflow.lengths.summary import FittedRows, fitted_data
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import validated_data
from vlmflow.swift.arguments import BaseModel
from vlmflow.swift.chat_form import ChatForm
from workflow_runs import RUN, copy_folder, snakemake


@pytest.fixture(scope="module")
def timestep(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sample's timestep rows with a system prompt, made by the real rules, and their lengths."""
    folder = tmp_path_factory.mktemp("timestep")
    for name in ("sample", "tiny-model"):
        (folder / name).symlink_to(demo_run / name)
    (folder / "quick.yaml").write_text("datasets: {fire-timestep: {system_prompt: Look closely.}}")
    snakemake(folder, "data/fire-timestep/stats.json")
    for split in ("train", "val"):
        rows = list(measure_rows(folder / "data" / "fire-timestep" / f"{split}.jsonl", counter(folder), 1))
        (folder / f"{split}.lengths.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    return folder


def manifest(folder: Path) -> Path:
    return folder / "images" / "fire-timestep" / "train.jsonl"


def counter(folder: Path) -> TokenCounter:
    return TokenCounter(folder / "tiny-model", read_picture_manifest(manifest(folder)), 64, ChatForm.of({}, True))


def fit(timestep: Path, target: Path, max_length: int, over_long: OverLong) -> FittedRows:
    data = timestep / "data" / "fire-timestep"
    files = (data / "train.jsonl", data / "val.jsonl", data / "stats.json")
    target.mkdir()
    return fit_rows(
        validated_data(*files, timestep / "stores" / "pictures", [manifest(timestep)]),
        read_account(files[2], Stats),
        {split: timestep / f"{split}.lengths.jsonl" for split in ("train", "val")},
        lambda: counter(timestep),
        max_length,
        over_long,
        target,
    )


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, file.read_bytes().splitlines())}


def tokens_of(timestep: Path) -> dict[str, int]:
    return {
        row.id: row.tokens for split in ("train", "val") for row in read_lengths(timestep / f"{split}.lengths.jsonl")
    }


def a_length_within(timestep: Path) -> int:
    """Return a max_length that some of the rows do not fit, and each split has rows that do."""
    tokens = sorted(tokens_of(timestep).values())
    return tokens[len(tokens) * 4 // 5]


def test_rows_that_fit_are_passed_on_byte_by_byte(timestep: Path, tmp_path: Path) -> None:
    longest = max(tokens_of(timestep).values())
    account = fit(timestep, tmp_path / "fitted", longest, "refuse")
    for split in ("train", "val"):
        data = timestep / "data" / "fire-timestep" / f"{split}.jsonl"
        assert (tmp_path / "fitted" / f"{split}.jsonl").read_bytes() == data.read_bytes()
        lengths = list(read_lengths(tmp_path / "fitted" / f"{split}.lengths.jsonl"))
        assert lengths == list(read_lengths(timestep / f"{split}.lengths.jsonl"))
        assert (account.splits[split].left_out, account.splits[split].shortened) == (0, 0)
    assert (tmp_path / "fitted" / "over_long.jsonl").read_bytes() == b""
    assert fitted_data(
        tmp_path / "fitted", longest, timestep / "stores" / "pictures", [manifest(timestep)]
    ).last_answer_only


def test_over_long_rows_are_counted_and_named_before_training(timestep: Path, tmp_path: Path) -> None:
    """By default the run stops before it requests a GPU; no row is cut or dropped silently."""
    tokens = tokens_of(timestep)
    longest = max(tokens, key=tokens.__getitem__)
    limit = a_length_within(timestep)
    over = sum(each > limit for each in tokens.values())
    expected = rf"{over} of {len(tokens)} rows have more than train\.max_length = {limit} tokens: "
    with pytest.raises(VlmflowError, match=expected) as error:
        fit(timestep, tmp_path / "fitted", limit, "refuse")
    assert f"({tokens[longest]} tokens)" in error.value.cause
    assert f"raise runs.NAME.train.max_length to {tokens[longest]}" in error.value.next_step
    assert not (tmp_path / "fitted" / "account.json").exists()


def test_rows_left_out_are_named_with_their_length(timestep: Path, tmp_path: Path) -> None:
    tokens, limit = tokens_of(timestep), a_length_within(timestep)
    account = fit(timestep, tmp_path / "fitted", limit, "leave_out")
    over = {row_id for row_id, each in tokens.items() if each > limit}
    named = rows_of(tmp_path / "fitted" / "over_long.jsonl")
    assert {row_id: row["tokens"] for row_id, row in named.items()} == {row_id: tokens[row_id] for row_id in over}
    assert {row["outcome"] for row in named.values()} == {"left_out"}
    kept = {row_id for split in ("train", "val") for row_id in rows_of(tmp_path / "fitted" / f"{split}.jsonl")}
    assert kept == set(tokens) - over
    for rows in account.splits.values():
        assert rows.rows_in == rows.lengths.rows + rows.left_out
    assert f"{account.train.left_out:,} left out" in in_words(account)


def test_shortened_rows_lose_their_oldest_attempts_and_nothing_else(timestep: Path, tmp_path: Path) -> None:
    """The target, the question and its picture remain; each row has as much of its history as fits."""
    tokens, limit = tokens_of(timestep), a_length_within(timestep)
    account = fit(timestep, tmp_path / "fitted", limit, "shorten")
    named = rows_of(tmp_path / "fitted" / "over_long.jsonl")
    shortened = {row_id: row for row_id, row in named.items() if row["outcome"] == "shortened"}
    assert len(shortened) == account.train.shortened + account.val.shortened > 0
    for split in ("train", "val"):
        before = rows_of(timestep / "data" / "fire-timestep" / f"{split}.jsonl")
        file = tmp_path / "fitted" / f"{split}.jsonl"
        for length in read_lengths(tmp_path / "fitted" / f"{split}.lengths.jsonl"):
            row = json.loads(lines_of(file, [length]))
            assert row["id"] == length.id
            assert length.tokens <= limit
            if length.id not in shortened:
                assert row == before[length.id]
                continue
            old, dropped = before[length.id], shortened[length.id]["attempts_dropped"]
            assert dropped > 0
            assert shortened[length.id]["tokens"] == tokens[length.id] > limit
            assert shortened[length.id]["fitted_tokens"] == length.tokens
            assert row["conversations"][0] == {"from": "system", "value": "Look closely."}
            assert row["conversations"][1]["value"].startswith("<image>\n"), "the question with its picture"
            old["conversations"][2 : 2 + 2 * dropped] = []
            old["attempts"][:dropped] = old["scores"][:dropped] = []
            assert lines_of(file, [length]) == msgspec.json.encode(old) + b"\n"
        again = list(measure_rows(file, counter(timestep), 1))
        assert again == list(read_lengths(tmp_path / "fitted" / f"{split}.lengths.jsonl"))


def test_shortened_rows_are_as_long_as_ms_swift_finds_them(timestep: Path, tmp_path: Path) -> None:
    """With a system turn before the question, and the question's picture."""
    folder, limit = tmp_path / "fitted", a_length_within(timestep)
    fit(timestep, folder, limit, "shorten")
    named = rows_of(folder / "over_long.jsonl")
    lengths = read_lengths(folder / "train.lengths.jsonl")
    shortened = [row for row in lengths if named.get(row.id, {}).get("outcome") == "shortened"][:12]
    assert all(row.picture_tokens for row in shortened)
    data = fitted_data(folder, limit, timestep / "stores" / "pictures", [manifest(timestep)])
    model = BaseModel(timestep / "tiny-model", "qwen3_vl", "digest")
    assert len(shortened) > 3
    assert check_lengths({folder / "train.jsonl": shortened}, data, model, 64, {}, 2)[:3] == (None, None, True)


@pytest.mark.parametrize("system_prompt", [None, "Look closely."])
def test_dropping_attempts_is_having_a_shorter_history(system_prompt: str | None) -> None:
    """A shortened row has exactly the bytes that the converter writes for a shorter history."""
    raw = json.dumps(fire_row(rounds=5)).encode()
    made = [
        fire_rows(training_form("timestep", rounds), RowLimits(), system_prompt)("t", 0, raw)[-1]
        for rounds in (None, 1)
    ]
    long, short = (as_line(row, row.images) for row in made)
    read = msgspec.json.decode(long, type=ShareGptRow)
    assert as_line(without_oldest(read, 3), read.images) == short
    assert as_line(read, read.images) == long, "the long row stays as it was"
    assert b'"attempts":[4,5],"scores":[5,10]' in short


def test_a_shortened_row_that_breaks_the_rules_stops_the_stage(
    timestep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard: such a row would be our own error, and must not be passed on."""

    def without_question(row: ShareGptRow, count: int) -> ShareGptRow:
        return msgspec.structs.replace(row, conversations=row.conversations[2:])

    monkeypatch.setattr(fit_module, "without_oldest", without_question)
    with pytest.raises(
        VlmflowError, match=r"row train-\S+, shortened by 1 attempts, is no longer a valid row: alternation"
    ):
        fit(timestep, tmp_path / "fitted", a_length_within(timestep), "shorten")


def test_a_limit_that_nothing_fits_is_refused(timestep: Path, tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"no row of the train split fits train\.max_length = 8") as error:
        fit(timestep, tmp_path / "fitted", 8, "leave_out")
    assert "raise runs.NAME.train.max_length" in error.value.next_step


def test_rows_that_changed_after_fitting_are_refused(timestep: Path, tmp_path: Path) -> None:
    pictures = timestep / "stores" / "pictures"
    longest = max(tokens_of(timestep).values())
    fit(timestep, tmp_path / "fitted", longest, "refuse")
    with pytest.raises(VlmflowError, match=f"fitted to {longest} tokens, the run's max_length is {longest - 1}"):
        fitted_data(tmp_path / "fitted", longest - 1, pictures)
    file = tmp_path / "fitted" / "val.jsonl"
    file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(VlmflowError, match="records other digests for these rows"):
        fitted_data(tmp_path / "fitted", longest, pictures, [manifest(timestep)])


def test_lengths_of_something_else_are_refused(demo_run: Path, tmp_path: Path) -> None:
    """Lengths of other rows, another model, budget or text; or changed since."""
    folder = copy_folder(demo_run / "lengths" / RUN, tmp_path / "lengths")
    model = copy_folder(demo_run / "tiny-model", tmp_path / "model")
    lengths = {split: folder / f"{split}.jsonl" for split in ("train", "val")}
    stats = read_account(demo_run / "data" / "fire" / "stats.json", Stats)

    def refuse(stats: Stats = stats, budget: int = 64, text_args: dict[str, Any] | None = None) -> None:
        refuse_other_lengths(folder / "summary.json", lengths, stats, model, budget, text_args or {})

    refuse()
    with pytest.raises(VlmflowError, match=r"rows: image_max_tokens was 64, not 32\n"):
        refuse(budget=32)
    with pytest.raises(VlmflowError, match=r"rows: text_args was \{\}, not \{'system': 'Be brief\.'\}\n"):
        refuse(text_args={"system": "Be brief."})
    with pytest.raises(VlmflowError, match=r"rows: val\.jsonl has other rows\n"):
        refuse(msgspec.structs.replace(stats, digests=stats.digests | {"val.jsonl": "other"}))
    lengths["val"].write_bytes(lengths["val"].read_bytes().replace(b'"text_tokens":', b'"text_tokens":1', 1))
    with pytest.raises(VlmflowError, match=rf"rows: {lengths['val']} has changed since\n") as error:
        refuse()
    assert "snakemake --forcerun measure_lengths" in error.value.next_step
    shutil.copyfile(demo_run / "lengths" / RUN / "val.jsonl", lengths["val"])
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (model / name).write_text((model / name).read_text() + " ")
    with pytest.raises(VlmflowError, match=r"preprocessor_config\.json is another file; .*/tokenizer\.json"):
        refuse()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda lines: lines[:-1], r"train\.lengths\.jsonl, line \d+: not the length of this line of .*train\.jsonl"),
        (lambda lines: [*lines, lines[-1]], r"line \d+: not the length of this line"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], r"line 1: not the length of this line"),
        (lambda lines: [lines[0], lines[1][:20] + b"\n", *lines[2:]], r"lengths\.jsonl, line 2: JSON is malformed"),
        (lambda lines: [b'{"id": 3}\n', *lines[1:]], r"train\.lengths\.jsonl, line 1: Expected `str`"),
    ],
)
def test_lengths_that_do_not_fit_the_rows_are_named_by_file_and_line(
    timestep: Path, tmp_path: Path, broken: Callable[[list[bytes]], list[bytes]], complaint: str
) -> None:
    folder = tmp_path / "timestep"
    folder.mkdir()
    for place in timestep.iterdir():
        (folder / place.name).symlink_to(place)
    file = folder / "train.lengths.jsonl"
    content = broken(file.read_bytes().splitlines(keepends=True))
    file.unlink()
    file.write_bytes(b"".join(content))
    with pytest.raises(VlmflowError, match=complaint) as error:
        fit(folder, tmp_path / "fitted", 1 << 20, "refuse")
    assert f"remove {folder}" in error.value.next_step


def test_only_history_can_be_shortened() -> None:
    """In the trajectory form every attempt is trained, so dropping one would lose a target."""
    config = {
        "models": {"m": {"source": "/m", "model_type": "qwen3_vl"}},
        "datasets": {"d": {"kind": "fire", "train": "/d.json"}},
        "runs": {"r": {"model": "m", "dataset": "d", "over_long": "shorten"}},
    }
    with pytest.raises(VlmflowError, match=r"runs\.r\.over_long: 'shorten' drops earlier attempts"):
        check_config(config, [])
    config["datasets"]["d"]["form"] = "timestep"
    assert check_config(config, []).runs["r"].over_long == "shorten"
