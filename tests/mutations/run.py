"""Break the code in the places of mutations.yaml, one at a time: the test named there must fail each time.

    .venv/bin/python tests/mutations/run.py [NAME …]

This happens in a copy of the working tree. A broken module must still import, and its test must fail, but not because
of a wrong name or import. Exits with code 1 if any mutation is not caught.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("track", "search")
"""The environments beside .venv, whose programs some of the modules are (core/child_programs)."""
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]

from vlmflow.config.yaml_file import read_yaml  # noqa: E402
from vlmflow.core.child_programs import python_of  # noqa: E402
from vlmflow.core.progress import clock  # noqa: E402
from workflow_runs import clone  # noqa: E402

TABLE = Path(__file__).with_name("mutations.yaml")
LONGEST = 300
"""Seconds that a test may take."""

CAUGHT = "caught"
END = re.compile(r"^(PASSED|FAILED|ERROR) ([^\s\[]+)(?:\[.*?\])?(?: - (.*))?$", re.MULTILINE)
"""A line of pytest's summary: how a test ended, its name without parameters, and why."""

NO_ASSERTION = re.compile(
    r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b"
)
"""Errors of a broken text that say nothing about the test."""


@dataclass(frozen=True)
class Mutation:
    """A place where the code is broken.

    kind: "reverted" (the code before a fix) or "feared". file: the module or template. text: occurs there once;
    becomes: replaces it. why: what then goes wrong. test: the pytest node id that must fail.
    """

    name: str
    kind: str
    file: str
    text: str
    becomes: str
    why: str
    test: str

    @property
    def room(self) -> str:
        """The folder of the module or of its templates, below scripts/vlmflow or scripts."""
        folder = Path(self.file).parent.as_posix().partition("/templates")[0]
        return folder.removeprefix("scripts/").removeprefix("vlmflow/")

    def fault(self, root: Path) -> str:
        """Say why the mutation does not fit the files below `root`; "" where it does."""
        code = (root / self.file).read_text() if (root / self.file).is_file() else ""
        if (count := code.count(self.text)) != 1:
            return f"text found {count} times in {self.file}"
        file, _, name = self.test.partition("::")
        tests = ast.parse((root / file).read_text()).body if (root / file).is_file() else []
        if name not in {test.name for test in tests if isinstance(test, ast.FunctionDef)}:
            return f"test not found: {self.test}"
        return ""


def read_table() -> dict[str, Mutation]:
    """Return the mutations by name."""
    return {
        name: Mutation(name, kind, **values)
        for kind, mutations in read_yaml(TABLE).items()
        for name, values in mutations.items()
    }


def run_tests(copy: Path, tests: Sequence[str], *words: str) -> dict[str, tuple[str, str]]:
    """Run tests in a copy of the code; give of each "passed", "failed" or another end, and what was said last of it.

    words: further arguments of pytest.
    """
    call = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfEp", "-p", "no:cacheprovider", *words, *tests]
    try:
        done = subprocess.run(
            call,
            cwd=copy,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LONGEST * len(tests),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, ("no end", f"still running after {LONGEST * len(tests)} s"))
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    ends: dict[str, tuple[str, str]] = dict.fromkeys(tests, ("not run", last))
    for word, test, said in END.findall(done.stdout):
        if test in ends and ends[test][0] in ("not run", "passed"):  # of several parameters the first that fails counts
            ends[test] = word.lower(), said
    return ends


def environment() -> dict[str, str]:
    """Return the environment of the copy's tests.

    Without bytecode files: a broken module may have the same size and second as the previous one. Without
    PYTHONPATH: it may lead to another checkout. With long lines: pytest shortens its output.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {f"VLMFLOW_VENV_{name.upper()}": str(ROOT / f".venv-{name}") for name in OWN}
    return own | kept | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}


def imports(copy: Path, file: str) -> str:
    """Import a module of the copy; give the error's last line, or "" where it imports in one of the environments."""
    module = ".".join(Path(file).relative_to("scripts").with_suffix("").parts)
    for python in (sys.executable, *(str(python_of(name)) for name in OWN)):
        done = subprocess.run(
            [python, "-c", f"import {module}"],
            cwd=copy / "scripts",
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return ""
    return done.stderr.strip().splitlines()[-1]


def judge(copy: Path, mutation: Mutation) -> str:
    """Break the code in the copy, run the test, restore the code; return CAUGHT and how, or what happened instead."""
    file = copy / mutation.file
    sound = file.read_text()
    try:
        file.write_text(sound.replace(mutation.text, mutation.becomes))
        if file.suffix == ".py" and (error := imports(copy, mutation.file)):
            return f"DOES NOT IMPORT: {error}"
        outcome, said = run_tests(copy, [mutation.test], "--exitfirst")[mutation.test]
    finally:
        file.write_text(sound)
    if outcome == "passed":
        return f"NOT CAUGHT by {mutation.test}"
    if outcome != "failed" or NO_ASSERTION.search(said):
        return f"NO ASSERTION: {outcome}: {said}"
    return f"{CAUGHT}: {said:.120}"


def main() -> int:
    """Run the named mutations, or all."""
    table = read_table()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations.yaml; all without one")
    names = parser.parse_args().names or list(table)
    if unknown := [name for name in names if name not in table]:
        parser.error(f"unknown: {', '.join(unknown)}; {TABLE.name} has: {', '.join(table)}")
    chosen = [table[name] for name in names]
    results = {mutation.name: mutation.fault(ROOT) for mutation in chosen}
    tests = list(dict.fromkeys(mutation.test for mutation in chosen if not results[mutation.name]))
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = clone(Path(folder))
        print(f"{len(tests)} tests of the code as it is …", flush=True)
        sound = run_tests(copy, tests) if tests else {}
        begun = time.monotonic()
        for done, mutation in enumerate(chosen, start=1):
            if not results[mutation.name]:
                outcome, said = sound[mutation.test]
                fails = f"{mutation.test}: {outcome} without the mutation: {said}"
                results[mutation.name] = judge(copy, mutation) if outcome == "passed" else fails
            left = clock((len(chosen) - done) * (time.monotonic() - begun) / done)
            print(f"[{done} of {len(chosen)}, {left} left] {mutation.name}: {results[mutation.name]}", flush=True)
    bad = {name: result for name, result in results.items() if not result.startswith(CAUGHT)}
    print(f"{len(results) - len(bad)} of {len(results)} mutations caught")
    for name, result in bad.items():
        print(f"  {name}: {result}\n    ({table[name].why})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
