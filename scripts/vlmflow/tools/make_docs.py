"""Generate files of docs/ from the code: the configuration reference, two JSON Schemas, the table of kinds."""

from pathlib import Path

from vlmflow.config.model import Config
from vlmflow.config.reference import reference_page, with_kinds
from vlmflow.core.files import whole_file, write_json
from vlmflow.harness.stage import run_stage
from vlmflow.rows.sharegpt import json_schema


def main(*, docs: Path = Path("docs")) -> None:
    """Write the files.

    docs: the folder with config.md, config.schema.json, sharegpt-row.schema.json, and data.md; of the latter only the
    table of kinds is replaced.
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
