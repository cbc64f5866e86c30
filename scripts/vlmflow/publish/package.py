"""What the stated licences of a run's data say about passing its weights on.

A licence is a name or a sentence that a person wrote into the configuration, or `unknown`. So the rule is one of words,
and all of them are in this module:

- FORBIDS: the owner allows nobody to pass on the data, or what is made from it. Nothing is published.
- NOT_COMMERCIAL: the weights may be passed on, and who gets them must know. It is shown.
- `unknown` is no permission. It is shown as "not stated"; the person decides.

Whether weights are made "from" their data in the sense of a licence is disputed; where the words forbid it, we keep to
them.

The files of a run that go to the hub: each is compared with its recorded digest before anything is sent.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.strategies import ADAPTER_CONFIG, ADAPTER_WEIGHTS, tuner_of
from vlmflow.core.account import read_account, refuse_changed
from vlmflow.core.errors import VlmflowError, printable
from vlmflow.core.files import FOLDER_MARK, read_json, sha256_of
from vlmflow.fetch.placed import PROVENANCE
from vlmflow.merging.proof import WRITTEN_AFTERWARDS
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import UNKNOWN, StatedLicences, hub_datasets
from vlmflow.reports.page import render
from vlmflow.reports.provenance import Provenance
from vlmflow.supervisor.report import TrainingReport, read_release

FORBIDS = re.compile(
    r"\bno (re)?distribution\b|\bnon ?redistribut|\b(not|never) (be )?(re)?distribut"
    r"|\bredistribution (is )?(not|forbidden|prohibited)"
    r"|(?<!non )\bproprietary\b|\ball rights reserved\b|\bconfidential\b|\binternal use\b"
    r"|\bnd\b|\bno ?deriv"  # Creative Commons, NoDerivatives: nothing changed may be shared
)
NOT_COMMERCIAL = re.compile(r"\bnc\b|\bnon ?commercial|\bresearch (use )?only\b")
"""Both are searched in lower case, with one blank in place of blanks, hyphens and underscores."""

NAMED = 8
"""Sources of a licence that are named, the largest first."""


@dataclass(frozen=True)
class Rights:
    """A licence and what has it. note: what follows from it, for people; "" if nothing."""

    licence: str
    of: list[str]
    note: str

    def __str__(self) -> str:
        more = f" and {len(self.of) - NAMED} more" if len(self.of) > NAMED else ""
        name = "not stated" if self.licence == UNKNOWN else self.licence
        return printable(f"{name}{self.note and f' ({self.note})'}: {', '.join(self.of[:NAMED])}{more}")


def rights_of(*stated: StatedLicences) -> list[Rights]:
    """Return every licence of some runs' data, with what has it.

    Raises VlmflowError with the licence and the sources if one forbids to pass on the weights.
    """
    licences = sorted(chain.from_iterable(map(_named, stated)), key=lambda pair: pair[0])
    rights = [
        Rights(licence, [source for _, source in listed], _note(licence))
        for licence, listed in groupby(licences, key=lambda pair: pair[0])
    ]
    if refused := [right for right in rights if FORBIDS.search(_plain(right.licence))]:
        raise VlmflowError(
            f"the licence of the training data forbids to pass on what is made from it: {'; '.join(map(str, refused))}",
            "do not publish these weights: train without these rows (datasets.NAME.sources); if the "
            "licence is wrong, correct it (datasets.NAME.licence, .source_licences) and run `merged/RUN` again",
        )
    return rights


def _named(stated: StatedLicences) -> Iterator[tuple[str, str]]:
    """Yield each licence of a run's data, and what has it."""
    yield stated.licence, f"data set {stated.dataset}"
    for words, sources in (("questions from", stated.questions), ("pictures of", stated.pictures)):
        yield from ((source.licence, f"{words} {source.source} ({source.rows:,} rows)") for source in sources)


def _note(licence: str) -> str:
    if licence == UNKNOWN:
        return "that is no permission"
    if NOT_COMMERCIAL.search(_plain(licence)):
        return "not for commercial use: say so to those who get the weights"
    return ""


def _plain(licence: str) -> str:
    return re.sub(r"[\s_-]+", " ", licence.lower())


CARD = "README.md"


