"""One link of the chain of digests from raw files to published weights: recorded files, and what is there of them.

The link from a run's rows to their pictures: an image manifest names each picture of the rows, and its digest.

Checks the chain of digests from raw files to published weights, as far as the files are there.

The chain is what `provenance.json` of a published folder records. Anybody may have written that file: it is read by its
types, its names stay inside the folders, and nothing is run or opened but the files it names.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import msgspec

from vlmflow.config.strategies import TUNERS
from vlmflow.core.account import OtherVersionError, read_account, read_files
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import lies_within
from vlmflow.fetch.model_files import INDEX, is_housekeeping
from vlmflow.fetch.model_weights import WEIGHT_SUFFIXES
from vlmflow.fetch.placed import PROVENANCE, digest_of_files, model_with
from vlmflow.lengths.summary import ACCOUNT, fitted_rows
from vlmflow.merging.proof import WRITTEN_AFTERWARDS, LimitedFile
from vlmflow.pictures.budget import PictureBudget, processor_of
from vlmflow.pictures.manifest import pictures_digest
from vlmflow.pictures.store import digest_in_store
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.swift.child_process import quick_imports


@dataclass(frozen=True)
class Difference:
    """A file that is not as recorded. found: its SHA-256, or what is wrong with it."""

    file: str
    expected: str
    found: str


@dataclass(frozen=True)
class Link:
    """One link of the chain. name: for people. detail: what was compared, or where it should be.

    here: whether there was something to compare. differences: [] if all of it is as recorded. missing: names of
    recorded files that are not here.
    """

    name: str
    detail: str
    here: bool
    differences: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether every recorded file is here and as recorded."""
        return self.here and not self.differences and not self.missing


def compared(name: str, folder: Path, digests: Mapping[str, str]) -> Link:
    """Read files of a folder and compare them. name: the link's. digests: SHA-256 by the files' names in the folder.

    Raises PassingError if a file cannot be read.
    """
    found = read_files(f"reading {name}", "files", folder, sorted(digests))
    differences = [
        Difference(str(folder / file), digests[file], seen.sha256)
        for file, seen in found.items()
        if seen.sha256 != digests[file]
    ]
    missing = [str(folder / file) for file in sorted(digests) if file not in found]
    return Link(
        name, f"{len(found)} of {len(digests)} files" if found else str(folder), bool(found), differences, missing
    )


NAME = "pictures of these rows"


def pictures_link(directory: Path, rows: Path, dataset: str, of_rows: Link) -> Link:
    """Compare the pictures of a run's rows with the image manifests, and this with the account of the rows.

    directory: the working directory. rows: those that fit (fitted/RUN). dataset: its name. of_rows: the link of these
    rows; only rows that are as recorded are read.

    Raises PassingError if a picture cannot be read.
    """
    if not of_rows.whole:
        return Link(NAME, "not looked for, because the rows that fit are not all here or differ", False)
    images, store = directory / "images" / dataset, directory / "stores" / "pictures" / dataset
    manifests = [file for file in (images / "train.jsonl", images / "val.jsonl") if file.is_file()]
    recorded = fitted_rows(rows).digests.get("pictures", "")
    try:
        names = pictures_in(rows / "train.jsonl", rows / "val.jsonl")
        if not names:
            return Link(NAME, "they have none", True)
        if not manifests:
            return Link(NAME, str(images / "train.jsonl"), False)
        entries = entries_named({name for name in names if lies_within(name)}, manifests)
        found = pictures_digest(entries)
    except VlmflowError as error:  # a manifest that is damaged, or another version's
        return Link(NAME, "", True, [Difference(str(images), recorded, error.cause)])
    except ValueError as error:  # rows of another version
        return Link(NAME, "", True, [Difference(str(rows), recorded, str(error))])
    if found != recorded:
        return Link(NAME, "", True, [Difference(f"{images} ({rows / ACCOUNT})", recorded, found)])
    return compared(NAME, store, {name: digest_in_store(store, entry) for name, entry in entries.items()})


class _File(msgspec.Struct, frozen=True):
    file: str
    sha256: str


class _Mixed(msgspec.Struct, frozen=True):
    digests: dict[str, str]


