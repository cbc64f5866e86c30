"""The table of mutations fits the code: if you move code, move its mutation too."""

from pathlib import Path

import pytest

from mutations.run import ROOT, Mutation, judge, read_table

TABLE = read_table()
ROOMS = {
    *("config", "core", "estimate", "fetch", "lengths", "merging", "pictures", "publish", "raw", "reports"),
    *("rows", "serving", "swift", "track", "in_trainer", "supervisor", "harness"),
    *("remote/cluster", "remote/kubernetes", "remote/storage"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_text_occurs_once_and_the_test_exists(name: str) -> None:
    assert TABLE[name].fault(ROOT) == ""
    assert TABLE[name].text != TABLE[name].becomes
    assert not TABLE[name].test.startswith("tests/workflow/"), "it takes minutes"


def test_files_that_run_in_one_process_have_names_of_their_own() -> None:
    """Pytest refuses a second file of a name. Those on the cluster run by themselves."""
    tests = ROOT / "tests"
    names = [file.name for file in tests.rglob("test_*.py") if "remote/cluster" not in file.as_posix()]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_a_third_of_them_are_reverted_fixes_and_every_room_has_one() -> None:
    kinds = [mutation.kind for mutation in TABLE.values()]
    assert set(kinds) == {"reverted", "feared"}
    assert 24 <= len(kinds) <= 3 * kinds.count("reverted")
    assert {mutation.room for mutation in TABLE.values()} >= ROOMS


def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("value = 1\nvalue = 1\n")
    (tmp_path / "tests.py").write_text("def test_it() -> None: ...\n")
    mutation = Mutation("name", "feared", "module.py", "value = 1", "value = 2", "", "tests.py::test_it")
    assert mutation.fault(tmp_path) == "text found 2 times in module.py"
    (tmp_path / "module.py").write_text("value = 1\n")
    assert mutation.fault(tmp_path) == ""
    (tmp_path / "tests.py").write_text("def test_other() -> None: ...\n")
    assert mutation.fault(tmp_path) == "test not found: tests.py::test_it"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A module and its test, as a checkout has them."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = scripts\n")
    (tmp_path / "scripts" / "module.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "test_module.py").write_text(
        "from module import double\ndef test_double(): assert double(2) == 4\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("becomes", "verdict"),
    [
        ("return x * 2", "NOT CAUGHT by tests/test_module.py::test_double"),
        ("return 2 *", "DOES NOT IMPORT: SyntaxError"),
        ("return 2 * y", "NO ASSERTION: failed: NameError"),
    ],
)
def test_only_what_fails_by_its_assertion_is_caught(project: Path, becomes: str, verdict: str) -> None:
    test = "tests/test_module.py::test_double"
    mutation = Mutation("name", "feared", "scripts/module.py", "return 2 * x", becomes, "", test)
    assert judge(project, mutation).startswith(verdict)
    assert mutation.fault(project) == "", "the code is as it was"
