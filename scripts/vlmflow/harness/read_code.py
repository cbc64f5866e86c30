"""What Python code defines and uses, from its syntax tree; for the digest of a script's code (`code_digest`).

Python versions print syntax trees differently. Here the same code gives the same under each: the fields that only newer
versions have are empty, and empty fields are left out.
"""

import ast
import builtins
import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import msgspec

PURE = ("dataclasses.", "functools.", "contextlib.", "typing.")
"""The beginnings of the names of decorators that register nothing."""

MODULE_NAME = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+")
"""A text that may name a module."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = Function | ast.ClassDef
"""What has variables of its own, besides comprehensions."""

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Names = dict[str, list[str]]
"""The dotted names that a name may stand for; none if it is a variable."""


class Statement(msgspec.Struct, array_like=True, gc=False):
    """A statement of a module.

    text: the digest of its syntax tree, with a mark in place of each name of `uses`; "" for an import. names: what it
    binds.
    uses: what it uses, in the order of the text: a dotted name; `.NAME`, which its module binds; `'TEXT`, which may
    name a module; `!NAME`, an import that binds nothing of use: loading it may do something.
    acts: whether it does more than bind names when its module is loaded.
    """

    text: str
    names: list[str]
    uses: list[str]
    acts: bool


class Module(msgspec.Struct, array_like=True, gc=False):
    """What a file has: its statements, what its imports bind, and the dotted names that loading it imports."""

    statements: list[Statement]
    imports: Names
    loads: list[str]


def read_code(code: bytes) -> Module:
    """Read a module. Raises SyntaxError."""
    nodes = [node for node in ast.parse(code).body if not _is_text(node)]
    parts = [list(_parts([node])) for node in nodes]
    imports = _imports(chain.from_iterable(parts))
    bound = [_bound(part) for part in parts]
    scope = imports | {name: [*imports.get(name, []), f".{name}"] for names in bound for name in names}
    seen: set[str] = set()
    readers = [_Reader(node, scope, seen) for node in nodes]
    return Module(
        [
            Statement(reader.digest(), sorted(names), reader.uses(), _acts(node, imports))
            for node, names, reader in zip(nodes, bound, readers, strict=True)
            if not isinstance(node, ast.Import | ast.ImportFrom) or reader.uses()
        ],
        imports,
        [entry.loads for part in parts if not _is_for_types(part[0]) for entry in _imported(part)],
    )


class _Reader:
    """Reads a statement as words: the types of its nodes and the values of their fields, without docstrings."""

    def __init__(self, node: ast.AST, scope: Names, seen: set[str]) -> None:
        """scope: what the names of its module stand for. seen: to it the names are added that are read."""
        self._words: list[str] = []
        self._uses: list[tuple[str, str]] = []
        self._scopes = [scope]
        self._seen = seen
        self._read(node)

    def digest(self) -> str:
        """Return the digest of the words; "" for an import, which has none."""
        return hashlib.sha256("\0".join(self._words).encode()).hexdigest()[:32] if self._words else ""

    def uses(self) -> list[str]:
        """Return what the statement uses; call it when all statements of its module were read."""
        return [use for use, unless in self._uses if unless not in self._seen]

    def _read(self, node: Any) -> None:
        match node:
            case list():
                for child in node:
                    self._read(child)
            case ast.Import() | ast.ImportFrom():
                self._uses += [(f"!{entry.loads}", entry.name) for entry in _imported([node])]
            case ast.JoinedStr():  # Python 3.12 adds empty texts
                self._read_fields(ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""]))
            case ast.Subscript(value=ast.Name("PartOf")):  # its values are params
                self._words.append("PartOf")
            case ast.Constant(value=str(text)) if MODULE_NAME.fullmatch(text):
                self._use([f"'{text}"])
            case ast.Name() | ast.Attribute() if targets := self._targets(node):
                self._use(targets)
            case ast.AST():
                if not _is_text(node):
                    self._read_fields(node)
            case _:
                self._words.append(repr(node))

    def _use(self, names: list[str]) -> None:
        self._words += ["@"] * len(names)
        self._uses += [(name, "") for name in names]

    def _targets(self, node: Any) -> list[str]:
        """Return what a name stands for, with the attributes that are read of it; [] for a variable, or no name."""
        attributes = ""
        while isinstance(node, ast.Attribute):
            node, attributes = node.value, f".{node.attr}{attributes}"
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            return []
        self._seen.add(node.id)
        targets = next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), [])
        return [name + attributes for name in targets]

    def _read_fields(self, node: ast.AST) -> None:
        self._words.append(f"({type(node).__name__}")
        if isinstance(node, Comprehension):
            self._read(node.generators[0].iter)  # outside of the comprehension's own variables
            self._scopes.append({name: [] for name in _bound(_parts(clause.target for clause in node.generators))})
        for name in node._fields:
            value = getattr(node, name)
            if value is None or value == [] or name == "ctx":
                continue
            self._words.append(name)
            if name == "body" and isinstance(node, Scope):
                self._scopes.append(_inner_scope(node))
                self._read(value)
                self._scopes.pop()
            else:
                self._read(value)
        if isinstance(node, Comprehension):
            self._scopes.pop()
        self._words.append(")")


def _inner_scope(node: Any) -> Names:
    """Return the names that mean something else inside of a function or a class."""
    parts = list(_parts([node.body] if isinstance(node, ast.Lambda) else node.body))
    if isinstance(node, ast.ClassDef):
        return _imports(parts)  # methods do not see the other names of a class
    own = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)} | _bound(parts)
    declared = {name for part in parts if isinstance(part, ast.Global | ast.Nonlocal) for name in part.names}
    return {name: [] for name in own - declared} | _imports(parts)


def _parts(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes, and those within them that share their variables."""
    waiting = deque(nodes)
    while waiting:
        node = waiting.popleft()
        yield node
        if isinstance(node, Comprehension):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
        elif not isinstance(node, Scope):
            for name in node._fields:
                value = getattr(node, name)
                if isinstance(value, list):
                    waiting += [inner for inner in value if isinstance(inner, ast.AST)]
                elif isinstance(value, ast.AST) and name != "ctx":
                    waiting.append(value)


