"""Which changes of code make a stage stale: of small modules, and of the project's own."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from vlmflow.harness.read_code import read_code
from vlmflow.harness.staleness import Code
from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"

MODULES = {
    "pack/__init__.py": "",
    "pack/a.py": '''"""What the stage calls."""
from math import floor
import numpy as np
from pack import b, values
from pack.b import first, second as other

LIMITS = {"rows": 5, "turns": values.MOST}

def check(rows: "list[int]", most: int = LIMITS["rows"]) -> int:
    """Check rows."""
    # a comment
    return floor(first(rows) + other(rows) + np.median(rows)) + Row(most).size()

class Row(b.Base):
    """A row."""
    def size(self) -> int:
        return self.most + sum(values.most for values in LIMITS.values())

def unused() -> None:
    b.never()
''',
    "pack/b.py": """from functools import cache
def first(rows): return rows[0]
def second(rows): return rows[-1]
def never(): return 3
class Base:
    kept: int = 3
    def __init__(self, most): self.most = most
@cache
def shown(kind): return f"{first(kind)!r:>{len(kind)}}"
""",
    "pack/values.py": "MOST = 6\n",
    "pack/acts.py": "import os\nNAMES = set()\nos.environ['ONE'] = 'x'\n",
    "pack/forms.py": "from pack import values\ndef form(row): return row\ndef other_form(row): return values.MOST\n",
    "pack/named.py": "def named(): return 1\n",
    "stages/one.py": """import sys
from pack import acts, forms
from pack.a import check
def main() -> None:
    '''Check.'''
    from pack.b import shown
    print(check([1]), shown("x"), sys.argv, forms.__name__, "pack.named")
if __name__ == "__main__":
    main()
