"""The code that a rule depends on, as a digest for its params.

Snakemake compares only the script file, and by its modification time: it misses a changed function, and treats a fresh
clone as a change. This digest covers the script and the definitions that it can reach: each name that a reached
definition uses leads to what the name is bound to.

| what a reached definition uses | what counts |
|---|---|
| a function, a class or a constant of ours | its statement (a class with all methods), and all that this reaches |
| a name of a library | its full name: `numpy.median` |
| a module of ours as a value (`trainer.__name__`), or its name as a text | all statements of the module, as above |
| the class of `PartOf[DatasetSettings]` | nothing: the values are params, which are recorded |

A module-level statement that does more than bind names (`os.environ[…] = …`), or whose decorator may register, counts
for each script that loads the module. Docstrings, comments, layout, import statements and names of modules do not
count: so moving a definition makes nothing stale.

Names do not show which modules are loaded by a computed name, nor which other files a script reads: a rule gives both
in its params. The rules of pages read `vlmflow/reports/templates`: an edited template redraws them. `publish_merged`
reads `card` in it.

The params and the code that make a job stale, as Snakemake records and compares them.

Snakemake compares the set of all params' values without their names: it misses two values that change places, and for
a block of settings it prints the whole block, old and new. So every rule with a script has one more param, `recorded`:
a text for each setting, `settings.train.learning_rate=0.0001`, and the digest of the code that the script reaches.

A params function that returns a block takes `output` (`harness.params`). Snakemake leaves out what derives from a job's
files: of a block it would also compare the order of the keys.
"""

import ast
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vlmflow import PACKAGE, SCRIPTS
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import user_cache, whole_file
from vlmflow.harness import read_code
from vlmflow.harness.read_code import Module

LEFT_OUT = ("vlmflow.reports.counts_page", "vlmflow.reports.training_pages")
"""Modules that lay out pages. They count for rules that read templates. Other stages write such a page beside their
result: a new layout is no reason to validate or train again, and the page gets it the next time."""

MOST_KEPT = 5_000
"""The files of which the content is kept for the next call, and the digests: those of some versions of the project."""


class Definition(NamedTuple):
    """A statement of a module, by its place there; with None all of them."""

    module: str
    number: int | None


class Links(NamedTuple):
    """What a definition leads to.

    targets: for each name that it uses the definition, with the attributes that are read of it; None for what is not
    ours, with its name. loads: the modules that are loaded before it can be used.
    """

    targets: list[tuple[Definition | None, str]]
    loads: list[str]


