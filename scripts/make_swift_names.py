"""Write the names that the installed ms-swift knows into the configuration's table, for review.

Planning checks names against this table, because importing ms-swift takes seconds, and the data image does not have it.
"""

import dataclasses
from pathlib import Path
from typing import Any

from harness.stage import run_stage
from vlmflow.config.swift_args import TABLE
from vlmflow.core.files import write_json


def main(*, table: Path = TABLE) -> None:
    """Write the arguments of `swift sft`, the kinds of models (model_type) and the chat templates.

    table: the file to write, see vlmflow.config.swift_args.
    """
    write_json(table, installed_names())


def installed_names() -> dict[str, Any]:
    """Return the names by kind, sorted: arguments, model_types with their architectures (config.json), templates."""
    from swift.arguments import SftArguments
    from swift.model import MODEL_MAPPING
    from swift.template import TEMPLATE_MAPPING

    return {
        "arguments": sorted(field.name for field in dataclasses.fields(SftArguments) if field.init),
        "model_types": {name: sorted(MODEL_MAPPING[name].architectures) for name in sorted(MODEL_MAPPING)},
        "templates": sorted(TEMPLATE_MAPPING),
    }


if __name__ == "__main__":
    run_stage(main)
