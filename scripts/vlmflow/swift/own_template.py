"""ms-swift's own template of a model, as the trainers make it."""

import sys
from typing import Any

from vlmflow.swift.conv1d import take_conv1d_for_linear
from vlmflow.swift.no_remote_code import refuse_remote_code
from vlmflow.swift.one_date import hold_one_date
from vlmflow.swift.picture_limits import limit_pictures
from vlmflow.swift.row_encoder import encode_rows_as_served
from vlmflow.swift.row_reader import read_rows_by_type


def encode_as_in_training() -> None:
    """Let ms-swift read and encode rows as all of our processes do, from now on and in this process."""
    refuse_remote_code()
    read_rows_by_type()
    encode_rows_as_served()
    hold_one_date()
    limit_pictures()
    take_conv1d_for_linear()


def own_template(words: list[str]) -> Any:
    """Return the template of ms-swift's arguments of model and template, set to training.

    words: a command line. See `encode_as_in_training`. Ends the process if ms-swift does not know an argument.
    """
    encode_as_in_training()
    from swift.arguments import BaseArguments
    from swift.utils import parse_args

    arguments, unknown = parse_args(BaseArguments, words)
    if unknown:
        sys.exit(f"ValueError: unknown arguments: {unknown}")
    template = arguments.get_template()
    template.set_mode("train")
    return template
