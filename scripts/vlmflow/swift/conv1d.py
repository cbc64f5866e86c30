"""Makes ms-swift load and adapt models that are built like GPT-2.

ms-swift 4.6 sets a model's `hidden_size` to null where its config.json has another name for it (`compat_zero3`,
utils/hf_config.py), and does not count their layers, transformers' `Conv1D`, among the linear ones.
"""

from functools import partial
from typing import Any


def take_conv1d_for_linear() -> None:
    """Change ms-swift in this process; other models are loaded and adapted as before."""
    from swift.pipelines.train import tuner
    from swift.utils import HfConfigFactory, find_all_linears
    from transformers.pytorch_utils import Conv1D

    plain = HfConfigFactory.compat_zero3

    def keep_size(config: Any) -> None:
        if HfConfigFactory.get_config_attr(config, "hidden_size") is not None:
            plain(config)

    HfConfigFactory.compat_zero3 = staticmethod(keep_size)
    tuner.find_all_linears = partial(find_all_linears, extra_layers=[Conv1D])
