"""The code that a rule depends on, as a digest for its params.

Snakemake compares only the script file, and by its modification time: it misses a changed module, and treats a fresh
clone as a change. This digest covers the bytes of the script and of all local modules that it imports, directly or not.

Imports do not show other files that a script reads, so a rule names their folder in its params. The rules of pages read
`vlmflow/reports/templates`: an edited template redraws them. `publish_merged` reads `card` in it. Left out on purpose:

- the same templates in `validate_sharegpt` and `train_smoke`, which also write a page (counts.html, gate.html): a new
  layout is no reason to validate or train again, and these pages get it the next time;
- for the same reason the code of the page that shows a training while it runs (vlmflow/supervisor/watch.py);
- the tables of ms-swift's names in `vlmflow/config`, which change only with the locked ms-swift.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

IMPORT = re.compile(rb"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import\b(?:\((?:[^)#]|#.*)*\)|\\\n|[^\n(])*)", re.MULTILINE)
"""An import statement at the beginning of a line. A line of a text may look like one; this is harmless: at most the
digest covers one more module."""


def of_scripts(folder: Path) -> Callable[..., str]:
    """Return the function that maps a script, as a dotted name, to the digest of its code, 16 hexadecimal digits.

    folder: the packages with the scripts and with what they import.

    The function also takes the names of modules that the script loads without an import statement, and as `reads` the
    folder, relative to `folder`, of other files that it reads. It raises FileNotFoundError if that has no files.
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
        waiting = {file for module in (name, *found) for file in files_of(module)}
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
    """Return the dotted names of the modules that Python code imports anywhere, and of what it imports from them.

    Only the import statements are parsed: each start of Snakemake reads half of the project's modules.
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
    """Return the files that an import of a local module reads: its own, and those of the packages above it."""
    parts = module.split(".")
    packages = [folder.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    return [file for file in [*packages, folder.joinpath(*parts).with_suffix(".py")] if file.is_file()]


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder, at any depth, without hidden ones. Raises FileNotFoundError if there are none."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise FileNotFoundError(folder)
    return files
