"""The chat template that stages see of a model."""

import json
import os
from datetime import date
from pathlib import Path
from typing import Literal

import pytest

from vlmflow.config.model_types import BaseChat
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.chat_templates import (
    TEMPLATE,
    chat_template_of,
    own_files,
    require_chat_template,
    stop_tokens_of,
    stops_of,
)

TALK = [{"role": role, "content": text} for role, text in [("user", "Hi."), ("assistant", "Yes."), ("user", "So?")]]
SYSTEM = {"role": "system", "content": "Be brief."}

DATED = """\
{%- if strftime_now is defined -%}
{%- set day = strftime_now("%d %b %Y") -%}
{%- else -%}
{%- set day = "26 Jul 2024" -%}
{%- endif -%}
Today is {{ day }}.{{ messages[0].content }}"""


def base_model(folder: Path, tokens: dict[str, int], first: str | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    added = [{"content": token, "id": number} for token, number in tokens.items()]
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A"}}]
    processor = {"type": "TemplateProcessing", "single": single} if first else {"type": "ByteLevel"}
    whole = {"added_tokens": added, "post_processor": {"type": "Sequence", "processors": [processor]}}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def rendered(template: bytes | str, messages: list[dict[str, str]], *, prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # it takes seconds

    text = template.decode() if isinstance(template, bytes) else template
    given = {"eos_token": "<eos>", "bos_token": "<bos>"}
    rendered, _ = render_jinja_template(
        [messages],
        chat_template=text,
        add_generation_prompt=prompt,
        **given,  # type: ignore[arg-type]
    )
    return str(rendered[0])


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def test_a_base_model_gets_a_template(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {"<eos>": 0})
    with pytest.raises(VlmflowError, match=r"set models\.NAME\.chat_template: chatml or plain"):
        require_chat_template(folder)
    plain = own_files(folder, names(folder), "plain", None)
    assert set(plain) == {TEMPLATE}
    asked = (
        "You are a helpful assistant.\n\n### Human:\nHi.\n\n### Assistant:\nYes.\n\n### Human:\nSo?\n\n### Assistant:\n"
    )
    assert rendered(plain[TEMPLATE], TALK, prompt=True) == asked
    assert rendered(plain[TEMPLATE], [SYSTEM, *TALK[:2]], prompt=False) == (
        "Be brief.\n\n### Human:\nHi.\n\n### Assistant:\nYes.<eos>"
    )
    chatml = own_files(folder, names(folder), "chatml", None)
    assert set(chatml) == {TEMPLATE}, "without a token that ends a turn, no server can stop at one"
    assert rendered(chatml[TEMPLATE], TALK[:1], prompt=True) == (
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_begins_as_the_tokenizer_does_and_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {"<eos>": 0, "<|im_end|>": 7}, first="<bos>")
    own = own_files(folder, names(folder), "chatml", None)
    assert rendered(own[TEMPLATE], TALK[:1], prompt=False) == "<bos><|im_start|>user\nHi.<|im_end|>\n"
    assert json.loads(own["generation_config.json"]) == {"eos_token_id": [7, 0]}


def test_tokens_at_which_a_model_also_stops_are_added(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {"<|im_end|>": 7})
    (folder / TEMPLATE).write_text("Hi")
    assert stops_of(folder) == [0]
    own = own_files(folder, names(folder), stop_tokens=["<|im_end|>"])
    assert json.loads(own["generation_config.json"]) == {"eos_token_id": [7, 0]}
    (folder / "generation_config.json").write_bytes(own["generation_config.json"])
    assert (stops_of(folder), stop_tokens_of(folder)) == ([7, 0], ["<|im_end|>", "0"])
    assert own_files(folder, names(folder), stop_tokens=["<|im_end|>"]) == {}, "it stops there already"
    with pytest.raises(VlmflowError, match=r"stop_tokens: the tokenizer has no token '<end>'"):
        own_files(folder, names(folder), stop_tokens=["<end>"])


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, [3, 4]),
        ({"eos_token_id": None}, {"eos_token_id": 5}, [5]),
        ({}, {"text_config": {"eos_token_id": 6}}, [6]),
        ({}, {"text_config": None}, []),
        ({"eos_token_id": ["7", True]}, {}, []),
    ],
)
def test_where_a_model_stops(
    generation: dict[str, object], config: dict[str, object], stops: list[int], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stops_of(tmp_path) == stops


def test_a_model_with_a_template_keeps_it(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_text("Hi")
    assert own_files(folder, names(folder), None, None) == {}
    with pytest.raises(VlmflowError, match="has a chat template of its own"):
        own_files(folder, names(folder), "plain", None)


@pytest.mark.parametrize(("day", "shown"), [(None, "26 Jul 2024"), (date(2025, 1, 2), "02 Jan 2025")])
@pytest.mark.parametrize("again", [False, True], ids=["its own", "one that a run has published"])
def test_a_template_writes_one_date(tmp_path: Path, day: date | None, shown: str, again: bool) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": DATED}))
    if again:
        (folder / TEMPLATE).write_bytes(own_files(folder, names(folder), None, None)[TEMPLATE])
    own = own_files(folder, names(folder), None, day)
    template = own.get(TEMPLATE, (chat_template_of(folder) or "").encode())
    assert rendered(template, TALK, prompt=True) == f"Today is {shown}.Hi."
    assert template.count(b"endmacro") == 1


@pytest.mark.parametrize(("day", "shown"), [(None, "2025-01-01"), (date(2026, 1, 2), "2026-01-02")])
def test_a_template_without_any_date_gets_one(tmp_path: Path, day: date | None, shown: str) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_text('{{ strftime_now("%Y-%m-%d") }}')
    assert rendered(own_files(folder, names(folder), None, day)[TEMPLATE], TALK, prompt=True) == shown


def test_each_form_of_a_date_is_written(tmp_path: Path) -> None:
    """SmolLM3's, Granite's; a year alone, as templates compare it."""
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_text(
        """{{- strftime_now("%d %B %Y") + "; " + strftime_now( '%B %d, %Y') + "; " + strftime_now("%Y") -}}"""
    )
    own = own_files(folder, names(folder), None, date(2024, 7, 26))[TEMPLATE]
    assert rendered(own, TALK, prompt=True) == "26 July 2024; July 26, 2024; 2024"


def test_a_date_within_a_text_is_another_day(tmp_path: Path) -> None:
    """Mistral Small 3.1 tells where its knowledge ends; the second is what only looks like a date."""
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_text(
        """{{- "It ends on 2023-10-01, " + ("" or "2024-99-99") + "; today is " + strftime_now("%Y-%m-%d") -}}"""
    )
    own = own_files(folder, names(folder), None, None)[TEMPLATE]
    assert rendered(own, TALK, prompt=True) == "It ends on 2023-10-01, 2024-99-99; today is 2025-01-01"


@pytest.mark.parametrize("form", [None, "plain"])
def test_a_date_that_no_template_writes_is_refused(tmp_path: Path, form: BaseChat | None) -> None:
    folder = base_model(tmp_path / "m", {})
    if form is None:
        (folder / TEMPLATE).write_text("Hi")
    with pytest.raises(VlmflowError, match=r"models\.NAME\.date: 2024-07-26: the chat template writes no date"):
        own_files(folder, names(folder), form, date(2024, 7, 26))


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{%- set f = strftime_now -%}{%- if f('%Y')|int in [2025, 2026] -%}Buy it. {% endif %}", "strftime_now"),
        ("{{ strftime_now(format='%Y') }}", "strftime_now"),
        ("{% generation %}{{ ['a', 'b'] | random }}{% endgeneration %}", "random"),
        ("{{ [['a', 'b']] | map('random') | first }}", "random"),
        ("{{ lipsum(1) }}", "lipsum"),
    ],
)
@pytest.mark.parametrize("where", [TEMPLATE, "additional_chat_templates/tool_use.jinja", "tokenizer_config.json"])
def test_a_template_that_writes_other_texts_tomorrow_is_refused(
    template: str, word: str, where: str, tmp_path: Path
) -> None:
    folder = base_model(tmp_path / "m", {})
    several = json.dumps({"chat_template": [{"name": "default", "template": template}]})
    (folder / where).parent.mkdir(exist_ok=True)
    (folder / where).write_text(several if where.endswith(".json") else template)
    with pytest.raises(VlmflowError, match=rf"the chat template \w+ .*\({word}\)"):
        own_files(folder, [where, "config.json"])