class _Data(msgspec.Struct, frozen=True):
    dataset: str
    raw: dict[str, list[_File]]
    digests: dict[str, str]
    mended: list[_File] = []
    members: dict[str, _Mixed] = {}

    @property
    def raw_files(self) -> dict[str, str]:
        """The SHA-256 of the raw files by their names below the working directory.

        The stage recorded the paths that it read: in a pod they begin with its own folder on the volume.
        """
        found = {}
        for file in (file for some in self.raw.values() for file in some):
            dataset = max(self.members or [self.dataset], key=lambda name: file.file.rfind(f"raw/{name}/"))
            beginning = f"raw/{dataset}/"
            found[beginning + file.file.rpartition(beginning)[2]] = file.sha256
        return found


class _Fp8(msgspec.Struct, frozen=True):
    digest: str
    files: dict[str, str]


class _BaseModel(msgspec.Struct, frozen=True):
    digest: str
    files: dict[str, str]
    provenance: "Record | None" = None
    dequantized_from: _Fp8 | None = None


class _TrainingDigests(msgspec.Struct, frozen=True):
    data: str
    model: str
    released: dict[str, str]


class _Settings(msgspec.Struct, frozen=True):
    image_max_tokens: int


class _Training(msgspec.Struct, frozen=True):
    tuner: str
    settings: _Settings
    digests: _TrainingDigests


class Record(msgspec.Struct, frozen=True):
    """The used part of provenance.json (reports/provenance, Provenance), also of other versions."""

    run: str
    data: _Data
    base_model: _BaseModel
    training: _Training
    merged: dict[str, str]
    picture_limits: LimitedFile | None = None

    @property
    def names(self) -> list[str]:
        """All names of files in it."""
        names = [*self.base_model.files, *self.merged, *self.training.digests.released, *self.data.digests]
        names += [name for member in self.data.members.values() for name in member.digests]
        names += self.base_model.dequantized_from.files if self.base_model.dequantized_from else []
        return [*names, *self.data.raw_files, *([self.picture_limits.file] if self.picture_limits else [])]


TENSORS = "tensors: base + training = weights"
"""The name of the last link."""


def read_record(folder: Path) -> Record:
    """Read a published folder's provenance.

    Raises VlmflowError if it is missing, has another form, or names a file outside the folders.
    """
    file = folder / PROVENANCE
    try:
        record = read_account(file, Record)
    except OtherVersionError as error:
        raise VlmflowError(error.cause, "take a folder that vlmflow published, with its provenance.json") from None
    except VlmflowError as error:
        raise VlmflowError(error.cause, "name a published folder: merged/RUN, or a copy of it") from None
    for one in _rounds(record):
        folders = (one.run, one.data.dataset, *one.data.members)
        single = [name for name in folders if not lies_within(name) or "/" in name]
        if unsafe := single + [name for name in one.names if not lies_within(name)]:
            raise VlmflowError(
                f"{file}: {unsafe[0]!r} is no name inside a folder", "do not use this folder: vlmflow writes none"
            )
    return record


def _rounds(record: Record) -> Iterator[Record]:
    """Yield the record, that of the run whose weights are its base, and so on."""
    one: Record | None = record
    while one:
        yield one
        one = one.base_model.provenance


def check_chain(folder: Path, directory: Path | None, threads: int) -> Iterator[Link]:
    """Yield every link of a published folder's chain as soon as it is checked; the last two are weights and tensors.

    The links of a base that is the weights of another run follow, with the run's name before them.
    folder: merged/RUN, or a copy of it. directory: the working directory; None if it is not here.
    threads: the number of cores to use.

    Raises VlmflowError if the provenance cannot be read; PassingError if a file cannot.
    """
    record = read_record(folder)
    yield from _links(record, folder, directory, lambda: _published(folder, record), threads)
    for newer, one in pairwise(_rounds(record)):
        base = _model_of(newer, directory)
        for link in _links(one, base, directory, partial(_taken_over, one, newer), threads):
            yield replace(link, name=f"base {one.run}: {link.name}")