class Code:
    """The modules below a folder, and what their definitions lead to."""

    def __init__(self, folder: Path, kept_in: Path | None = None, package: Path | None = None) -> None:
        """Read the files.

        kept_in: a file with what earlier calls made of files (see `keep`). package: what stands for the folder's
        `vlmflow`, if it does not hold the modules itself.
        """
        self._folders = {Path(): folder} | ({Path("vlmflow"): package} if package else {})
        files = [(at, file) for at, place in self._folders.items() for file in place.rglob("*.py")]
        self._files = {
            _module_name(at / file.relative_to(self._folders[at])): file.read_bytes()
            for at, file in files
            if not at.parts or not file.is_relative_to(folder)
        }
        self._version = _digest_of(sorted(self._files.items()))
        self._kept = _Kept(kept_in)
        self.module = cache(lambda name: self._kept.read(self._files[name]))
        self._places = cache(self._places_of)
        self._links = cache(self._links_of)
        self._loaded = cache(self._loaded_by)

    def keep(self) -> None:
        """Write the digests, for the next call; on a disk that cannot be written to, nothing."""
        self._kept.write()

    def digest(self, script: str, *modules: str, reads: str | None = None) -> str:
        """Return the digest of a script's code, 16 hexadecimal digits.

        script, modules: dotted names; modules are those that the script loads by computed names. reads: the folder,
        relative to that of the code, of other files that it reads. Raises FileNotFoundError if it has none.
        """
        others = b""  # names and digests of the other files
        for name, file in self._files_in(Path(reads)) if reads is not None else ():
            others += name.as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest()

        def make() -> str:
            digest = hashlib.sha256()
            numbers = self.reached(script, *modules, pages=reads is not None)
            for definition in numbers:
                digest.update(f"{self.text(definition)}\n".encode())
                for target, rest in self._links(definition).targets:
                    number = "" if target is None else numbers.get(target, "left out")
                    digest.update(f"{number} {rest}\n".encode())
            digest.update(others)
            return digest.hexdigest()[:16]

        return self._kept.digest((self._version, script, modules, reads, others), make)

    def reached(self, script: str, *modules: str, pages: bool = False) -> dict[Definition, int]:
        """Return the definitions that a script reaches, numbered in the order in which their texts lead to them.

        pages: whether LEFT_OUT counts.
        """
        left_out = () if pages else LEFT_OUT
        numbers: dict[Definition, int] = {}
        waiting = deque(Definition(name, None) for name in (script, *modules))
        loaded: set[str] = set()
        while waiting:
            while waiting:
                definition = waiting.popleft()
                if definition not in numbers and definition.module not in left_out:
                    numbers[definition] = len(numbers)
                    links = self._links(definition)
                    waiting.extend(target for target, _ in links.targets if target is not None)
                    loaded.update(links.loads)
            new = self._acting(loaded, left_out) - numbers.keys()
            waiting.extend(sorted(new, key=lambda item: (self.text(item), item)))
        return numbers

    def _files_in(self, reads: Path) -> list[tuple[Path, Path]]:
        """Return the files of a folder, at any depth, without hidden ones: their names and paths."""
        at = max((at for at in self._folders if reads.is_relative_to(at)), key=lambda at: len(at.parts))
        place = self._folders[at]
        files = [(at / file.relative_to(place), file) for file in (place / reads.relative_to(at)).rglob("*")]
        if chosen := sorted(each for each in files if each[1].is_file() and not each[1].name.startswith(".")):
            return chosen
        raise FileNotFoundError(reads)

    def text(self, definition: Definition) -> str:
        """Return the digest of a definition's own text."""
        if definition.number is None:
            return "all"
        return self.module(definition.module).statements[definition.number].text

    def names(self, definition: Definition) -> list[str]:
        """Return what a definition binds."""
        statements = self.module(definition.module).statements
        chosen = statements if definition.number is None else [statements[definition.number]]
        return [name for statement in chosen for name in statement.names]

    def _acting(self, loaded: set[str], left_out: tuple[str, ...]) -> set[Definition]:
        """Return the statements that act when modules are loaded, with all that these load."""
        waiting, seen = list(loaded), set(left_out)
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += self._loaded(name)
        return {
            Definition(name, number)
            for name in seen.difference(left_out)
            for number, statement in enumerate(self.module(name).statements)
            if statement.acts and (statement.text or self._links(Definition(name, number)).targets)
        }

    def _links_of(self, definition: Definition) -> Links:
        module = self.module(definition.module)
        loads = self._with_packages(definition.module)
        if definition.number is None:
            all_of_them = (Definition(definition.module, number) for number in range(len(module.statements)))
            return Links([(inner, "") for inner in sorted(all_of_them, key=self.text)], loads)
        targets: list[tuple[Definition | None, str]] = []
        for use in module.statements[definition.number].uses:
            mark, name = (use[0], use[1:]) if use[0] in ".!'" else ("", use)
            if mark == "!" and (longest := self._longest(name)):
                loads += self._with_packages(longest)
            elif mark == ".":
                targets += self._within(definition.module, name.split("."))
            elif mark == "'" and name not in self._files:
                targets.append((None, name))
            else:
                targets += self._resolved(name)
        return Links(targets, loads)

    def _resolved(self, name: str) -> Iterator[tuple[Definition | None, str]]:
        """Yield the definitions that a dotted name stands for, each with the attributes that are read of it."""
        if module := self._longest(name):
            yield from self._within(module, name.removeprefix(module).split(".")[1:])
        else:
            yield None, name

    def _within(self, module: str, parts: list[str]) -> Iterator[tuple[Definition | None, str]]:
        if not parts:
            yield Definition(module, None), ""
            return
        name, *rest = parts
        places, imported = self._places(module).get(name, []), self.module(module).imports.get(name, [])
        yield from ((Definition(module, number), ".".join(rest)) for number in places)
        for target in imported:
            yield from self._resolved(".".join([target, *rest]))
        if not places and not imported:  # as `__name__`
            yield Definition(module, None), ".".join(parts)

    def _longest(self, name: str) -> str | None:
        """Return the module of ours that a dotted name begins with, the longest if there are several."""
        while name and name not in self._files:
            name = name.rpartition(".")[0]
        return name or None

    def _places_of(self, module: str) -> dict[str, list[int]]:
        """Return the places of the statements that bind a name."""
        places: dict[str, list[int]] = {}
        for number, statement in enumerate(self.module(module).statements):
            for name in statement.names:
                places.setdefault(name, []).append(number)
        return places

    def _loaded_by(self, module: str) -> list[str]:
        """Return the modules that loading one loads, without those that these load."""
        names = {self._longest(name) for name in self.module(module).loads}
        return [loaded for name in names if name for loaded in self._with_packages(name)]

    def _with_packages(self, module: str) -> list[str]:
        parts = module.split(".")
        names = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return [name for name in names if name in self._files]