def test_words_of_a_text_and_dates_that_are_fixed_are_no_clock(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_text("The strftime_now of random lipsum." + DATED)
    own = own_files(folder, names(folder))
    (folder / TEMPLATE).write_bytes(own[TEMPLATE])
    assert own_files(folder, names(folder)) == {}, "as in merged/RUN"


@pytest.mark.parametrize("content", [b"[]", b"1", b"null"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("tokenizer_config.json", None), ("processor_config.json", None), ("chat_template.json", None)),
        *(("tokenizer_config.json", "chatml"), ("processor_config.json", "chatml"), ("tokenizer.json", "chatml")),
        ("generation_config.json", "chatml"),
    ],
)
def test_a_file_that_is_no_object_is_named(
    name: str, form: Literal["chatml"] | None, content: bytes, tmp_path: Path
) -> None:
    folder = base_model(tmp_path / "m", {"<|im_end|>": 7})
    (folder / name).write_bytes(content)
    with pytest.raises(VlmflowError, match=rf"{name}: .* is not a JSON object"):
        own_files(folder, names(folder), form, None)


@pytest.mark.parametrize("token", [{}, {"id": "7"}, {"id": True}])
def test_a_token_without_a_number_ends_no_turn(token: dict[str, object], tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<|im_end|>"} | token]}))
    assert set(own_files(folder, names(folder), "chatml", None)) == {TEMPLATE}


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m", {})
    (folder / TEMPLATE).write_bytes(b"\xff\xfe")
    with pytest.raises(VlmflowError, match=r"chat_template\.jinja: is not in UTF-8"):
        chat_template_of(folder)
    os.truncate(folder / TEMPLATE, 1 << 40)  # it takes no room on the disk
    with pytest.raises(VlmflowError, match=r"chat_template\.jinja: has 1,099,511,627,776 bytes"):
        chat_template_of(folder)
    (folder / TEMPLATE).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\ud800" + DATED}))
    with pytest.raises(VlmflowError, match="holds a text that cannot be in UTF-8"):
        own_files(folder, names(folder), None, None)


def test_any_character_may_begin_a_text(tmp_path: Path) -> None:
    """JSON's two escapes for one character above 65,535 are two characters in Jinja, which no UTF-8 has."""
    folder = base_model(tmp_path / "m", {}, first='<\U0001f600}}">')
    template = own_files(folder, names(folder), "chatml", None)[TEMPLATE]
    assert rendered(template, TALK[:1], prompt=False) == '<\U0001f600}}"><|im_start|>user\nHi.<|im_end|>\n'