""",
    "texts/page.jinja": "one",
}

Edit = tuple[str, str, str]
"""A file, a text in it, and what it becomes."""

STAYS: dict[str, list[Edit]] = {
    "a docstring": [("pack/a.py", '"""Check rows."""', '"""Check all rows."""')],
    "no docstring": [("pack/a.py", '    """A row."""\n', "")],
    "a comment": [("pack/a.py", "# a comment", "# another one")],
    "layout": [
        ("pack/a.py", "values.most for values in LIMITS.values()", "\n  values.most\n  for values in LIMITS.values()")
    ],
    "an import inside of the function": [
        ("pack/a.py", "from math import floor\n", ""),
        ("pack/a.py", "    # a comment", "    from math import floor"),
    ],
    "a library under its own name": [("pack/a.py", " as np", ""), ("pack/a.py", "np.median", "numpy.median")],
    "a module's function imported by its name": [
        ("pack/a.py", "from pack import b, values", "from pack import values\nfrom pack.b import Base, never"),
        ("pack/a.py", "(b.Base)", "(Base)"),
    ],
    "what the stage does not reach": [("pack/b.py", "return 3", "return 4")],
    "a function beside": [("pack/b.py", "def never", "def more(): return 1\ndef never")],
    "an import for types alone, of a module that acts": [
        ("pack/more.py", "", "import os\nos.environ['TWO'] = 'x'\n"),
        (
            "pack/b.py",
            "def never",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING: from pack import more\ndef never",
        ),
    ],
    "a moved function": [
        ("pack/b.py", "def first(rows): return rows[0]\n", "from pack.values import first\n"),
        ("pack/values.py", "MOST = 6\n", "MOST = 6\ndef first(rows): return rows[0]\n"),
        (
            "pack/a.py",
            "from pack.b import first, second as other",
            "from pack.b import second\nfrom pack.values import first",
        ),
        ("pack/a.py", "other(rows)", "second(rows)"),
    ],
    "a renamed module": [
        ("pack/values.py", "MOST = 6\n", ""),
        ("pack/numbers.py", "", "MOST = 6\n"),
        ("pack/forms.py", "values", "numbers"),
        ("pack/a.py", "import b, values", "import b, numbers"),
        ("pack/a.py", "values.MOST", "numbers.MOST"),
    ],
    "merged modules": [
        ("pack/b.py", MODULES["pack/b.py"], ""),
        ("pack/values.py", "MOST = 6\n", ""),
        (
            "pack/a.py",
            "from pack import b, values\nfrom pack.b import first, second as other\n",
            f"MOST = 6\n{MODULES['pack/b.py']}",
        ),
        ("pack/a.py", "values.MOST", "MOST"),
        ("pack/a.py", "other(rows)", "second(rows)"),
        ("pack/a.py", "b.never", "never"),
        ("pack/a.py", "b.Base", "Base"),
        ("pack/forms.py", "import values", "import a"),
        ("pack/forms.py", "values.MOST", "a.MOST"),
        ("stages/one.py", "pack.b", "pack.a"),
    ],
}

CHANGES: dict[str, list[Edit]] = {
    "two helpers that swap names": [
        ("pack/b.py", "first(rows): return rows[0]", "second(rows): return rows[0]"),
        ("pack/b.py", "second(rows): return rows[-1]", "first(rows): return rows[-1]"),
    ],
    "a name that stands for another helper": [
        ("pack/a.py", "first, second as other", "second as first, first as other")
    ],
    "another library's function of that name": [("pack/a.py", "from math import floor", "from numpy import floor")],
    "a constant": [("pack/values.py", "6", "7")],
    "a table's entry": [("pack/a.py", '"rows": 5', '"rows": 6')],
    "a default": [("pack/a.py", 'most: int = LIMITS["rows"]', "most: int = 5")],
    "an annotation": [("pack/a.py", '-> int:\n    """Check', '-> float:\n    """Check')],
    "a method": [("pack/b.py", "self.most = most", "self.most = 2 * most")],
    "a base class": [("pack/a.py", "Row(b.Base)", "Row")],
    "a decorator": [("pack/b.py", "@cache\n", "")],
    "a format": [("pack/b.py", "!r:>", "!r:<")],
    "a module whose name is used": [("pack/forms.py", "return row", "return [row]")],
    "what such a module reaches": [("pack/forms.py", "return values.MOST", "return -values.MOST")],
    "a module that a text names": [("pack/named.py", "1", "2")],
    "a statement that acts in a loaded module": [("pack/acts.py", "'x'", "'y'")],
    "an import for its effect": [("pack/values.py", "MOST", "import readline\nMOST")],
    "a decorator that registers": [
        ("pack/values.py", "MOST", "import atexit\n@atexit.register\ndef end(): pass\nMOST")
    ],
    "a template": [("texts/page.jinja", "one", "two")],
}


def digest(folder: Path, edits: list[Edit]) -> str:
    files = dict(MODULES)
    for name, old, new in edits:
        assert old in files.setdefault(name, ""), (name, old)
        files[name] = files[name].replace(old, new)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Code(folder).digest("stages.one", reads="texts")


@pytest.mark.parametrize("name", STAYS)
def test_what_means_the_same_makes_nothing_stale(tmp_path: Path, name: str) -> None:
    assert digest(tmp_path / "after", STAYS[name]) == digest(tmp_path / "before", [])


@pytest.mark.parametrize("name", CHANGES)
def test_what_means_something_else_makes_its_stage_stale(tmp_path: Path, name: str) -> None:
    assert digest(tmp_path / "after", CHANGES[name]) != digest(tmp_path / "before", [])


@pytest.mark.parametrize(("annotation", "same"), [("b.never", False), ("PartOf[b.never]", True)])
def test_the_class_of_settings_that_are_params_does_not_count(tmp_path: Path, annotation: str, same: bool) -> None:
    """Their values are recorded; another key of the class makes nothing stale."""
    takes = ("pack/a.py", "most: int =", f"most: {annotation} =")
    before = digest(tmp_path / "before", [takes])
    assert (digest(tmp_path / "after", [takes, ("pack/b.py", "return 3", "return 4")]) == before) is same


def test_the_digest_is_the_same_under_every_python(tmp_path: Path) -> None:
    """Its value is that of 3.11.7, 3.12.1 and 3.13.0."""
    assert digest(tmp_path, []) == "aabb8f6a66652188"


def test_what_was_read_is_kept_for_the_next_call(tmp_path: Path) -> None:
    kept, folder = tmp_path / "cache" / "code", tmp_path / "scripts"
    before = digest(folder, [])
    code = Code(folder, kept)
    assert code.digest("stages.one", reads="texts") == before
    code.keep()
    written = kept.read_bytes()
    (folder / "pack" / "values.py").write_text("MOST = 7\n")
    again = Code(folder, kept)
    assert again.digest("stages.one", reads="texts") == digest(tmp_path / "other", [("pack/values.py", "6", "7")])
    again.keep()
    assert len(kept.read_bytes()) > len(written)
    kept.write_bytes(b"\xc1")
    assert Code(folder, kept).digest("stages.one", reads="texts") != before


def test_what_another_reader_kept_is_read_again(tmp_path: Path) -> None:
    kept, folder = tmp_path / "code", tmp_path / "scripts"
    before = digest(folder, [])
    code = Code(folder, kept)
    code.digest("stages.one", reads="texts")
    code.keep()
    _, digests, modules = msgspec.msgpack.decode(kept.read_bytes())
    kept.write_bytes(msgspec.msgpack.encode(("another version", dict.fromkeys(digests, "another digest"), modules)))
    assert Code(folder, kept).digest("stages.one", reads="texts") == before


def test_declared_files_count_without_those_that_editors_hide(tmp_path: Path) -> None:
    before = digest(tmp_path, [])
    (tmp_path / "texts" / ".page.jinja.swp").touch()
    assert Code(tmp_path).digest("stages.one", reads="texts") == before
    with pytest.raises(FileNotFoundError, match="pack/other"):
        Code(tmp_path).digest("stages.one", reads="pack/other")


# --- the project's own code -------------------------------------------------------------------------------------------

COMPUTED = {
    "vlmflow/harness/start.py": "an executor, which no stage reaches",
    "vlmflow/config/raw_forms.py": "the forms of rows: a rule names those that its rows have (params.form_modules)",
    "vlmflow/estimate/shape.py": "what measures a model: its callers name it by a text",
}
"""Modules that load others by computed names, and why the digest misses nothing by it."""


def test_all_imports_can_be_followed() -> None:
    """But for COMPUTED: what they load is named elsewhere."""
    computed = set()
    for file in SCRIPTS.rglob("*.py"):
        name = file.relative_to(SCRIPTS).as_posix()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, name
                assert node.names[0].name != "*", name
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                computed |= {name} if not isinstance(node.args[0], ast.Constant) else set()
    assert computed == COMPUTED.keys()


def rules_of_pages() -> dict[str, str | None]:
    """Return of each stage the folder of templates that its rule reads."""
    read = {}
    for file in (ROOT / "rules").glob("*.smk"):
        for rule in file.read_text().split("\nrule ")[1:]:
            reads = re.search(r'^        reads="(.*)",$', rule, re.MULTILINE)
            read[re.search(r'"\.\./scripts/stages/(\w+)\.py"', rule)[1]] = reads and reads[1]
    return read


def test_only_rules_of_pages_depend_on_their_layout() -> None:
    """A new page cannot forget its templates: the test finds the stages that lay out pages by what they reach."""
    code, read = Code(SCRIPTS), rules_of_pages()

    def reach(name: str, stages: dict[str, bool]) -> set[str]:
        return {
            stage
            for stage, pages in stages.items()
            if any(f"{one.module}.".startswith(name) for one in code.reached(f"stages.{stage}", pages=pages))
        }

    pages = {"data_page", "estimate_page", "eval_page", "lengths_page", "run_page", "search_page"}
    drawing = {"validate_sharegpt", "mix_rows", "train_smoke"}
    assert {stage for stage, folder in read.items() if folder == "vlmflow/reports/templates"} == pages
    assert {stage for stage, folder in read.items() if folder and stage not in pages} == {"publish_merged"}
    page = "vlmflow.reports.page."
    assert reach(page, dict.fromkeys(read, True)) == {*pages, *drawing, "train_model", "publish_merged"}
    assert reach(page, {stage: folder is not None for stage, folder in read.items()}) == {*pages, "publish_merged"}
    assert all(folder.is_dir() for folder in (SCRIPTS / name for name in read.values() if name))


def test_a_changed_strategy_or_tuner_fetches_no_model_again() -> None:
    """All that is made of a model would run again, too."""
    code = Code(SCRIPTS)

    def reached(stage: str) -> set[str]:
        return {name for one in code.reached(f"stages.{stage}") for name in code.names(one)}

    assert {"STRATEGIES", "TUNERS"} <= reached("train_model")
    assert not {"STRATEGIES", "TUNERS"} & (reached("fetch_model") | reached("fetch_model_files"))


def uses_of(code: str) -> list[list[str]]:
    return [statement.uses for statement in read_code(code.encode()).statements]


def test_a_variable_of_a_function_hides_a_name_only_there() -> None:
    code = """
from pack import rows, names
def f(rows, *, of=rows.DEFAULT):
    return [rows for names in rows for row in [names.x]], (lambda rows: rows.y), names.z
class Kept:
    rows: rows.Type
    def __init__(self): self.rows = rows.read()
"""
    assert uses_of(code) == [["pack.rows.DEFAULT", "pack.names.z"], ["pack.rows.Type", "pack.rows.read"]]


def test_a_comprehension_reads_before_it_binds() -> None:
    assert uses_of("from pack import rows\ndef f(): return [rows for rows in rows.all()]") == [["pack.rows.all"]]
