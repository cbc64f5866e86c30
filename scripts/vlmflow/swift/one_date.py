"""Gives templates of ms-swift that write today's date one date for all days: that of the model's own chat template.

ms-swift 4.6 writes today's date into some templates when it is imported (templates/llama.py, mistral.py), and into rows
as it encodes them (templates/llm.py), so a training that resumes tomorrow would go on with other tokens, and no digest
would tell. The models' own chat templates take today's date too, but many have one of their own for programs that give
none (Llama 3.2: 26 Jul 2024).
"""

import sys
from contextlib import suppress
from datetime import datetime, time, timedelta, tzinfo
from typing import Any, Self

from vlmflow.fetch.chat_templates import OTHERWISE, WRITTEN

HELD_IN = ("prefix", "system_prefix", "prompt", "chat_sep", "suffix", "default_system")
"""The parts of a template (swift.template.TemplateMeta): texts, and lists of texts."""


def hold_one_date() -> None:
    """Let all templates that ms-swift makes from now on and in this process write the date of their model."""
    from swift.template.base import Template

    plain = Template.__init__
    day = datetime.now()
    days = [day - timedelta(days=1), day, day + timedelta(days=1)]  # ms-swift's import may be before midnight

    def make(template: Any, processor: Any, *values: Any, **named: Any) -> None:
        plain(template, processor, *values, **named)
        held = _own_day(str(getattr(processor, "chat_template", None) or ""))
        for part in HELD_IN:
            text = getattr(template.template_meta, part)
            for how in WRITTEN:
                text = _dated(text, [day.strftime(how) for day in days], held.strftime(how))
            setattr(template.template_meta, part, text)
        _show_clocks(held)

    Template.__init__ = make


def _own_day(chat_template: str) -> datetime:
    """Return the first date that a chat template holds."""
    found = ((each.start(), each[0], how) for how, looks in WRITTEN.items() for each in looks.finditer(chat_template))
    for _, text, how in sorted(found):
        with suppress(ValueError):  # it may only look like one
            return datetime.strptime(text, how)
    return datetime.combine(OTHERWISE, time())


def _dated(text: Any, today: list[str], date: str) -> Any:
    if isinstance(text, list):
        return [_dated(each, today, date) for each in text]
    if isinstance(text, str):
        for each in today:
            text = text.replace(each, date)
    return text


def _show_clocks(day: datetime) -> None:
    """Let the modules of ms-swift's templates read a day from their clock."""

    class OnThatDay(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(day.year, day.month, day.day, tzinfo=tz)

        @classmethod
        def today(cls) -> Self:
            return cls.now()

    for name, module in list(sys.modules.items()):
        if name.startswith("swift.template.") and isinstance(vars(module).get("datetime"), type):
            module.datetime = OnThatDay  # type: ignore[attr-defined]
