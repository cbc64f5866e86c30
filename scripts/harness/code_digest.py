"""What code a rule depends on, as a digest for its params.

Snakemake looks at the script file alone, and at its modification time: it misses a changed module, and takes
a fresh clone for a change. A digest of the bytes of the script and of the local modules that it imports,
however deep, is neither blind nor nervous.

An import says nothing of other files that a script reads, so a rule names their folder beside its script. The rules of
pages read `vlmflow/reports/templates`: an edited template draws them anew. What is left out on purpose:

- the same templates in `validate_sharegpt` and `train_smoke`, which end with a page (counts.html, gate.html): another
  look is no reason to validate or to train again, and these pages have the new one the next time;
- `vlmflow/config/swift_names.json`, which lets settings pass or refuses them, and changes nothing that a stage makes.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

IMPORT = re.compile(rb"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import\b(?:\((?:[^)#]|#.*)*\)|\\\n|[^\n(])*)", re.MULTILINE)
"""An import statement at the beginning of a line. A line of a text may look like one: it is no Python, or names no
module of ours, or one more module counts."""


def of_scripts(folder: Path) -> Callable[..., str]:
    """Give the function that takes a script's name to the digest of its code.

    folder: holds the scripts, and beside them the packages that they import.

    The function takes also the names of modules that the script finds while it runs, in no import statement; and as
    `reads` the other files that it reads, by their folder in `folder`. It raises FileNotFoundError where that has none.
    """
    local = {file.name.removesuffix(".py") for file in folder.iterdir()}
    files_of = cache(partial(_files_of, folder))
    content_of = cache(Path.read_bytes)

    @cache
    def local_imports(file: Path) -> frozenset[Path]:
        names = {name for name in imported_names(content_of(file)) if name.partition(".")[0] in local}
        return frozenset(found for name in names for found in files_of(name))

    @cache
    def of_script(name: str, *found: str, reads: str | None = None) -> str:
        files: set[Path] = set()
        waiting = {folder / f"{name}.py", *(file for module in found for file in files_of(module))}
        while waiting:
            file = waiting.pop()
            files.add(file)
            waiting |= local_imports(file) - files
        if reads is not None:
            files.update(_files_in(folder / reads))
        digest = hashlib.sha256()
        for file in sorted(files):
            content = hashlib.sha256(content_of(file)).digest()
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + content)
        return digest.hexdigest()[:16]

    return of_script


def imported_names(code: bytes) -> set[str]:
    """Give the modules that Python code imports, wherever in it, and the names that it takes out of them, with dots.

    Only the import statements are parsed: each start of Snakemake asks for half of the project's modules.
    """
    return {name for statement in IMPORT.findall(code) for name in _names_in(statement)}


def _names_in(statement: bytes) -> Iterator[str]:
    try:
        nodes = ast.parse(statement).body
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(folder: Path, module: str) -> list[Path]:
    """Give the files that importing a local module reads: its own, and those of the packages above it."""
    parts = module.split(".")
    packages = [folder.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    return [file for file in [*packages, folder.joinpath(*parts).with_suffix(".py")] if file.is_file()]


def _files_in(folder: Path) -> list[Path]:
    """Give the files of a folder, at any depth, but for those that an editor hides there."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise FileNotFoundError(folder)
    return files
