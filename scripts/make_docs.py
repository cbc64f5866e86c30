"""Write what is made from the code under docs/: configuration reference, the two JSON Schemas, the table of kinds."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.model import Config
from vlmflow.config.reference import reference_page, with_kinds
from vlmflow.core.files import whole_file, write_json
from vlmflow.rows.sharegpt import json_schema


def main(*, docs: Path = Path("docs")) -> None:
    """Write them.

    docs: the folder that holds config.md, config.schema.json and sharegpt-row.schema.json; and data.md, of which the
    table of kinds alone is written.
    """
    data = with_kinds((docs / "data.md").read_text())
    with whole_file(docs / "data.md", "w") as page:
        page.write(data)
    with whole_file(docs / "config.md", "w") as page:
        page.write(reference_page())
    write_json(docs / "config.schema.json", Config.model_json_schema())
    write_json(docs / "sharegpt-row.schema.json", json_schema())


if __name__ == "__main__":
    run_stage(main)
