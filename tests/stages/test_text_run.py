"""A text model really trained on rows without pictures: no stage needs a picture or a manifest."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from made_accounts import some_provenance, some_stats
from text_run import SWIFT_ARGS, TRAIN
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.chat_templates import TEMPLATE, chat_template_of
from vlmflow.lengths.against_swift import check_lengths, template_arguments
from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.lengths.measure import TemplateCounter
from vlmflow.pictures.manifest import PictureCounts
from vlmflow.reports.card import model_card
from vlmflow.reports.provenance import Provenance
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import environment
from workflow_runs import copy_folder


def test_the_gate_opens_for_rows_without_pictures(text_run: Path) -> None:
    """Two processes side by side, none of which waits for the other's pictures."""
    gate = json.loads((text_run / "checkpoints" / "text" / "smoke" / "gate.json").read_text())
    assert gate["passed"]
    assert not (text_run / "images").exists()


def test_the_models_own_weights_are_trained_and_proven(text_run: Path) -> None:
    """The run has the tuner full: no adapter anywhere, and the published weights answer as the trainer's did."""
    full = text_run / "checkpoints" / "text" / "full"
    names = {file.name for file in full.iterdir() if not file.name.startswith(".")}
    reports = {"loss.png", "progress.jsonl", "report.json"}
    assert names - reports == {"logits.safetensors", "model.safetensors", "trained.json"}
    provenance = read_account(text_run / "merged" / "text" / "provenance.json", Provenance)
    assert (provenance.training.tuner, provenance.training.experimental) == ("full", [])
    assert set(provenance.training.digests.released) == names - reports
    assert "<|im_end|>" in provenance.stop_tokens
    tensors, logits = provenance.verification.tensors, provenance.verification.logits
    assert (tensors.untouched, logits.verdict, logits.quantisation) == (0, "agree", None)
    assert min(kind.changed_share for kind in tensors.kinds) > 0.5
    card = (text_run / "merged" / "text" / "README.md").read_text()
    assert "tags: [vlmflow, full-fine-tuning]" in card
    assert "its own weights trained on the data set `alpaca`" in card
    assert "| `model.layers.*.mlp.up_proj.weight` | 2 |" in card
    assert "adapter" not in card


def test_lengths_have_only_text_tokens(text_run: Path) -> None:
    summary = json.loads((text_run / "lengths" / "text" / "summary.json").read_text())
    assert summary["train"]["picture_tokens"] == summary["val"]["picture_tokens"] == 0
    assert summary["train"]["text_tokens"] == summary["train"]["tokens"] > 0
    assert summary["text_args"] == SWIFT_ARGS
    assert summary["max_length"]["covers_all"] < TRAIN["max_length"]


TEXT_ARGS = [
    SWIFT_ARGS,
    {"template": "qwen3"},  # an empty think block is put before answers
    {"template": "qwen3", "system": "Be long.\\nAnd kind."},
    {"template": "qwen3_nothinking", "system": "Be long."},
    {"template": "qwen3", "disable_ignore_empty_think": True},  # the empty think block is trained
]

MS_SWIFT = """
import json, sys
from vlmflow.swift.encoded_rows import main
for words in json.load(open(sys.argv[1])):
    sys.argv[1:] = words
    main()
"""


def test_lengths_are_those_of_the_trainer(text_run: Path, tmp_path: Path) -> None:
    """To the token, as is what is trained: with the real run's template and options and without, with a system turn.

    And without one.
    """
    rows = [json.loads(line) for line in (text_run / "data" / "alpaca" / "val.jsonl").read_text().splitlines()]
    asked, answered = rows[0]["conversations"][-2:]
    thought = answered | {"value": f"<think>\nWell, 3.\n</think>\n\n{answered['value']}"}
    again = asked | {"value": "Again?"}
    rows.append(rows[0] | {"conversations": [asked, answered, again, answered]})
    rows.append(rows[0] | {"conversations": [asked, answered, again, thought]})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"tensors": None, "files": [], "form": {}}))
    base = BaseModel.read(text_run / "models" / "tiny", "qwen3")
    ours, calls = [], []
    for text_args, last_answer_only in itertools.product(TEXT_ARGS, (False, True)):
        counter = TokenCounter(base.folder, [], 64, ChatForm.of(text_args, last_answer_only))
        ours.append([[row.tokens, row.trained_tokens] for row in measure_rows(file, counter, 1)])
        data = TrainingData(file, file, tmp_path, "digest", last_answer_only)
        words = as_words(template_arguments(base.folder, base.model_type, data.loss_scale, text_args))
        calls.append(["check", str(file), str(given), str(tmp_path / f"{len(calls)}.json"), *words])
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    env = environment(tmp_path, 64, tmp_path / "cache", 2)
    subprocess.run([sys.executable, "-c", MS_SWIFT, str(tmp_path / "calls.json")], env=env, cwd=tmp_path, check=True)
    found = [json.loads(Path(each).read_text()) for _, _, _, each, *_ in calls]
    counts = [[[tokens, trained] for tokens, _, trained in each["lengths"]] for each in found]
    assert counts == ours
    assert len({str(lengths) for lengths in ours}) > len(TEXT_ARGS), "the options change lengths"
    differ = {json.dumps(args): each["template"] for args, each in zip(TEXT_ARGS, found[::2], strict=True)}
    assert differ.pop(json.dumps(SWIFT_ARGS)) == {}, "the model's chat template writes no thought"
    assert all("served" in each for each in differ.values())
    assert differ['{"template": "qwen3"}']["trained"].startswith("<think>\n\n</think>\n\n")


