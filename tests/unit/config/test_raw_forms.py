"""The registry of raw forms: it finds every module, refuses two of one kind, and knows the code of each kind."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmflow.config import raw_forms
from vlmflow.config.raw_forms import form_of, kinds, kinds_with, modules_of
from vlmflow.harness.params import RuleParams
from vlmflow.harness.staleness import Code
from workflow_runs import clone

FORMS = Path(raw_forms.__file__).parents[1] / "rows" / "forms"


@pytest.fixture
def own_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package of forms instead of the project's."""
    package = tmp_path / "own_forms"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(raw_forms, "PACKAGE", package.name)
    raw_forms._modules.cache_clear()
    yield package
    raw_forms._modules.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        del sys.modules[name]


def add(package: Path, name: str, *names: str) -> None:
    text = f"from vlmflow.config.raw_forms import RawForm\nFORM = RawForm({names!r}, 'rows', object)\n"
    (package / f"{name}.py").write_text(text)


def test_every_module_is_a_form() -> None:
    modules = {f"{raw_forms.PACKAGE}.{file.stem}" for file in FORMS.glob("*.py") if file.stem != "__init__"}
    assert {modules_of(kind)[0] for kind in kinds()} == modules
    assert {*modules_of("auto")} == modules
    assert [name.rpartition(".")[2] for name in modules_of("prompt_completion")] == ["prompt_completion", "messages"]
    assert kinds() == sorted(kinds())
    assert kinds_with("form") == ["fire"]
    assert {kind for kind in kinds() if form_of(kind).one_prompt} == {"text"}


def test_a_module_is_found_by_being_there(own_forms: Path) -> None:
    add(own_forms, "b", "letters", "post")
    add(own_forms, "a", "notes")
    assert kinds() == ["letters", "notes", "post"]
    assert raw_forms.table().endswith("\n| `letters`, `post` | rows |\n| `notes` | rows |\n")


def test_two_forms_of_one_kind_are_refused(own_forms: Path) -> None:
    add(own_forms, "a", "notes")
    add(own_forms, "b", "letters", "notes")
    with pytest.raises(ValueError, match="a form of the same kind"):
        kinds()


def test_a_changed_form_makes_only_rows_of_its_own_kind_stale(tmp_path: Path) -> None:
    scripts = clone(tmp_path / "clone") / "scripts"
    settings = SimpleNamespace(datasets={kind: SimpleNamespace(kinds=[kind]) for kind in kinds()})

    def digests() -> dict[str, str]:
        modules, of_script = RuleParams(settings).form_modules, Code(scripts).digest
        return {kind: of_script("stages.convert_rows", *modules({"dataset": kind})) for kind in kinds()}

    def others() -> dict[str, str]:
        of_script = Code(scripts).digest
        return {file.stem: of_script(f"stages.{file.stem}") for file in scripts.glob("stages/*.py")}

    kinds_before, others_before = digests(), others()
    form = scripts / "vlmflow" / "rows" / "forms" / "conversations.py"
    form.write_text(f"{form.read_text()}\nMORE = 1\n")
    kinds_after, others_after = digests(), others()
    assert {kind for kind in kinds() if kinds_before[kind] != kinds_after[kind]} == {"auto", "sharegpt", "volcano"}
    assert others_before == others_after