def _bound(parts: Iterable[ast.AST]) -> set[str]:
    """Return the names that get a value, but for those of imports. parts: as `_parts` gives them."""
    names: set[str | None] = set()
    for part in parts:
        match part:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.NamedExpr(target=ast.Name(id=name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                names.add(name)
            case ast.MatchMapping(rest=name):
                names.add(name)
    return {name for name in names if name is not None}


class _Import(NamedTuple):
    """A name that an import binds, the dotted name for which it stands, and the one that is loaded."""

    name: str
    stands_for: str
    loads: str


def _imported(parts: Iterable[ast.AST]) -> Iterator[_Import]:
    for part in parts:
        for alias in part.names if isinstance(part, ast.Import | ast.ImportFrom) else ():
            if isinstance(part, ast.ImportFrom):
                full = f"{part.module}.{alias.name}"
                yield _Import(alias.asname or alias.name, full, full)
            else:
                first = alias.name.partition(".")[0]
                yield _Import(alias.asname or first, alias.name if alias.asname else first, alias.name)


def _imports(parts: Iterable[ast.AST]) -> Names:
    names: Names = {}
    for entry in _imported(parts):
        names.setdefault(entry.name, []).append(entry.stands_for)
    return names


def _acts(node: ast.stmt, imports: Names) -> bool:
    """Return whether a statement of a module does more than bind names."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return not all(_is_pure(decorator, imports) for decorator in node.decorator_list)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(part, ast.Attribute | ast.Subscript) for part in _parts(targets))
    return not _is_for_types(node) and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))


def _is_pure(decorator: ast.expr, imports: Names) -> bool:
    """Return whether a decorator is Python's own, or one of PURE."""
    name, _, attributes = ast.unparse(decorator).partition("(")[0].partition(".")
    paths = imports.get(name)
    return hasattr(builtins, name) if paths is None else all(f"{path}.{attributes}".startswith(PURE) for path in paths)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_text(node: ast.AST) -> bool:
    """Return whether a statement is only a text, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
