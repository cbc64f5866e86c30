"""Gives templates of ms-swift that hold today's date one date for all days: that of the model's own chat template.

ms-swift 4.6 writes today's date into some templates when it is imported (templates/llama.py, mistral.py), so a training
that resumes tomorrow would go on with other tokens, and no digest would tell. The models' own chat templates take
today's date too, but many have one of their own for programs that give none (Llama 3.2: 26 Jul 2024).
"""

import re
from datetime import datetime, timedelta
from typing import Any

from vlmflow.fetch.chat_templates import WRITTEN

HELD_IN = ("prefix", "system_prefix", "prompt", "chat_sep", "suffix", "default_system")
"""The parts of a template (swift.template.TemplateMeta): texts, and lists of texts."""


def hold_one_date() -> None:
    """Let all templates that ms-swift makes from now on and in this process hold one date.

    Making one raises ValueError if it holds today's date, and the model's chat template has none of its own.
    """
    from swift.template.base import Template

    plain = Template.__init__
    day = datetime.now()
    days = [day - timedelta(days=1), day, day + timedelta(days=1)]  # ms-swift's import may be before midnight

    def make(template: Any, processor: Any, *values: Any, **named: Any) -> None:
        plain(template, processor, *values, **named)
        own = str(getattr(processor, "chat_template", None) or "")
        for name, looks in WRITTEN.items():
            for part in HELD_IN:
                text = getattr(template.template_meta, part)
                setattr(template.template_meta, part, _dated(text, [day.strftime(name) for day in days], looks, own))

    Template.__init__ = make


def _dated(text: Any, today: list[str], looks: re.Pattern[str], own: str) -> Any:
    if isinstance(text, list):
        return [_dated(each, today, looks, own) for each in text]
    if not isinstance(text, str) or not (held := [date for date in today if date in text]):
        return text
    if not (date := looks.search(own)):
        raise ValueError(
            f"the template holds today's date ({held[0]}), and the model's chat template has none of its own: set "
            "models.NAME.date"
        )
    return text.replace(held[0], date[0])
