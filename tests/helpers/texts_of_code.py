"""The texts in the code: all strings, and what errors advise. Their values are unknown here: VALUE stands for each."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from workflow_runs import ROOT

VALUE = "VALUE"
"""Stands where a text has a value of its own."""


def text_of(node: ast.expr) -> str | None:
    """Return a string of the code with VALUE for each of its values; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return None


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted((ROOT / "scripts").rglob("*.py"))}


@cache
def texts() -> list[tuple[str, str]]:
    """Return every string of the code that is no docstring, with its place."""
    found = []
    for file, tree in trees().items():
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.expr) and id(node) not in inside | alone and (text := text_of(node)):
                found.append((f"{file.relative_to(ROOT)}:{node.lineno}", text))
    return found


@cache
def next_steps() -> list[tuple[str, str]]:
    """Return the next step of every error that has one, with its place; of two that a condition chooses, both."""
    found = []
    for file, tree in trees().items():
        named = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "Error)")) and node.args[1:]:
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                found += [(place, text) for step in chosen(node.args[1], named) if (text := text_of(step))]
    return found


def chosen(node: ast.expr, named: dict[str, ast.expr]) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from chosen(node.body, named)
        yield from chosen(node.orelse, named)
    else:
        yield named.get(node.id, node) if isinstance(node, ast.Name) else node
