"""Token lengths: the picture arithmetic, the account, and every run's check against ms-swift."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from swift.arguments.base_args.template_args import TemplateArguments

from seeing_families import SEEING
from vlmflow.config.model_types import model_types
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.swift_args import ALLOWED, TEXT_ARGS, names
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import DRAWN, CheckedRows, check_lengths, template_arguments
from vlmflow.lengths.count import (
    LONGEST_NAMED,
    LengthAccount,
    RowLength,
    TokenCounter,
    max_lengths,
    measure_rows,
    read_lengths,
)
from vlmflow.lengths.summary import MaxLengths, NamedRow
from vlmflow.pictures.budget import PictureBudget, Squares
from vlmflow.pictures.manifest import PictureEntry, read_picture_manifest
from vlmflow.rows.sharegpt import ShareGptRow, Turn
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.child_process import environment
from vlmflow.tools.make_swift_names import installed_names, installed_types
from workflow_runs import ROOT, RUN, copy_folder, snakemake, speeds

side = st.integers(28, 8_000)


@given(width=side, height=side, factor=st.sampled_from([28, 32]), most=st.integers(4, 4_096))
def test_picture_arithmetic_is_qwens_own(width: int, height: int, factor: int, most: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return  # resolve_images rejects such a picture
    high, wide = smart_resize(height, width, factor, 4 * factor**2, most * factor**2)
    assert Squares(factor).tokens(width, height, most) == (high // factor) * (wide // factor)


@pytest.fixture
def model(demo_run: Path) -> Path:
    return demo_run / "tiny-model"


def row(*turns: str, images: list[str] | None = None) -> ShareGptRow:
    speakers = ["human", "gpt"] * (len(turns) // 2)
    spoken = [Turn(speaker, text) for speaker, text in zip(speakers, turns, strict=True)]
    return ShareGptRow("r", "s", images or [], [1], [1], spoken)


def test_a_row_without_a_picture_has_no_picture_tokens(model: Path) -> None:
    (text, picture), (more, none) = TokenCounter(model, [], 64).count([row("Why?", "So."), row("Why?", "So.\n\n")])
    assert (picture, none) == (0, 0)
    assert more > text > 4


def test_text_and_picture_tokens_are_counted_separately(model: Path) -> None:
    entries = [PictureEntry(path="p", rows=1, name="p.png", width=320, height=96, sha256="0" * 64)]
    counter = TokenCounter(model, entries, 64)
    (text, none), (with_marks, picture) = counter.count(
        [row("Why?", "So."), row("<image>Why?", "So.", images=["p.png"])]
    )
    assert (none, picture) == (0, PictureBudget.of(model, 64).tokens(320, 96)) == (0, 30)
    assert with_marks == text + 2, "the marks before and behind a picture"


def test_a_picture_that_the_manifest_lacks_is_named(model: Path) -> None:
    with pytest.raises(VlmflowError, match=r"row r: the image manifest has no picture 'p\.png'"):
        TokenCounter(model, [], 64).count([row("<image>\nWhy?", "So.", images=["p.png"])])


def test_a_picture_of_which_the_trainer_leaves_nothing_is_refused(model: Path) -> None:
    """ms-swift stops at it ("height and width must be > 0"), after hours on a GPU."""
    entries = [PictureEntry(path="p", rows=1, name="p.png", width=28, height=5600, sha256="0" * 64)]
    asked = [row("<image>Why?", "So.", images=["p.png"])]
    with pytest.raises(VlmflowError, match=r"row r: picture p\.png is so elongated .* at image_max_tokens = 64;"):
        TokenCounter(model, entries, 64).count(asked)
    assert TokenCounter(model, entries, 256).count(asked)[0][1] == 175


def test_lengths_are_the_same_on_any_number_of_cores(demo_run: Path, model: Path) -> None:
    entries = list(read_picture_manifest(demo_run / "images" / "fire" / "train.jsonl"))
    rows = demo_run / "data" / "fire" / "train.jsonl"
    counter = TokenCounter(model, entries, 64)
    lengths = list(measure_rows(rows, counter, 1))
    assert lengths == list(measure_rows(rows, counter, 3))
    assert lengths == list(read_lengths(demo_run / "lengths" / RUN / "train.jsonl"))
    content = rows.read_bytes()
    assert [json.loads(content[length.start : length.end])["id"] for length in lengths] == [row.id for row in lengths]


def test_of_rows_of_one_length_the_first_are_named() -> None:
    account = LengthAccount.of(RowLength(str(number), 0, 0, 7) for number in range(100))
    assert [row.id for row in account.longest] == [str(number) for number in range(LONGEST_NAMED)]


def test_the_account_knows_what_a_max_length_covers() -> None:
    rows = [RowLength(f"r{tokens}", 0, 0, tokens - 10, 10) for tokens in range(101, 1_101)]
    account = LengthAccount.of([*rows, RowLength("huge", 0, 0, 5_000)])
    described = account.describe()
    assert described.rows == 1_001
    assert described.tokens == sum(range(101, 1_101)) + 5_000
    assert described.picture_tokens == 10_000
    assert (described.median, described.p99) == (601, 1_091)
    assert described.longest[0] == NamedRow("huge", 5_000, 0)
    assert [row.id for row in described.longest[1:3]] == ["r1100", "r1099"]
    assert len(described.longest) == LONGEST_NAMED
    assert max_lengths([account]) == MaxLengths(covers_most=1_152, covers_all=5_056)
    val = LengthAccount.of(RowLength(str(tokens), 0, 0, tokens) for tokens in (9, 6_000))
    assert max_lengths([account, val]) == MaxLengths(6_016, 6_016), "val has to fit, too"


def test_a_base_without_the_rule_for_its_pictures_is_named(model: Path, tmp_path: Path) -> None:
    base = copy_folder(model, tmp_path / "base")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (base / name).unlink(missing_ok=True)
    entries = [PictureEntry(path="p", rows=1, name="p.png", width=320, height=96, sha256="0" * 64)]
    with pytest.raises(VlmflowError, match=r"row r has pictures and the model no preprocessor_config\.json"):
        TokenCounter(base, entries, 64).count([row("<image>Why?", "So.", images=["p.png"])])


def test_the_check_sees_the_extremes_and_a_draw() -> None:
    chosen = CheckedRows()
    rows = [RowLength(str(number), number, number + 1, 50 + number, number % 7) for number in range(5_000)]
    rows += [RowLength("no picture", 6_000, 6_001, 5, 0), RowLength("large", 7_000, 7_001, 60, 99)]
    rows += [RowLength(f"system {number}", 8_000 + number, 8_001, 60, 3, system_turn=True) for number in range(3)]
    rows += [RowLength(f"tools {number}", 9_000 + number, 9_001, 60, 3, 0, number == 1, True) for number in range(3)]
    rows += [RowLength(f"two pictures {number}", 9_500 + number, 9_501, 60, 6, pictures=2) for number in range(3)]
    for length in rows:
        chosen.see(length)
    ids = [length.id for length in chosen.rows()]
    assert {"4999", "no picture", "large", "system 0", "tools 0", "tools 1", "two pictures 0"} <= set(ids)
    assert DRAWN <= len(ids) == len(set(ids)) <= DRAWN + 9


def test_a_length_that_ms_swift_does_not_give_is_seen(demo_run: Path, model: Path) -> None:
    """Every run's check: of a model with another chat form or picture rule, rows are counted otherwise."""
    val = demo_run / "data" / "fire" / "val.jsonl"
    right = list(read_lengths(demo_run / "lengths" / RUN / "val.jsonl"))[:3]
    pictures = demo_run / "stores" / "pictures" / "fire"
    data, base = TrainingData(val, val, pictures, "digest", False), BaseModel(model, "qwen3_vl", "digest")
    off = [*right[:2], msgspec.structs.replace(right[2], text_tokens=right[2].text_tokens + 1)]
    differs = check_lengths({val: off}, data, base, 64, {}, 2).differs
    assert f"1 of 3 checked rows have a different length in ms-swift's own template: {right[2].id}" in str(differs)
    assert f"({off[2].tokens}, ms-swift {right[2].tokens})" in str(differs)


