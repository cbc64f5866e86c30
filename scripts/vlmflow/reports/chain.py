"""Checks the chain of digests from raw files to published weights, as far as the files are there.

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
from vlmflow.core.account import read_files
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
from vlmflow.reports.provenance import Fp8Files, Record, RecordedBase, RecordedFile, read_record
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.swift.child_process import quick_imports

TENSORS = "tensors: base + training = weights"
"""The name of the last link."""


@dataclass(frozen=True)
class Difference:
    """A file that is not as recorded. actual: its SHA-256, or what is wrong with it."""

    file: str
    expected: str
    actual: str


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


def check_chain(folder: Path, directory: Path | None, threads: int) -> Iterator[Link]:
    """Yield every link of a published folder's chain as soon as it is checked; the last two are weights and tensors.

    The links of a base that is the weights of another run follow, with the run's name before them.
    folder: merged/RUN, or a copy of it. directory: the working directory; None if it is not here.
    threads: the number of cores to use.

    Raises VlmflowError if the provenance cannot be read; PassingError if a file cannot.
    """
    record = read_record(folder)
    yield from _links(record, folder, directory, partial(_published, folder, record), threads)
    for newer, round in pairwise(record.rounds):
        base = _model_of(newer, directory)
        for link in _links(round, base, directory, partial(_taken_over, round, newer), threads):
            yield replace(link, name=f"base {round.run}: {link.name}")


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
    yield _compared("raw files", directory, record.data.raw_files)
    if record.data.mended:
        yield _edited(directory, record.data.mended)
    for name, member in record.data.members.items():
        yield _compared(f"rows of {name}, mixed", directory / "data" / name, member.digests)
    rows = {name: digest for name, digest in record.data.digests.items() if name.endswith(".jsonl")}
    yield _compared("rows of the data set", directory / "data" / record.data.dataset, rows)
    yield (fitted := _fitted(directory / "fitted" / record.run, record))
    yield _pictures(directory, directory / "fitted" / record.run, record.data.dataset, fitted)
    model = _model_of(record, directory)
    if record.base_model.dequantized_from:
        yield _in_fp8(record.base_model, record.base_model.dequantized_from, directory)
    base_files = record.base_model.files if model else {}
    yield (base := _compared("files of the base model", model or directory / "models", base_files))
    full = directory / "checkpoints" / record.run / "full"
    yield (trained := _compared("adapter or trained weights", full, record.training.digests.released))
    yield (weights := weights_of())
    if folder:
        yield _from_base(folder, record, model if base.whole else None)
    if folder and model and base.whole and trained.whole and weights.whole:
        yield _tensors(folder, record, model, full, threads)
    elif base.differences or trained.differences or weights.differences:
        yield Link(TENSORS, "not proven, because a line above differs", False)
    else:
        yield Link(TENSORS, "not proven, because base, training or weights are not all here", False)


def _compared(name: str, folder: Path, digests: Mapping[str, str]) -> Link:
    """Read files of a folder and compare them. name: the link's. digests: SHA-256 by the files' names in the folder.

    Raises PassingError if a file cannot be read.
    """
    files = read_files(f"reading {name}", "files", folder, sorted(digests))
    differences = [
        Difference(str(folder / file), digests[file], read.sha256)
        for file, read in files.items()
        if read.sha256 != digests[file]
    ]
    missing = [str(folder / file) for file in sorted(digests) if file not in files]
    detail = f"{len(files)} of {len(digests)} files" if files else str(folder)
    return Link(name, detail, bool(files), differences, missing)


def _differs(name: str, file: Path | str, expected: str, actual: str) -> Link:
    return Link(name, "", True, [Difference(str(file), expected, actual)])


def _edited(directory: Path, files: list[RecordedFile]) -> Link:
    """Compare the files of edited rows that lie in the working directory; the provenance may name any others."""
    inside = {file.file: file.sha256 for file in files if lies_within(file.file)}
    link = _compared("files of edited rows", directory, inside)
    if outside := len(files) - len(inside):
        link = replace(link, detail=f"{link.detail}; {outside} outside of the working directory not read")
    return link


def _fitted(folder: Path, record: Record) -> Link:
    """Compare the rows that fit with their account, and this with the rows and pictures that the training names."""
    name, account = "rows that fit", folder / ACCOUNT
    if not account.is_file():
        return Link(name, str(folder), False)
    try:
        digests = fitted_rows(folder).digests
    except VlmflowError as error:  # damaged, or another version's
        return _differs(name, account, record.training.digests.data, error.cause)
    trained = "".join(digests.get(part, "") for part in ("train.jsonl", "val.jsonl", "pictures"))
    link = _compared(name, folder, {file: digest for file, digest in digests.items() if file.endswith(".jsonl")})
    if trained != record.training.digests.data:
        link.differences.append(Difference(str(account), record.training.digests.data, trained))
    return link


def _pictures(directory: Path, rows: Path, dataset: str, of_rows: Link) -> Link:
    """Compare the pictures of a run's rows with the image manifests, and this with the account of the rows.

    rows: those that fit (fitted/RUN). of_rows: their link; only rows that are as recorded are read.
    """
    name = "pictures of these rows"
    if not of_rows.whole:
        return Link(name, "not looked for, because the rows that fit are not all here or differ", False)
    images, store = directory / "images" / dataset, directory / "stores" / "pictures" / dataset
    manifests = [file for file in (images / "train.jsonl", images / "val.jsonl") if file.is_file()]
    recorded = fitted_rows(rows).digests.get("pictures", "")
    try:
        names = pictures_in(rows / "train.jsonl", rows / "val.jsonl")
        if not names:
            return Link(name, "they have none", True)
        if not manifests:
            return Link(name, str(images / "train.jsonl"), False)
        entries = entries_named({name for name in names if lies_within(name)}, manifests)
        digest = pictures_digest(entries)
    except VlmflowError as error:  # a manifest that is damaged, or another version's
        return _differs(name, images, recorded, error.cause)
    except ValueError as error:  # rows of another version
        return _differs(name, rows, recorded, str(error))
    if digest != recorded:
        return _differs(name, f"{images} ({rows / ACCOUNT})", recorded, digest)
    return _compared(name, store, {name: digest_in_store(store, entry) for name, entry in entries.items()})


def _model_of(record: Record, directory: Path | None) -> Path | None:
    """Return the folder of a training's base model in the working directory; None if it is not there."""
    model = model_with(directory / "models", record.base_model.digest) if directory else None
    return model[1].folder if model else None