def _links(
    record: Record, folder: Path | None, directory: Path | None, weights_of: Callable[[], Link], threads: int
) -> Iterator[Link]:
    """Yield the links of one training. folder: its weights; None if they are not here. weights_of: gives their link."""
    if directory is None:
        yield Link("raw files, rows, base model, training", "name the working directory: --directory", False)
        yield weights_of()
        if folder:
            yield _from_base(folder, record, None)
        yield Link(TENSORS, "base and training are in the working directory", False)
        return
    yield compared("raw files", directory, record.data.raw_files)
    if record.data.mended:
        yield _edited(directory, record.data.mended)
    for name, mixed in record.data.members.items():
        yield replace(compared("rows", directory / "data" / name, mixed.digests), name=f"rows of {name}, mixed")
    rows = {name: digest for name, digest in record.data.digests.items() if name.endswith(".jsonl")}
    yield compared("rows of the data set", directory / "data" / record.data.dataset, rows)
    yield (fitted := _fitted(directory / "fitted" / record.run, record))
    yield pictures_link(directory, directory / "fitted" / record.run, record.data.dataset, fitted)
    model = _model_of(record, directory)
    models = model or directory / "models"
    if record.base_model.dequantized_from:
        yield _in_fp8(record.base_model, record.base_model.dequantized_from, directory)
    yield (base := compared("files of the base model", models, record.base_model.files if model else {}))
    full = directory / "checkpoints" / record.run / "full"
    yield (trained := compared("adapter or trained weights", full, record.training.digests.released))
    yield (weights := weights_of())
    if folder:
        yield _from_base(folder, record, model if base.whole else None)
    if folder and model and base.whole and trained.whole and weights.whole:
        yield _tensors(folder, record, model, full, threads)
    elif base.differences or trained.differences or weights.differences:
        yield Link(TENSORS, "not proven, because a line above differs", False)
    else:
        yield Link(TENSORS, "not proven, because base, training or weights are not all here", False)


def _model_of(record: Record, directory: Path | None) -> Path | None:
    """Return the folder of a training's base model in the working directory; None if it is not there."""
    found = model_with(directory / "models", record.base_model.digest) if directory else None
    return found[1].folder if found else None


def _in_fp8(base: _BaseModel, recorded: _Fp8, directory: Path) -> Link:
    """Compare the files in FP8 of which a base was made in bfloat16, where its manifest says that they are."""
    name, found = "files in FP8 of the base model", model_with(directory / "models", base.digest)
    in_fp8 = found[1].dequantized_from if found else msgspec.UNSET
    if in_fp8 is msgspec.UNSET:
        return Link(name, str(directory / "models"), False)
    link = compared(name, in_fp8.folder, recorded.files)
    if digest_of_files(recorded.files) != recorded.digest:
        link.differences.append(Difference("digest of all files", digest_of_files(recorded.files), recorded.digest))
    return link


def _taken_over(record: Record, newer: Record) -> Link:
    """Compare the digests of a run's published files with those of the base that was trained from them."""
    files = newer.base_model.files
    wrong = [
        Difference(name, record.merged.get(name, "no such file"), files.get(name, "is missing"))
        for name in sorted(record.merged.keys() | files.keys())
        if record.merged.get(name) != files.get(name)
    ]
    if digest_of_files(files) != newer.base_model.digest:
        wrong.append(Difference("digest of all files", digest_of_files(files), newer.base_model.digest))
    said = f"the recorded digests of {len(files)} files are those of the base of run {newer.run}"
    return Link("published files", said, True, wrong)


def _edited(directory: Path, files: list[_File]) -> Link:
    """Compare the files of edited rows that lie in the working directory; the provenance may name any others."""
    inside = {file.file: file.sha256 for file in files if lies_within(file.file)}
    link = compared("files of edited rows", directory, inside)
    if outside := len(files) - len(inside):
        link = replace(link, detail=f"{link.detail}; {outside} outside of the working directory not read")
    return link


def _fitted(folder: Path, record: Record) -> Link:
    """Compare the rows that fit with their account, and this with the rows and pictures that the training names."""
    name = "rows that fit"
    if not (folder / ACCOUNT).is_file():
        return Link(name, str(folder), False)
    try:
        digests = fitted_rows(folder).digests
    except VlmflowError as error:  # damaged, or another version's
        return Link(name, "", True, [Difference(str(folder / ACCOUNT), record.training.digests.data, error.cause)])
    trained = "".join(digests.get(part, "") for part in ("train.jsonl", "val.jsonl", "pictures"))
    link = compared(name, folder, {file: digest for file, digest in digests.items() if file.endswith(".jsonl")})
    if trained != record.training.digests.data:
        link.differences.append(Difference(str(folder / ACCOUNT), record.training.digests.data, trained))
    return link


