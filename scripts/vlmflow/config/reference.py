"""The reference page of the configuration, generated from its model so that both agree."""

import json
import re
from typing import Any

from vlmflow.config.model import Config
from vlmflow.config.raw_forms import table
from vlmflow.config.settings import MOST
from vlmflow.config.shown import allowed

KINDS = re.compile(r"(<!-- kinds: .* -->\n).*?(<!-- end of kinds -->)", re.DOTALL)
"""The table of kinds in `docs/data.md`, with the comments around it."""

HEAD = f"""# Configuration

For people who look up a key. `make docs` makes this page from the model in `scripts/vlmflow/config/`; a test compares
both.

`config.yaml` holds the real runs. Do not edit it for your own run: put what differs into a file and name it,
`CONFIG=my-run.yaml` (for `snakemake` itself, `--configfile my-run.yaml --`); give single values on Snakemake's command
line, as in `--config 'runs={{qwen3vl-fire: {{train: {{learning_rate: 2e-4}}}}}}'`. Blocks are merged key by key, lists
are replaced. Numbers may have exponent form (`1e-4`) everywhere; whole numbers without another upper bound are at most
{MOST:,}. Snakemake refuses a wrong key, type or value when it reads the workflow, with one line per error.

A file that is empty, is not valid YAML or has a key twice is refused with file, line and column by every `make`
command with `CONFIG=my-run.yaml`, and by `make check-config CONFIG=my-run.yaml`, which takes a second and makes no
plan. If Snakemake cannot read a file of `--configfile` at all, it does not say where. Put targets behind `--`: it
would take them for such files. `snakemake -n` also checks that files and picture folders exist (but for the default
`pictures/`), and that there are enough cores. GPUs are checked when a run starts.
"""


def reference_page() -> str:
    """Return `docs/config.md`: a table of keys for every block, in the order in which the model nests them."""
    schema = Config.model_json_schema()
    sections: list[str] = []
    waiting = [("", schema)]
    while waiting:
        path, block = waiting.pop(0)
        sections.append(_section(path, block))
        inner = [(f"{path}{step}", found) for step, found in _blocks(block, schema["$defs"])]
        waiting = inner + waiting
    return HEAD + "\n" + "\n".join(sections)


def with_kinds(page: str) -> str:
    """Return the text of `docs/data.md` with the current table of kinds."""
    return KINDS.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


def _blocks(block: dict[str, Any], definitions: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks inside a block, with the keys that lead there: NAME for the first that a block may be."""
    found: list[tuple[str, dict[str, Any]]] = []
    for key, value in block.get("properties", {}).items():
        named = next(iter(value.get("patternProperties", {}).values()), None)
        step = f"{key}.NAME." if named else f"{key}."
        for branch in [named or value, *value.get("anyOf", []), *(named or {}).get("oneOf", [])]:
            if "$ref" in branch:
                inner = definitions[branch["$ref"].rsplit("/", 1)[-1]]
                again = any(step == before for before, _ in found)
                found.append((f"{key}.{inner['title'].removesuffix('Settings').upper()}." if again else step, inner))
    return found


def _section(path: str, block: dict[str, Any]) -> str:
    title = f"`{path.rstrip('.')}`" if path else "Top level"
    rows = [_row(key, value, block.get("required", [])) for key, value in block["properties"].items()]
    about = " ".join(block.get("description", "").split())
    return "\n".join(
        [f"## {title}", "", about, "", "| key | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _row(key: str, value: dict[str, Any], required: list[str]) -> str:
    named = next(iter(value.get("patternProperties", {}).values()), {"type": "none"})
    block = "$ref" in value or "type" not in named
    form = "a block, see below" if block else allowed(value).replace(f" at most {MOST}", "")  # as HEAD says
    default = "required" if key in required else "" if block else f"`{json.dumps(value.get('default'))}`"
    meaning = " ".join(value.get("description", "").split())
    return f"| `{key}` | {form.replace('|', ' or ')} | {default} | {meaning} |"
