"""The chat template of a model that stages see: its own, with one date for all days, or ours for a base model.

A base model was trained on no dialogues and has none. ms-swift's templates `chatml` and `default` are for such models;
ours render a conversation as these train it (swift.template, templates/utils.py and llm.py of 4.6).
"""

import json
import re
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

from vlmflow.config.model_types import BaseChat
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.owners_files import read_object, read_template, utf8

TEMPLATE = "chat_template.jinja"
TEMPLATES = (TEMPLATE, "chat_template.json")
TEMPLATE_KEY, WITH_TEMPLATE = "chat_template", ("tokenizer_config.json", "processor_config.json")
"""Where transformers looks for a chat template: files of its own, the first before all others, or a key of others
(5.19, processing_utils.py)."""

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
CHATML_END = "<|im_end|>"

PLAIN = """\
{%- if messages[0].role != 'system' -%}
{{- 'You are a helpful assistant.\\n\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '### Human:\\n' + message.content + '\\n\\n### Assistant:\\n' -}}
{%- elif message.role == 'assistant' and loop.last -%}
{{- message.content + eos_token -}}
{%- else -%}
{{- message.content + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
"""

FORMS: dict[BaseChat, str] = {"chatml": CHATML, "plain": PLAIN}

GENERATION = "generation_config.json"
"""Where transformers looks for the tokens at which a model stops (generation_config.eos_token_id)."""

TODAY = "strftime_now"
"""The function that transformers gives to chat templates: today's date in a form of strftime."""

OTHERWISE = date(2025, 1, 1)
"""The date for templates that hold none (gpt-oss): any day will do, if it stays the same."""

ONE_DATE = re.compile(r"^\{%- macro strftime_now\(form\) -%\}.*?\{%- endmacro -%\}\n")
"""What `_with_date` puts before a template."""

WRITTEN = {"%d %b %Y": re.compile(r"\b\d{2} [A-Z][a-z]{2} \d{4}\b"), "%Y-%m-%d": re.compile(r"\b\d{4}-\d{2}-\d{2}\b")}
"""How chat templates write a date, and what it looks like."""

ASKED = re.compile(rf"""{TODAY}\(\s*(["'])(.*?)\1""")
"""How they ask for today's."""


def chat_template_of(folder: Path) -> str | None:
    """Return the text of a model's own chat template; None if it has none, or several. folder: the model's files."""
    if (folder / TEMPLATE).is_file():
        return read_template(folder / TEMPLATE)
    for name in (*TEMPLATES[1:], *WITH_TEMPLATE):
        if (folder / name).is_file() and isinstance(text := read_object(folder / name).get(TEMPLATE_KEY), str):
            return text
    return None


def has_chat_template(folder: Path) -> bool:
    """Return whether a model has a chat template, or several. folder: the model's files; weights are not needed."""
    return any((folder / name).is_file() for name in TEMPLATES) or any(
        TEMPLATE_KEY in read_object(folder / name) for name in WITH_TEMPLATE if (folder / name).is_file()
    )


def require_chat_template(folder: Path) -> None:
    """Raise VlmflowError if a model has no chat template.

    The training does without: ms-swift has its own for each model. But transformers needs it to turn a conversation
    into tokens, in the proof of the merged weights and for everybody who uses them.
    folder: the model's files; weights are not needed.
    """
    if not has_chat_template(folder):
        raise VlmflowError(
            f"{folder}: the model has no chat template ({' or '.join(TEMPLATES)}, or the key {TEMPLATE_KEY} in "
            f"{' or '.join(WITH_TEMPLATE)}), without which nobody can talk to the merged weights",
            f"set models.NAME.chat_template: {' or '.join(FORMS)}, if it is a base model; otherwise add the {TEMPLATE} "
            "that its owner publishes to a local copy of the model, and use that",
        )


def own_files(folder: Path, names: Collection[str], form: BaseChat | None, day: date | None) -> dict[str, bytes]:
    """Return the files that stages see in place of a model's own, by name.

    folder, names: the model's files, those in JSON at least. form, day: the model's settings `chat_template`, `date`.

    Raises VlmflowError if a model with a chat template is to get another, if its own one writes a date in a form that
    `day` cannot replace, and for files that are not what they must be.
    """
    if form is None:
        text = chat_template_of(folder) or ""
        if day and (other := _other_forms(text)):
            raise VlmflowError(
                f"{folder}: the model's chat template writes a date as {other[0]!r:.40}, which models.NAME.date cannot "
                f"replace (it can: {', '.join(WRITTEN)})",
                "remove models.NAME.date; with template_differs: true the run goes on with today's",
            )
        dated = _with_date(text, day) if TODAY in text else text
        return {} if dated == text else {TEMPLATE: utf8(dated, folder)}
    if has_chat_template(folder):
        raise VlmflowError(
            f"{folder}: the model has a chat template of its own", "remove models.NAME.chat_template: it is used"
        )
    tokenizer = read_object(folder / "tokenizer.json") if "tokenizer.json" in names else {}
    files = {TEMPLATE: utf8(_first_token(tokenizer) + FORMS[form], folder / "tokenizer.json")}
    end = next((token.get("id") for token in _added(tokenizer) if token.get("content") == CHATML_END), None)
    if form == "chatml" and type(end) is int:
        # Servers stop at the end of a sequence, which this form does not have.
        config = read_object(folder / GENERATION) if GENERATION in names else {}
        files[GENERATION] = json.dumps(config | {"eos_token_id": [end, *_ends(folder, config, end)]}, indent=2).encode()
    return files


def _ends(folder: Path, config: dict[str, Any], known: int) -> list[int]:
    """Return the other tokens at which a model stops."""
    ends = config.get("eos_token_id", read_object(folder / "config.json").get("eos_token_id"))
    return [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int and end != known]


def _added(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    found = tokenizer.get("added_tokens")
    return [token for token in found if isinstance(token, dict)] if isinstance(found, list) else []


def _first_token(tokenizer: dict[str, Any]) -> str:
    """Return what writes the token with which a tokenizer begins each text: ms-swift begins each row with it.

    tokenizer: the content of tokenizer.json (tokenizers 0.23, processors/template.rs).
    """
    processor = tokenizer.get("post_processor")
    within = processor.get("processors") if isinstance(processor, dict) else None
    for each in [processor, *(within if isinstance(within, list) else [])]:
        match each:
            case {"single": [{"SpecialToken": {"id": str(token)}}, *_]}:
                return "{{- " + json.dumps(token, ensure_ascii=False) + " -}}\n"
    return ""


def _other_forms(template: str) -> list[str]:
    """Return the forms other than `WRITTEN` in which a template asks for today's date."""
    return [form for _, form in ASKED.findall(template) if form not in WRITTEN]


def _with_date(template: str, day: date | None) -> str:
    """Return a template that writes one date on all days.

    day: that date; None for the one that it holds for programs without a clock, else OTHERWISE.
    """
    own = ONE_DATE.sub("", template)
    if day is None and own != template:
        return template
    by_form = {}
    for form, looks in WRITTEN.items():
        if form in own:
            held = None if day else looks.search(own)
            by_form[form] = held[0] if held else (day or OTHERWISE).strftime(form)
    if not by_form or _other_forms(own):
        return template
    macro = "{%- macro strftime_now(form) -%}{{ " + json.dumps(by_form) + "[form] }}{%- endmacro -%}\n"
    return macro + own
