"""Count the project's lines of code, without blank lines, comments and docstrings, now or at an earlier revision.

    python tests/lines.py [REVISION …]

Prints for each revision, and for the working tree, the lines of Snakefile, rules/ and scripts/; those of import
statements are counted, and printed once more by themselves.
"""

import io
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("Snakefile", "rules", "scripts")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(text: bytes) -> tuple[int, int]:
    """Return the lines of code of a Python or Snakemake file, and those of them that import statements have.

    A statement that is a text in three quotes is a docstring, also below an assignment.
    """
    code: set[int] = set()
    imports: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.tokenize(io.BytesIO(text).readline):
        if token.type not in NO_CODE:
            statement.append(token)
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER) and statement:
            is_docstring = len(statement) == 1 and statement[0].string.startswith('"""')
            lines = {line for one in statement for line in range(one.start[0], one.end[0] + 1)}
            code |= set() if is_docstring else lines
            imports |= lines if statement[0].string in ("import", "from") else set()
            statement = []
    return len(code), len(imports)


def files_of(revision: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the counted files, with their bytes. revision: of git; None for the working tree."""
    if revision is None:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *COUNTED]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if _is_code(name) and (ROOT / name).is_file():
                yield name, (ROOT / name).read_bytes()
        return
    archive = subprocess.run(["git", "archive", revision, *COUNTED], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            if file.isfile() and _is_code(file.name) and (content := files.extractfile(file)):
                yield file.name, content.read()


def _is_code(name: str) -> bool:
    return name == "Snakefile" or name.endswith((".py", ".smk"))


def main(revisions: list[str]) -> None:
    """Print the table."""
    print(f"{'':>12}{''.join(f'{name:>10}' for name in COUNTED)}{'all':>10}{'imports':>10}")
    for revision in [*revisions, None]:
        lines, imports = dict.fromkeys(COUNTED, 0), 0
        for name, text in files_of(revision):
            code, of_imports = code_lines(text)
            lines[name.partition("/")[0]] += code
            imports += of_imports
        counts = [*lines.values(), sum(lines.values()), imports]
        print(f"{(revision or 'now')[:11]:>12}{''.join(f'{count:>10,}' for count in counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