class _Content(msgspec.Struct, array_like=True):
    """What earlier calls made of files.

    version: the digest of the code that made it. digests: those of scripts, by the digest of all that they depend on.
    modules: by the digest of a file's bytes, what was read of it, as MessagePack: only a new digest needs it.
    """

    version: str
    digests: dict[str, str] = {}
    modules: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode({}))


class _Kept:
    """What was made of files; also for the next call."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._content = _Content(_digest_of([Path(code).read_bytes() for code in (__file__, read_code.__file__)]))
        with suppress(OSError, msgspec.MsgspecError):
            content = msgspec.msgpack.decode(file.read_bytes() if file else b"", type=_Content)
            if content.version == self._content.version:
                self._content = content
        self._known = len(self._content.digests)

    @cached_property
    def _modules(self) -> dict[str, Module]:
        return msgspec.msgpack.decode(self._content.modules, type=dict[str, Module])

    def digest(self, of: object, make: Callable[[], str]) -> str:
        """Return the digest of a script, which `make` makes if it is new. of: all that it depends on."""
        key, digests = _digest_of(of), self._content.digests
        if key not in digests:
            digests[key] = make()
        return digests[key]

    def read(self, code: bytes) -> Module:
        digest = hashlib.sha256(code).hexdigest()
        if digest not in self._modules:
            self._modules[digest] = read_code.read_code(code)
        return self._modules[digest]

    def write(self) -> None:
        if self._file is not None and len(self._content.digests) > self._known:
            digests = dict(list(self._content.digests.items())[-MOST_KEPT:])
            modules = dict(list(self._modules.items())[-MOST_KEPT:])
            content = _Content(self._content.version, digests, msgspec.Raw(msgspec.msgpack.encode(modules)))
            with suppress(OSError, VlmflowError), whole_file(self._file) as file:
                file.write(msgspec.msgpack.encode(content))


def _digest_of(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()


def _module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NOT_RECORDED = {"recorded", "processes", "require"}
"""Params that make nothing stale: the results of the scripts that read them do not depend on them."""


def install(workflow: Any) -> Callable[[], None]:
    """Add `recorded` to the params of every rule. Call it before Snakemake plans.

    A rule names in its params what the names in its script do not show: `modules`, a list of modules that it loads by
    computed names, and `reads`, a folder of other files in scripts/ (see `code_digest`).

    Returns a function to call after planning, before jobs run: it computes the digests of all jobs, so that a change
    during a stage does not enter the record of what this stage used.
    """
    code = Code(SCRIPTS, kept_in=user_cache() / "code.msgpack", package=PACKAGE if PACKAGE.parent != SCRIPTS else None)
    digest = cache(code.digest)

    def recorded(rule: Any, wildcards: Any) -> tuple[str, ...]:
        params = settings_of(rule, wildcards)
        read = digest(f"stages.{Path(rule.script).stem}", *params.get("modules", []), reads=params.get("reads"))
        return tuple(sorted(texts_of({**params, "code": read})))

    for rule in workflow.rules:
        if rule.script:
            rule.set_params(recorded=partial(recorded, rule))

    def look_at_code() -> None:
        for job in workflow.dag.jobs:
            if job.rule.script:
                recorded(job.rule, job.wildcards)
        code.keep()

    return look_at_code


def settings_of(rule: Any, wildcards: Any) -> dict[str, Any]:
    """Return the params of a rule that make its jobs stale, by name, for some wildcards."""
    given = {name: value for name, value in rule.params.items() if name not in NOT_RECORDED}
    return {name: value(wildcards) if callable(value) else value for name, value in given.items()}


def texts_of(block: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield a text `key=value` for each setting of a block; keys of blocks within it are joined by dots.

    block: JSON values by name. before: a prefix of the keys.
    """
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from texts_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def differing(change: Any) -> Any:
    """Return Snakemake's ParamsChange with only the texts of `recorded` that differ."""
    old, new = _texts(change.only_old), _texts(change.only_new)
    return replace(change, only_old=old - new, only_new=new - old)


def _texts(values: set[str]) -> set[str]:
    """Return the texts in `recorded`, the only param that is a tuple; an earlier version recorded each by itself."""
    tuples = [value for value in values if value.startswith("(")]
    return {text for value in tuples for text in ast.literal_eval(value)} if tuples else values
