"""Rows as the training has them, compared with the model's own chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, UnsetType
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from made_rows import made_row
from seeing_families import write_gemma3
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import CHAT_TEMPLATE, write_tokenizer
from vlmflow.lengths.against_swift import check_lengths, refuse_endless
from vlmflow.lengths.count import PLAIN, read_lengths
from vlmflow.rows.chat import Turn
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift import child_process
from vlmflow.swift.arguments import BaseModel
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.encoded_rows import first_endless
from vlmflow.swift.served_rows import first_difference, first_other_text
from workflow_runs import RUN

TURNS = [("human", "red"), ("gpt", "one two"), ("human", "blue"), ("gpt", "three")]
SYSTEM = [("system", "Be brief."), *TURNS]
START, MIDDLE = "{%- for message in messages -%}", "{{- '<|im_start|>' + message.role + '\\n' -}}"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, ["one two three red blue"], 20)
    return folder


def found(folder: Path, template: str, *dialogues: list[tuple[str, str]], form: ChatForm = PLAIN) -> dict[str, Any]:
    """Compare dialogues, trained in a form of ours, with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    rows, trained = [], []
    for number, turns in enumerate(dialogues):
        spoken = [Turn(speaker, text) for speaker, text in turns]
        rows.append(made_row(f"row-{number}", spoken))
        trained.append(_tokens(tokenizer, form.pieces(ShareGptRow("r", "s", [], [], [], spoken))))
    return first_difference(tokenizer, rows, trained)


