"""The chat template of a model that stages see: its own, with one date for all days, or ours for a base model.

A base model was trained on no dialogues and has none. ms-swift's templates `chatml` and `default` are for such models;
ours render a conversation as these train it (swift.template, templates/utils.py and llm.py of 4.6).
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from vlmflow.config.model_types import BaseChat
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import read_object, read_template, utf8

JINJA = ".jinja"
TEMPLATE = f"chat_template{JINJA}"
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
STOPS = "eos_token_id"
"""Where transformers looks for the tokens at which a model stops; without it, in config.json."""

TODAY = "strftime_now"
"""The function that transformers gives to chat templates: today's date in a form of strftime."""

OTHERWISE = date(2025, 1, 1)
"""The date for templates that hold none (gpt-oss): any day will do, if it stays the same."""

ONE_DATE = re.compile(r"^\{%- macro strftime_now\(form\) -%\}.*?\{%- endmacro -%\}\n")
"""What `_with_date` puts before a template."""

FORM = re.compile(rf"{TODAY}\(\s*(['\"])(.*?)\1")
"""Where a template asks for the date, and in which form."""

VARYING = {TODAY: "reads the clock", "random": "draws at random", "lipsum": "draws at random"}
"""What would make a template write other texts at other times (jinja2 3.1: a filter, a function), and why it is
refused."""

WRITTEN = {"%d %b %Y": re.compile(r"\b\d{2} [A-Z][a-z]{2} \d{4}\b"), "%Y-%m-%d": re.compile(r"\b\d{4}-\d{2}-\d{2}\b")}
"""How ms-swift's chat templates write a date, and what it looks like."""


def chat_template_of(folder: Path) -> str | None:
    """Return the text of a model's own chat template; None if it has none, or several. folder: the model's files.

    Raises VlmflowError if a file where it may be cannot be read.
    """
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


def date_in(template: str, *, alone: bool) -> date | None:
    """Return the first date in a chat template; None without one.

    alone: only one that is a whole text in quotes, as for programs without a clock. Others may mean another day, such
    as the end of what the model knows (Mistral Small 3.1).
    """
    quote = "['\"]" if alone else ""
    dates = [
        (match.start(), match[0].strip("'\""), form)
        for form, pattern in WRITTEN.items()
        for match in re.finditer(quote + pattern.pattern + quote, template)
    ]
    for _, text, form in sorted(dates):
        with suppress(ValueError):  # it looks like one alone
            return datetime.strptime(text, form).date()
    return None