def _published(folder: Path, record: Record) -> Link:
    """Compare the published folder with its own provenance: no file of it is missing, other, or too many."""
    link = compared("published files", folder, record.merged)
    wrong = link.differences + [
        Difference(name, record.merged[os.path.relpath(name, folder)], "is missing") for name in link.missing
    ]
    # A publication would have files, and links, which may lead to a folder of somebody else.
    published = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
    there = {file.relative_to(folder).as_posix() for file in published}
    more = {name for name in there - record.merged.keys() - WRITTEN_AFTERWARDS if not is_housekeeping(name)}
    wrong += [
        Difference(str(folder / name), "no such file", "is there; the provenance does not name it")
        for name in sorted(more)
    ]
    if not any(name.endswith(".safetensors") for name in record.merged):
        wrong.append(Difference(str(folder / PROVENANCE), "the digests of the weights", "names no weights"))
    return Link(link.name, link.detail, True, wrong)


def _from_base(folder: Path, record: Record, model: Path | None) -> Link:
    """Compare the digests of the published files with those of the base: only weights and picture limits may differ."""
    files, limited = record.base_model.files, record.picture_limits
    expected = {
        name: digest
        for name, digest in files.items()
        if name not in WRITTEN_AFTERWARDS and (name == INDEX or not name.endswith(WEIGHT_SUFFIXES))
    }
    wrong = []
    if record.training.digests.model != record.base_model.digest:
        wrong.append(Difference("the model of the training", record.base_model.digest, record.training.digests.model))
    if limited:
        tokens = record.training.settings.image_max_tokens
        if PictureBudget.of(folder, tokens).limits != limited.limits:
            wrong.append(
                Difference(str(folder / limited.file), f"limits of up to {tokens} tokens", str(limited.limits))
            )
        if expected.get(limited.file) != limited.proven:
            wrong.append(Difference(limited.file, expected.get(limited.file, "a file of the base"), limited.proven))
        expected[limited.file] = limited.published
        if model and (processor := processor_of(model)):
            content = sha256(processor.limited(limited.limits)).hexdigest()
            if processor.file != limited.file or content != limited.published:
                wrong.append(
                    Difference(str(folder / limited.file), f"the base's with the limits, {content}", limited.published)
                )
    wrong += [
        Difference(str(folder / name), digest, record.merged.get(name, "is not published"))
        for name, digest in expected.items()
        if record.merged.get(name) != digest
    ]
    said = f"the recorded digests of {len(expected)} files are the base's"
    return Link(
        "all but the weights", f"{said}, but for the picture limits in {limited.file}" if limited else said, True, wrong
    )


def _tensors(folder: Path, record: Record, model: Path, full: Path, threads: int) -> Link:
    """Prove the tensors again. The proof compares all other files with the base too, so it gets the base's limits."""
    name, limited = TENSORS, record.picture_limits
    try:
        with quick_imports():
            from vlmflow.merging.verify_tensors import verify_tensors  # with torch, which only this link needs
    except ModuleNotFoundError as error:
        return Link(name, f"{error.name} is not installed here", False)
    tuner = TUNERS.get(record.training.tuner)
    if tuner is None:
        return Link(name, f"this version does not know the tuner {record.training.tuner}", False)
    with tempfile.TemporaryDirectory(prefix="vlmflow-verify-") as made:
        for file in record.merged:
            link, source = Path(made) / file, (model if limited and file == limited.file else folder) / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.resolve())
        try:
            proof = verify_tensors(model, full, Path(made), record.base_model.files.keys(), threads, tuner)
        except VlmflowError as error:
            cause = error.cause.replace(made, str(folder))
            return Link(name, "", True, [Difference(str(folder), "base + what was trained", cause)])
    return Link(name, f"{proof.touched} of {proof.tensors} tensors carry the training, the others are the base's", True)