@dataclass(frozen=True)
class OutgoingFile:
    """A file to send. content: where it is, or its bytes. size: bytes."""

    content: Path | bytes
    size: int
    sha256: str

    def git_blob(self) -> str:
        """Return the SHA-1 that git, and so the hub outside LFS, names these bytes by."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Package:
    """The files of one publication, by name. tag: for their revision on the hub.

    paths: those of this machine in provenance.json and the card, which everybody who may read the repository sees.
    """

    files: dict[str, OutgoingFile]
    tag: str
    paths: list[str]

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files.values())


def read_provenance(merged: Path) -> Provenance:
    """Return the provenance of a run's folder `merged/RUN`.

    Raises VlmflowError if there is none, or it cannot be read.
    """
    if not (merged / PROVENANCE).is_file():
        there = sorted(file.parent.name for file in merged.parent.glob(f"*/{PROVENANCE}"))
        raise VlmflowError(
            f"{merged}: the proven weights of this run are not there; finished here: {', '.join(there) or 'none'}",
            f"make them: vlmflow run … merged/{merged.name}; or name the working directory by --directory",
        )
    return read_account(merged / PROVENANCE, Provenance)


def merged_package(merged: Path, facts: Provenance) -> Package:
    """Return the files of `merged/RUN`, which are those of its provenance and no others.

    Raises VlmflowError with the names of files that are missing, new or changed.
    """
    again = f"remove {merged} and make it again from the proven files: vlmflow run … merged/{merged.name}"
    present = {
        file.relative_to(merged).as_posix() for file in merged.rglob("*") if file.is_file() and file.name != FOLDER_MARK
    }
    if new := sorted(present - facts.merged.keys() - WRITTEN_AFTERWARDS):
        raise VlmflowError(f"{merged}: nobody verified these files: {', '.join(new[:5])}", again)
    refuse_changed("published files", merged, facts.merged, f"published/{merged.name}", again)
    card = model_card(facts).encode()
    if not (merged / CARD).is_file() or (merged / CARD).read_bytes() != card:
        raise VlmflowError(
            f"{merged / CARD} is not the card that provenance.json gives: it was edited, or another version wrote it",
            again,
        )
    files = {name: _on_disk(merged / name, sha256) for name, sha256 in facts.merged.items()}
    written = {CARD: card, PROVENANCE: (merged / PROVENANCE).read_bytes()}
    return _package(merged, files, written, facts)


def adapter_package(merged: Path, full: Path, facts: Provenance) -> Package:
    """Return the adapter in `checkpoints/RUN/full` with a card of its own.

    The base's place on this machine in adapter_config.json becomes its name on the hub. merged: the weights that were
    made and proven from this adapter.

    Raises VlmflowError if the run trains no adapter, its files have changed, or it is not the one that was proven.
    """
    if not tuner_of(facts.training.tuner).trains_adapter:
        raise VlmflowError(
            f"run {facts.run}: tuner {facts.training.tuner} trains the weights themselves, so there is no adapter",
            "publish its merged weights: leave --adapter out",
        )
    report: TrainingReport = read_release(full)
    if report.digests != facts.training.digests:
        raise VlmflowError(
            f"{full} is not the adapter that {merged} was made and proven from",
            f"make them again from it: vlmflow run … merged/{merged.name}",
        )
    sha256 = report.digests.released[ADAPTER_WEIGHTS]
    weights = _on_disk(full / ADAPTER_WEIGHTS, sha256)
    source = parse_source(facts.base_model.source)
    base, revision = (source.repo, facts.base_model.revision) if isinstance(source, HubSource) else (None, None)
    config = read_json(full / ADAPTER_CONFIG) | {"base_model_name_or_path": base, "revision": revision}
    text = json.dumps(config, indent=2).encode() + b"\n"
    written = {ADAPTER_CONFIG: text, CARD: adapter_card(facts, sha256).encode()}
    return _package(merged, {ADAPTER_WEIGHTS: weights}, written, facts)


def adapter_card(facts: Provenance, sha256: str) -> str:
    """Return the README.md of an adapter, with the hub's metadata block on top. sha256: of its weights."""
    source = parse_source(facts.base_model.source)
    return render(
        "publish/adapter.md.jinja",
        facts=facts,
        base=source.repo if isinstance(source, HubSource) else None,
        datasets=hub_datasets(*(round.rights for round in facts.rounds)),
        pipeline="image-text-to-text" if facts.sees_pictures else "text-generation",
        sha256=sha256,
    )


def _on_disk(file: Path, sha256: str) -> OutgoingFile:
    return OutgoingFile(file, file.stat().st_size, sha256)


def _package(merged: Path, files: dict[str, OutgoingFile], written: dict[str, bytes], facts: Provenance) -> Package:
    ours = {name: OutgoingFile(text, len(text), hashlib.sha256(text).hexdigest()) for name, text in written.items()}
    described = json.loads((merged / PROVENANCE).read_bytes()) if PROVENANCE in written else facts.base_model.source
    tag = f"vlmflow-{sha256_of(merged / PROVENANCE)[:12]}"
    return Package(dict(sorted((files | ours).items())), tag, sorted(set(_paths(described))))


def _paths(value: Any) -> Iterator[str]:
    """Yield the absolute paths among the texts of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _paths(item)
    elif isinstance(value, str) and value.startswith(("/", "file://")):
        yield value