def stops_of(folder: Path) -> list[int]:
    """Return the tokens at which a model stops, as transformers reads them. folder: the model's files.

    Raises VlmflowError if a file cannot be read.
    """
    config = read_object(folder / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    stops: Any = next((each[STOPS] for each in (generation, config, inner) if each.get(STOPS) is not None), [])
    return [stop for stop in (stops if isinstance(stops, list) else [stops]) if type(stop) is int]


def stop_tokens_of(folder: Path) -> list[str]:
    """Return the texts of the tokens at which a model stops; a number where the tokenizer names no such token.

    Raises VlmflowError if a file cannot be read.
    """
    texts = {number: text for text, number in added_tokens(folder).items()}
    return [texts.get(stop, str(stop)) for stop in stops_of(folder)]


def own_files(
    folder: Path,
    names: Collection[str],
    form: BaseChat | None = None,
    day: date | None = None,
    stop_tokens: Collection[str] = (),
) -> dict[str, bytes]:
    """Return the files that stages see in place of a model's own, by name.

    folder, names: the model's files, those in JSON at least. form, day, stop_tokens: the model's settings
    `chat_template`, `date`, `stop_tokens`.

    Raises VlmflowError if a model with a chat template is to get another, a date has no place in the template, the
    tokenizer has no such token, or a file cannot be read.
    """
    tokens = {} if form is None and not stop_tokens else added_tokens(folder)
    if unknown := [token for token in stop_tokens if token not in tokens]:
        raise VlmflowError(
            f"{folder}: models.NAME.stop_tokens: the tokenizer has no token {unknown[0]!r}",
            "write one of the added_tokens in tokenizer.json",
        )
    files = _own_template(folder, names, form, day)
    ends = [tokens[token] for token in (*stop_tokens, *([CHATML_END] if form == "chatml" else [])) if token in tokens]
    if ends and set(ends) - set(stops := stops_of(folder)):
        config = read_object(folder / GENERATION) if GENERATION in names else {}
        all_stops = list(dict.fromkeys([*ends, *stops]))
        files[GENERATION] = json.dumps(config | {STOPS: all_stops}, indent=2).encode()
    return files


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the numbers of the tokens that a model's tokenizer takes as wholes, by their texts.

    Raises VlmflowError if its file cannot be read.
    """
    added = read_object(file).get("added_tokens") if (file := folder / "tokenizer.json").is_file() else None
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return {str(token.get("content")): token["id"] for token in tokens if type(token.get("id")) is int}


def _own_template(folder: Path, names: Collection[str], form: BaseChat | None, day: date | None) -> dict[str, bytes]:
    for other, file in _further_templates(folder, names):
        _refuse_varying(other, file)
    text = chat_template_of(folder) or ""
    dated = _with_date(text, day) if TODAY in text else text
    _refuse_varying(dated, folder / TEMPLATE)
    if day and not ONE_DATE.match(dated):
        raise VlmflowError(
            f"{folder}: models.NAME.date: {day}: the chat template writes no date ({TODAY} with its form)",
            "remove models.NAME.date",
        )
    if form is None:
        return {} if dated == text else {TEMPLATE: utf8(dated, folder)}
    if has_chat_template(folder):
        raise VlmflowError(
            f"{folder}: the model has a chat template of its own", "remove models.NAME.chat_template: it is used"
        )
    tokenizer = read_object(folder / "tokenizer.json") if "tokenizer.json" in names else {}
    return {TEMPLATE: utf8(_first_token(tokenizer) + FORMS[form], folder / "tokenizer.json")}


def _first_token(tokenizer: dict[str, Any]) -> str:
    """Return what writes the token with which a tokenizer begins each text: ms-swift begins each row with it.

    tokenizer: the content of tokenizer.json (tokenizers 0.23, processors/template.rs).
    """
    processor = tokenizer.get("post_processor")
    within = processor.get("processors") if isinstance(processor, dict) else None
    for part in [processor, *(within if isinstance(within, list) else [])]:
        match part:
            case {"single": [{"SpecialToken": {"id": str(token)}}, *_]}:
                return "{{- " + json.dumps(token, ensure_ascii=False) + " -}}\n"
    return ""


def _further_templates(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield the texts of a model's templates for other uses, such as one for tools, and their files."""
    for name in names:
        if name.endswith(JINJA) and name != TEMPLATE:
            yield read_template(folder / name), folder / name
        elif name in (*TEMPLATES, *WITH_TEMPLATE) and not name.endswith(JINJA):
            several = read_object(folder / name).get(TEMPLATE_KEY)
            for each in several if isinstance(several, list) else []:
                if isinstance(each, dict):
                    yield str(each.get("template")), folder / name


def _refuse_varying(template: str, file: Path) -> None:
    """Raise VlmflowError if a template may write other texts at other times: no comparison of rows would hold.

    template: with one date, if it could get one (`_with_date`). file: where it is.
    """
    own = ONE_DATE.sub("", template)
    dated = {TODAY} if own != template else set()
    try:
        words = [text for _, kind, text in Environment(autoescape=True).lex(own) if kind in ("name", "string")]
    except TemplateSyntaxError:
        return  # it fails at the first row, with the reason
    if varying := next((word for word in map(_unquoted, words) if word in VARYING.keys() - dated), None):
        raise VlmflowError(
            f"{file}: the chat template {VARYING[varying]} ({varying}): what it writes today says nothing of tomorrow",
            f"put a template without {varying} into a local copy of the model, and use that",
        )


def _unquoted(word: str) -> str:
    return word.strip("'\"")


def _with_date(template: str, day: date | None) -> str:
    """Return a template that writes one date on all days.

    day: that date; None for the one that it holds for programs without a clock, else OTHERWISE.
    """
    own = ONE_DATE.sub("", template)
    if day is None and own != template:
        return template
    written = day or date_in(own, alone=True) or OTHERWISE
    by_form = {form: written.strftime(form) for _, form in FORM.findall(own)}
    if not by_form:
        return template
    macro = "{%- macro strftime_now(form) -%}{{ " + json.dumps(by_form) + "[form] }}{%- endmacro -%}\n"
    return macro + own