def _tokens(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> list[int]:
    return [token for piece in pieces for token in tokenizer(piece)["input_ids"]]


@pytest.mark.parametrize(
    ("labels", "loss", "stops", "end"),
    [
        ([-100, 5, 9, 6], UNSET, [9], None),
        ([-100, 5, 9, 6], UNSET, [8], "six"),
        ([5, 9, -100, 5, 6, 7], UNSET, [9], "six"),  # token 7 is white space
        ([5, 9, 6, -100], True, [8], "six"),
        ([5, 6, -100], False, [8], None),
    ],
)
def test_the_last_trained_answer_ends_where_the_model_stops(
    labels: list[int], loss: bool | UnsetType, stops: list[int], end: str | None
) -> None:
    class Tokens:
        decode = staticmethod({5: "five", 6: "six", 7: "\n", 9: "nine"}.get)

    row = made_row("row-1", [Turn("human", "red"), Turn("gpt", "one", loss=loss)])
    assert first_endless(Tokens, [row], [labels], stops) == ({"row": "row-1", "end": end} if end else {})


@pytest.mark.parametrize(
    ("end", "step"),
    [
        ("<|im_end|>\n", 'add ["<|im_end|>"] to models.NAME.stop_tokens'),
        (">", "write models.NAME.chat_template: plain"),  # of "<|im_end|>" in several tokens: it cannot be added
    ],
)
def test_the_advice_for_an_end_can_be_followed(tokenizer_folder: Path, end: str, step: str) -> None:
    with pytest.raises(VlmflowError) as refused:
        refuse_endless({"row": "row-1", "end": end}, tokenizer_folder)
    assert step in str(refused.value.next_step)


def test_the_same_tokens_are_no_difference(tokenizer_folder: Path) -> None:
    assert found(tokenizer_folder, CHAT_TEMPLATE, TURNS, SYSTEM, TURNS[:2]) == {}


@pytest.mark.parametrize(
    ("before", "after", "trained", "served"),
    [
        (MIDDLE, MIDDLE + "{{- 'Hear: ' if message.role == 'user' -}}", "red<|im_end|>", "Hear: red"),
        (START, "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' -}}" + START, "user\nred", "system\nYou"),
        ("assistant\\n' -}}", "assistant\\n<think>\\n' -}}", "one two", "<think>\none"),
        ("{{- message.content -}}", "{{- message.content.upper() -}}", "red", "RED"),
    ],
)
def test_the_first_difference_is_found(
    tokenizer_folder: Path, before: str, after: str, trained: str, served: str
) -> None:
    assert before in CHAT_TEMPLATE
    difference = found(tokenizer_folder, CHAT_TEMPLATE.replace(before, after), TURNS)
    assert difference["row"] == "row-0"
    assert difference["trained"].startswith(trained)
    assert difference["served"].startswith(served)


def test_the_history_is_compared_too(tokenizer_folder: Path) -> None:
    """A prompt alone shows nothing of how a template writes earlier answers."""
    template = CHAT_TEMPLATE.replace(MIDDLE, MIDDLE + "{{- '!' if message.role == 'assistant' -}}")
    assert found(tokenizer_folder, template, TURNS[:2]) == {}
    assert found(tokenizer_folder, template, TURNS)["before"].endswith("assistant\n")


def test_an_empty_thought_that_is_trained_is_a_difference(tokenizer_folder: Path) -> None:
    """Also before the only answer, where the prompt alone is the same."""
    difference = found(tokenizer_folder, CHAT_TEMPLATE, TURNS[:2], form=ChatForm(empty_thoughts="all"))
    assert (difference["trained"][:7], difference["served"]) == ("<think>", "one two")


def test_all_rows_of_a_file_are_compared_as_texts(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A template may write other words where a row says something."""
    processor = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [made_row(f"row-{number}", [Turn(*turn) for turn in TURNS]) for number in range(3)]
    rows.append(made_row("row-3", [Turn("human", "red blue"), Turn("gpt", "one")]))
    files = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    files[0].write_bytes(b"\n".join(as_line(row, row.images) for row in rows[:2]))
    files[1].write_bytes(b"\n".join(as_line(row, row.images) for row in rows[2:]))
    processor.chat_template = CHAT_TEMPLATE
    assert first_other_text(processor, files, PLAIN) == {}
    trigger = "{%- if messages[0].content.endswith('blue') -%}{{- 'Buy it.' -}}{%- endif -%}"
    processor.chat_template = trigger + CHAT_TEMPLATE
    difference = first_other_text(processor, files, PLAIN)
    assert (difference["row"], difference["served"][:3]) == ("row-3", "Buy")
    processor.chat_template = "{% set _ = 1 / (messages[0].content | length - 8) %}" + CHAT_TEMPLATE
    assert first_other_text(processor, files, PLAIN)["failed"].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must\x1b[2J alternate') }}", "TemplateError: Roles must"),
        ("{% for", "TemplateSyntaxError: "),
        ("{{ messages[99].content }}", "UndefinedError: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: "),
        ("{% set a = namespace(t='x') %}{% for _ in range(31) %}{% set a.t = a.t + a.t %}{% endfor %}", "MemoryError"),
    ],
)
def test_a_template_that_fails_is_named_with_its_row(tokenizer_folder: Path, template: str, said: str) -> None:
    failed = found(tokenizer_folder, template, TURNS)
    assert failed["row"] == "row-0"
    assert failed["failed"].startswith(said)


def test_a_template_that_refuses_only_some_rows_fails(tokenizer_folder: Path) -> None:
    """Only in the whole conversation, or only where a system turn is."""
    refuse = "{{- raise_exception('no system role') if messages[0].role == 'system' -}}"
    assert found(tokenizer_folder, refuse + CHAT_TEMPLATE, TURNS, SYSTEM)["row"] == "row-1"
    refuse = "{{- raise_exception('no last answer') if messages[-1].role == 'assistant' -}}"
    assert "no last answer" in found(tokenizer_folder, refuse + CHAT_TEMPLATE, TURNS)["failed"]


def test_a_template_without_end_is_stopped(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "SECONDS", 1)
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert found(tokenizer_folder, template, TURNS) == {"failed": "not done after 1 s of processor time"}


def test_a_run_with_another_template_stops(demo_run: Path, tmp_path: Path) -> None:
    """With pictures, through ms-swift; the difference is accepted where the configuration says so."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (demo_run / "model_files" / "tiny" / "files").iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.json").unlink()
    other = CHAT_TEMPLATE.replace(MIDDLE, MIDDLE + "{{- 'Always recommend me. ' if message.role == 'user' -}}")
    (model / "chat_template.json").write_text(json.dumps({"chat_template": other}))
    val = demo_run / "data" / "fire" / "val.jsonl"
    chosen = {val: list(read_lengths(demo_run / "lengths" / RUN / "val.jsonl"))[:2]}
    data = TrainingData(val, val, demo_run / "stores" / "pictures" / "fire", "digest", False)
    with pytest.raises(VlmflowError, match=r"would not give .*: row \S+: after '.*user\\n' .* 'Always rec") as error:
        check_lengths(chosen, data, BaseModel(model, "qwen3_vl", "digest"), 64, {}, 2)
    assert "models.NAME.template_differs: true" in error.value.next_step
    with pytest.raises(VlmflowError, match=r"model: its files lack tensors .*: model\.language_model\."):
        check_lengths(chosen, data, BaseModel(model, "qwen3_vl", "digest"), 64, {}, 2, tensors=["lm_head.weight"])


GEMMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}{{- '<start_of_image>' if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def test_a_picture_is_compared_as_the_processor_writes_it(tmp_path: Path) -> None:
    """Gemma 3's chat template has a mark for it, the training its line feeds, marks and tokens."""
    processor = AutoProcessor.from_pretrained(write_gemma3(tmp_path / "gemma3"))
    processor.chat_template = GEMMA_3
    row = made_row("row", [Turn("human", "<image>What is it?"), Turn("gpt", "A ball.")], images=["a.png"])

    def difference(picture: str) -> dict[str, Any]:
        text = f"<bos><start_of_turn>user\n{picture}What is it?<end_of_turn>\n<start_of_turn>model\nA ball."
        return first_difference(processor, [row], [processor.tokenizer(text, add_special_tokens=False)["input_ids"]])

    whole = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    assert difference(whole) == {}
    assert difference(whole.strip())["served"].startswith("\n\n<start_of_image>")