def _in_fp8(base: RecordedBase, recorded: Fp8Files, directory: Path) -> Link:
    """Compare the files in FP8 of which a base was made in bfloat16, where its manifest says that they are."""
    name, model = "files in FP8 of the base model", model_with(directory / "models", base.digest)
    in_fp8 = model[1].dequantized_from if model else msgspec.UNSET
    if in_fp8 is msgspec.UNSET:
        return Link(name, str(directory / "models"), False)
    link = _compared(name, in_fp8.folder, recorded.files)
    if digest_of_files(recorded.files) != recorded.digest:
        link.differences.append(Difference("digest of all files", digest_of_files(recorded.files), recorded.digest))
    return link


def _published(folder: Path, record: Record) -> Link:
    """Compare the published folder with its own provenance: no file of it is missing, other, or too many."""
    link = _compared("published files", folder, record.merged)
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
    detail = f"the recorded digests of {len(files)} files are those of the base of run {newer.run}"
    return Link("published files", detail, True, wrong)


def _from_base(folder: Path, record: Record, model: Path | None) -> Link:
    """Compare the digests of the published files with those of the base: only weights and picture limits may differ."""
    limited = record.picture_limits
    expected = {
        name: digest
        for name, digest in record.base_model.files.items()
        if name not in WRITTEN_AFTERWARDS and (name == INDEX or not name.endswith(WEIGHT_SUFFIXES))
    }
    wrong = []
    if record.training.digests.model != record.base_model.digest:
        wrong.append(Difference("the model of the training", record.base_model.digest, record.training.digests.model))
    if limited:
        wrong += _limits(folder, limited, record.training.settings.image_max_tokens, expected, model)
        expected[limited.file] = limited.published
    wrong += [
        Difference(str(folder / name), digest, record.merged.get(name, "is not published"))
        for name, digest in expected.items()
        if record.merged.get(name) != digest
    ]
    detail = f"the recorded digests of {len(expected)} files are the base's"
    if limited:
        detail += f", but for the picture limits in {limited.file}"
    return Link("all but the weights", detail, True, wrong)


def _limits(
    folder: Path, limited: LimitedFile, tokens: int, of_base: Mapping[str, str], model: Path | None
) -> Iterator[Difference]:
    """Yield how the published file with the picture limits differs from the base's file with the limits of the run."""
    published = str(folder / limited.file)
    if PictureBudget.of(folder, tokens).limits != limited.limits:
        yield Difference(published, f"limits of up to {tokens} tokens", str(limited.limits))
    if of_base.get(limited.file) != limited.proven:
        yield Difference(limited.file, of_base.get(limited.file, "a file of the base"), limited.proven)
    if model and (processor := processor_of(model)):
        content = sha256(processor.limited(limited.limits)).hexdigest()
        if processor.file != limited.file or content != limited.published:
            yield Difference(published, f"the base's with the limits, {content}", limited.published)


def _tensors(folder: Path, record: Record, model: Path, full: Path, threads: int) -> Link:
    """Prove the tensors again. The proof compares all other files with the base too, so it gets the base's limits."""
    try:
        with quick_imports():
            from vlmflow.merging.verify_tensors import verify_tensors  # with torch, which only this link needs
    except ModuleNotFoundError as error:
        return Link(TENSORS, f"{error.name} is not installed here", False)
    tuner, limited = TUNERS.get(record.training.tuner), record.picture_limits
    if tuner is None:
        return Link(TENSORS, f"this version does not know the tuner {record.training.tuner}", False)
    with tempfile.TemporaryDirectory(prefix="vlmflow-verify-") as made:
        for file in record.merged:
            link, source = Path(made) / file, (model if limited and file == limited.file else folder) / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.resolve())
        try:
            proof = verify_tensors(model, full, Path(made), record.base_model.files.keys(), threads, tuner)
        except VlmflowError as error:
            return _differs(TENSORS, folder, "base + what was trained", error.cause.replace(made, str(folder)))
    detail = f"{proof.touched} of {proof.tensors} tensors carry the training, the others are the base's"
    return Link(TENSORS, detail, True)