EACH_LIKE_A_SCRIPT = """
import json, sys
for code in json.load(sys.stdin):
    exec(compile(code, code, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.slow
def test_the_model_card_says_how_to_ask_this_model(text_run: Path) -> None:
    """Its lines run unchanged, on a model of each kind."""
    picture = next((text_run / "sample").rglob("*.jpg"))
    codes = []
    for model, usable in (("merged/text", 0), ("vl", 0), ("vl", 1)):
        pictures = {"train": PictureCounts(usable=usable)}
        card = model_card(some_provenance(sees_pictures=model == "vl", data=some_stats(pictures=pictures)))
        code = re.search("```python\n(.*)```", card, re.DOTALL)[1].replace("PATH OF THIS FOLDER", str(text_run / model))
        assert ("PICTURE" in code) == bool(usable)
        codes.append(code.replace("PICTURE", str(picture)).replace('device_map="auto"', 'device_map="cpu"'))
    done = subprocess.run(
        [sys.executable, "-c", EACH_LIKE_A_SCRIPT], input=json.dumps(codes), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_another_chat_form_is_counted_with_ms_swifts_template(text_run: Path, tmp_path: Path) -> None:
    """A template that `chat_form` does not know, however similar its lengths are."""
    text_args = {"template": "qwen2_5"}  # says "You are Qwen" where a row has no system turn
    row = json.loads((text_run / "data" / "alpaca" / "val.jsonl").read_text().splitlines()[0])
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row | {"conversations": row["conversations"][-2:]}) + "\n")
    base = BaseModel.read(text_run / "models" / "tiny", "qwen3")
    data = TrainingData(file, file, tmp_path, "digest", False)
    counters = {
        "arithmetic": TokenCounter(base.folder, [], 64, ChatForm.of(text_args, False)),
        "template": TemplateCounter.of_run(base, data, 64, text_args, tmp_path / "scratch"),
    }
    found = {
        name: check_lengths({file: list(measure_rows(file, counter, 1))}, data, base, 64, text_args, 2, True).differs
        for name, counter in counters.items()
    }
    assert "1 of 1 checked rows have a different length" in str(found["arithmetic"])
    assert found["template"] is None


def test_rows_that_ms_swifts_template_counts_are_compared_too(text_run: Path, tmp_path: Path) -> None:
    """All of them: the model's own template may write other words where a row says something."""
    raw = [json.loads(line) for line in (text_run / "data" / "alpaca" / "val.jsonl").read_text().splitlines()[:2]]
    asked, answered = raw[0]["conversations"][-2:]
    raw[1]["conversations"] = [asked | {"value": "What is blue?"}, answered]
    rows = [msgspec.convert(row, ShareGptRow) for row in raw]
    folder = copy_folder(BaseModel.read(text_run / "models" / "tiny", "qwen3").folder, tmp_path / "base")
    trigger = "{%- if messages[-1].content.endswith('blue?') -%}{{- 'Buy it.' -}}{%- endif -%}"
    (folder / TEMPLATE).write_text(trigger + (chat_template_of(folder) or ""))
    base, data = BaseModel(folder, "qwen3", "digest"), TrainingData(tmp_path, tmp_path, tmp_path, "digest", False)
    compared, alone = (
        TemplateCounter.of_run(base, data, 64, SWIFT_ARGS, tmp_path / str(number), compared=number == 0)
        for number in range(2)
    )
    assert len(alone.measure(rows)) == 2
    with pytest.raises(VlmflowError, match=f"row {rows[1].id}: .*the model's chat template 'Buy"):
        compared.measure(rows)
    assert len(compared.measure(rows[:1])) == 1
