"""Models of other families than Qwen3, from validated rows on, and docs/models.md, which says what was tried."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from families import FAMILIES, LLAMA_3_2, write_family
from forked_snakemake import called
from models_page import roads, rows
from text_run import TRAIN
from vlmflow.config.model_settings import TESTED
from vlmflow.config.model_types import model_types
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.count import RowLength, TokenCounter, read_lengths
from vlmflow.lengths.measure import LengthSummary, measure_lengths
from vlmflow.lengths.summary import ShownText
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import Gate
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import environment
from workflow_runs import ROOT

SMOKE = {"steps": 6, "longest": 4, "sample": 4}

LLAMA_3 = {"template": "llama3"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel(write_family("llama", tmp_path_factory.mktemp("llama")), "llama", "digest")


def row(number: int, *turns: str) -> str:
    speakers = ["human", "gpt"] * 3
    spoken = [{"from": speaker, "value": text} for speaker, text in zip(speakers, turns, strict=False)]
    plain = {"id": f"row-{number}", "source": "s", "images": [], "attempts": [1], "scores": [1]}
    return json.dumps(plain | {"conversations": spoken})


def measured(base: BaseModel, folder: Path, rows: list[str]) -> tuple[LengthSummary, list[RowLength]]:
    folder.mkdir()
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in rows))
    data = TrainingData(folder / "train.jsonl", folder / "val.jsonl", folder / "pictures", "digest", False)
    files = {split: folder / f"{split}.lengths.jsonl" for split in ("train", "val")}
    counter = TokenCounter(base.folder, [], 64, ChatForm())
    return measure_lengths(data, files, counter, base, 64, LLAMA_3, 2), list(read_lengths(files["train"]))


def test_lengths_are_those_of_the_models_own_tokens(llama: BaseModel, tmp_path: Path) -> None:
    turns = [("Say it.", "It is."), ("Say it.", "It is.", "And again?", "It is so, again."), (" Why? ", "So \n")]
    summary, lengths = measured(llama, tmp_path / "rows", [row(number, *each) for number, each in enumerate(turns)])
    assert summary.by_template
    tokenizer = TokenCounter(llama.folder, [], 64)._tokenizer

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    marks = "<|start_header_id|>{}<|end_header_id|>\n\n"
    expected = []
    for each in turns:
        asked = [tokens(marks.format("user") + text + "<|eot_id|>" + marks.format("assistant")) for text in each[::2]]
        answered = [tokens(text + "<|eot_id|>") for text in each[1::2]]
        expected.append((1 + sum(asked) + sum(answered), sum(answered)))
    assert [(length.tokens, length.trained_tokens) for length in lengths] == expected
    assert {length.picture_tokens for length in lengths} == {0}
    assert summary.example == [
        ShownText("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", added=True),
        ShownText("Say it."),
        ShownText("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", added=True),
        ShownText("It is.", trained=True),
        ShownText("<|eot_id|>", trained=True, added=True),
    ]


def test_a_text_that_the_tokenizer_takes_for_a_mark_is_named(llama: BaseModel, tmp_path: Path) -> None:
    rows = [row(0, "Say it.", "It is."), row(1, "Say it.", "It <|eot_id|> is.")]
    with pytest.raises(VlmflowError, match=r"reads special tokens in 1 text: row row-1, turn 1: '<\|eot_id\|>'"):
        measured(llama, tmp_path / "rows", rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_text_models_become_proven_weights(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """By LoRA, of experts too if there are some, and by full fine-tuning, through the workflow's own rules."""
    record_property("road", name)
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    family, source = FAMILIES[name], str(write_family(name, tmp_path / "base"))
    model = {"source": source, "model_type": family.model_type, "template": family.template, "template_differs": True}
    train = TRAIN | {"swift_args": {}, "max_length": 1024}
    run = {"model": name, "dataset": "alpaca", "device": "cpu", "train": train, "smoke": SMOKE}
    runs = {tuner: run | {"tuner": tuner} for tuner in ("lora", "full")}
    if family.experts:
        runs["experts"] = run | {"train": train | {"lora": {"experts": True}}}
    data = {"alpaca": {"train": "rows.json", "system_prompt": "Be brief.", "val_share": 0.1}}
    config = {"models": {name: model}, "datasets": data, "runs": runs}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    call += ["--configfile", str(tmp_path / "mine.yaml"), "--cores", "2", "--keep-going", "--"]
    done = called([*call, *(f"merged/{run}" for run in runs)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    gates = {}
    for run in runs:
        summary = read_account(tmp_path / "lengths" / run / "summary.json", LengthSummary)
        assert (tmp_path / "merged" / run / "provenance.json").is_file()
        gates[run] = read_account(tmp_path / "checkpoints" / run / "smoke" / "gate.json", Gate)
        assert summary.by_template != name.startswith("qwen"), "with a system turn, Qwen2.5's chat form is Qwen3's"
    assert gates["full"].without_adapter is None
    if family.experts:
        experts = {kind for kind in gates["experts"].merge.layers if kind not in gates["lora"].merge.layers}
        assert experts in ({"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"}, {"experts"})
        assert gates["experts"].without_adapter < gates["lora"].without_adapter


ON_A_DAY = """
import datetime, json, sys

class OnThatDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(int(sys.argv[1]), 2, 3, 4, 5, tzinfo=tz)

import datasets, peft, torch, transformers  # their C code needs the real class

datetime.datetime = OnThatDay
from vlmflow.swift.own_template import own_template

template = own_template(sys.argv[3:])
turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is."}]
text = template.tokenizer.decode(template.encode({"messages": turns})["input_ids"])
open(sys.argv[2], "w").write(json.dumps(text))
"""


def text_on_a_day(year: int, folder: Path, model: Path, template: str) -> str:
    words = as_words(template_arguments(model, "llama", "default", {"template": template}))
    found, env = folder / f"{year}.json", environment(folder, 64, folder / "cache", 1)
    subprocess.run([sys.executable, "-c", ON_A_DAY, str(year), str(found), *words], env=env, cwd=folder, check=True)
    return str(json.loads(found.read_text()))


def test_a_template_with_a_date_is_the_same_on_every_day(llama: BaseModel, tmp_path: Path) -> None:
    """That of the model's own chat template, whatever day a training resumes on."""
    dated = shutil.copytree(llama.folder, tmp_path / "dated")
    (dated / "chat_template.jinja").write_text(LLAMA_3_2)
    assert "\nToday Date: 26 Jul 2024\n" in text_on_a_day(2034, tmp_path, dated, "llama3_2")


@pytest.mark.slow
@pytest.mark.parametrize(("template", "date"), [("llama3_2", "01 Jan 2025"), ("gpt_oss", "2025-01-01")])
def test_a_date_is_the_same_on_every_day(llama: BaseModel, tmp_path: Path, template: str, date: str) -> None:
    """Also where the model's chat template has none: in the template's text, and as it encodes a row."""
    assert f"ate: {date}\n" in text_on_a_day(2034, tmp_path, llama.folder, template)


BY_THE_DEMO = {"qwen3_vl"}
"""The kind that `make demo` and most tests train."""

FAST_FORM = "scripts/vlmflow/swift/chat_form.py"
"""The fast way to count the tokens of Qwen, used only where ms-swift's template gives the same."""


@pytest.mark.parametrize("name", roads())
def test_the_page_is_of_the_code_of_today(name: str) -> None:
    road = roads()[name]
    assert name in rows(), f"docs/models.md lacks {name}: its test has not passed with the plugin models_page"
    model_type, template, ways, _, _, code = rows()[name]
    assert (model_type, template, ways) == road[:3]
    assert code == road.code, f"the code of {name} has changed: run its test again with the plugin models_page"


def test_what_is_called_tested_was_tried() -> None:
    assert set(TESTED) == {road.model_type for road in roads().values()} | BY_THE_DEMO


def test_no_kind_of_model_stands_in_the_code() -> None:
    """A new family costs no code: what differs between models, libraries and tables say."""
    found = []
    for file in sorted((ROOT / "scripts").rglob("*.py")):
        place = str(file.relative_to(ROOT))
        texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
        found += [(place, text) for text in texts if isinstance(text, str) and text in model_types()]
    allowed = {FAST_FORM, "scripts/vlmflow/config/model_settings.py"}
    assert [each for each in found if each[0] not in allowed] == []
