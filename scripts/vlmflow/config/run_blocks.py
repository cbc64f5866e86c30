"""The blocks of a run's settings that several stages take; what one stage alone takes is in its script."""

from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.settings import Settings


class LengthBlock(Settings):
    """What decides how many tokens a row has; see docs/config.md."""

    model_type: str
    image_max_tokens: int
    text_args: dict[str, Any]
    """Those of swift_args that change the text."""


class TrainBlock(Settings):
    """What decides how a run trains; see docs/config.md."""

    model_type: str
    train: TrainSettings
    device: str
    processes: int
    strategy: str