def test_an_answer_at_whose_end_the_model_would_not_stop_is_refused(
    demo_run: Path, model: Path, tmp_path: Path
) -> None:
    val = demo_run / "data" / "fire" / "val.jsonl"
    right = list(read_lengths(demo_run / "lengths" / RUN / "val.jsonl"))[:1]
    data = TrainingData(val, val, demo_run / "stores" / "pictures" / "fire", "digest", False)
    base = copy_folder(model, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 151643}')  # as Qwen3-8B-Base
    with pytest.raises(
        VlmflowError, match=r"ends the answer with '<\|im_end\|>', at which the model does not"
    ) as caught:
        check_lengths({val: right}, data, BaseModel(base, "qwen3_vl", "digest"), 64, {}, 2)
    assert 'add ["<|im_end|>"] to models.NAME.stop_tokens' in str(caught.value.next_step)


def test_ms_swifts_refusal_is_reported(demo_run: Path, model: Path, tmp_path: Path) -> None:
    val = demo_run / "data" / "fire" / "val.jsonl"
    right = list(read_lengths(demo_run / "lengths" / RUN / "val.jsonl"))[:1]
    data = TrainingData(val, val, tmp_path / "no-pictures", "digest", False)
    with pytest.raises(VlmflowError, match=r"the check of token lengths: \w+Error: "):
        check_lengths({val: right}, data, BaseModel(model, "qwen3_vl", "digest"), 64, {}, 2)


