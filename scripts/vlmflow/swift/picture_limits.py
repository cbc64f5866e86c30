"""Gives processors the picture limits of a run that ms-swift does not take from the environment itself.

ms-swift 4.6 reads IMAGE_MAX_TOKEN_NUM for Qwen-VL alone, and leaves all other pictures to the processor.
"""

import os
from pathlib import Path
from typing import Any

from vlmflow.pictures.budget import PictureBudget
from vlmflow.swift.child_process import IMAGE_MAX_TOKENS


def limit_pictures() -> None:
    """Let the processors of all templates that ms-swift makes from now on and in this process have the run's limits.

    They are those that are published (`merging.published_limits`).
    """
    from swift.template.base import Template

    plain = Template.__init__

    def make(template: Any, processor: Any, *values: Any, **named: Any) -> None:
        plain(template, processor, *values, **named)
        if most_tokens := os.environ.get(IMAGE_MAX_TOKENS):  # `make_swift_names` writes only texts
            budget = PictureBudget.of(Path(processor.model_info.model_dir), int(most_tokens))
            for key, value in budget.left_to_processor.items():
                setattr(processor.image_processor, key, value)

    Template.__init__ = make