def test_swift_args_that_change_the_text_are_known() -> None:
    """Of ms-swift's template arguments only those that are compared with the model's own template may be set."""
    known = {field.name for field in dataclasses.fields(TemplateArguments)}
    assert set(TEXT_ARGS) < known
    assert not known & ALLOWED
    settings = TrainSettings(swift_args={"add_non_thinking_prefix": False, "template": "qwen3", "use_cache": True})
    assert settings.text_args == {"add_non_thinking_prefix": False, "template": "qwen3"}


def test_the_tables_of_ms_swifts_names_are_those_of_the_installed_one() -> None:
    assert (names(), model_types()) == (installed_names(), installed_types()), (
        "run .venv/bin/python scripts/vlmflow/tools/make_swift_names.py, and look at what changed"
    )


@pytest.mark.parametrize("rule", ["measure_lengths", "fit_rows"])
def test_lengths_are_known_without_a_gpu(rule: str) -> None:
    """The rules' pods have the trainers' image, and no GPU."""
    text = (ROOT / "rules" / f"{rule}.smk").read_text()
    assert 'pod_template="train"' in text
    assert "gpu" not in text.partition("resources:")[2]


def test_the_stages_of_lengths_report_their_speed(demo_run: Path, tmp_path: Path) -> None:
    """Rows per second with the time left; for the earlier stages see test_rows_workflow.py."""
    folder = copy_folder(demo_run, tmp_path / "demo_run")
    snakemake(folder, f"reports/lengths-{RUN}.html")
    stages = {
        "measure_lengths": ["token lengths of train.jsonl", "the check of token lengths"],
        "lengths_page": [f"reading lengths/{RUN}/train.jsonl", f"reading lengths/{RUN}/val.jsonl"],
        "fit_rows": ["fitting train.jsonl", "fitting val.jsonl"],
    }
    for rule, expected in stages.items():
        said = {what.partition("DEBUG ")[2]: unit for what, unit in speeds(folder, rule).items()}
        assert {what: said.get(what) for what in expected} == dict.fromkeys(expected, "rows")


def test_another_max_length_measures_nothing_again_and_another_picture_budget_does(demo_run: Path) -> None:
    def planned(setting: str) -> str:
        return snakemake(demo_run, "-n", f"fitted/{RUN}", "--config", f"runs={{{RUN}: {{train: {{{setting}}}}}}}")

    assert "measure_lengths" not in planned("max_length: 600")
    assert "fit_rows" in planned("max_length: 600")
    assert "measure_lengths" in planned("image_max_tokens: 32")


SIZES = [(32, 32), (640, 480), (480, 640), (1280, 960), (97, 301), (301, 97), (28, 28), (1000, 60)]
MANY = [*SIZES, *((Random(n).randint(28, 1400), Random(-n).randint(28, 1400)) for n in range(1, 193))]
"""200 sizes, in pixels."""

COUNT = """
import json, sys
from swift import dataset as datasets
from vlmflow.swift.row_counter import RowCounter
from vlmflow.swift.own_template import own_template

template = own_template(sys.argv[3:])
dataset, _ = datasets.load_dataset([sys.argv[1]], strict=True)
whole = list(map(RowCounter(template, whole=True).count, dataset))
small = RowCounter(template, whole=False)
by_size = list(map(small.count, dataset))
open(sys.argv[2], "w").write(json.dumps([whole, by_size, small._of_size.cache_info().currsize]))
"""


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("qwen2.5-vl", SIZES, 256),
        *(pytest.param(name, MANY, most, marks=pytest.mark.slow) for name in SEEING for most in (16, 2048)),
    ],
)
def test_sizes_give_the_counts_of_whole_encodings(
    name: str, sizes: list[tuple[int, int]], most: int, tmp_path: Path
) -> None:
    family = SEEING[name]
    base = family.write(tmp_path / "base")
    budget = PictureBudget.of(base, most)
    sizes = [size for size in sizes if budget.tokens(*size)]  # of the others nothing is left: they are refused before
    rows = []
    for number, size in enumerate([*sizes, *sizes[:2]]):
        Image.new("RGB", size, "green").save(tmp_path / f"{number}.png")
        turns = [("human", f"<image>\nWhat is it? {'Say it. ' * number}"), ("gpt", "It is red.")]
        if number % 2:
            turns[0] = ("human", f"<image><image>\nWhat is it? {number}")
        spoken = [{"from": speaker, "value": text} for speaker, text in turns]
        images = [f"{number}.png", "0.png"][: 1 + number % 2]
        rows.append(json.dumps({"conversations": spoken, "images": images}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = as_words(template_arguments(base, family.model_type, "default", {"template": family.template}))
    env = environment(tmp_path, most, tmp_path / "cache", 1)
    found = tmp_path / "found.json"
    call = [sys.executable, "-c", COUNT, str(tmp_path / "rows.jsonl"), str(found), *words]
    subprocess.run(call, env=env, cwd=tmp_path, check=True)
    whole, by_size, counted = json.loads(found.read_text())
    assert by_size == whole
    assert counted == len(set(sizes) | {(32, 32)})
