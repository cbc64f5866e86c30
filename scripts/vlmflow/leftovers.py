"""Finds what may be deleted in a working directory without losing a result or a training to resume.

A run is finished if its published weights are the proven ones and come from its adapter. The trainings of an unfinished
run are never listed. Of a finished run, the adapter, its run folder, verified/RUN and merged/RUN stay.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from vlmflow.config.model import Config
from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.strategies import strategy_of, tuner_of
from vlmflow.config.tables import Pin, pin_of
from vlmflow.core.account import OtherVersionError, read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import UNFINISHED, sha256_of
from vlmflow.fetch.dequantise import DEQUANTISED
from vlmflow.fetch.from_hub import store_folder
from vlmflow.fetch.placed import MANIFEST, VIEWS, ModelManifest
from vlmflow.merging.proof import WRITTEN_AFTERWARDS, read_proof
from vlmflow.raw import named
from vlmflow.reports.former_trainings import RUN_FOLDER, former_trainings
from vlmflow.reports.provenance import Provenance
from vlmflow.supervisor.report import TrainingReport, read_release
from vlmflow.supervisor.run_folder import read_checkpoint

HUB_FOLDER = re.compile(r".+--.+@[0-9a-f]{40}")
"""The folder of a store for a repository at a commit (`store_folder`)."""


@dataclass(frozen=True)
class Leftover:
    """Something that may be deleted. why: for people. is_run_folder: whether a trainer may hold it."""

    path: Path
    why: str
    is_run_folder: bool = False


def find_leftovers(
    folder: Path, settings: Config, pins: dict[str, Pin], stores: bool
) -> tuple[list[Leftover], list[str]]:
    """Return what may be deleted, and notes for people about what is kept.

    folder: the working directory. settings: those of its runs, with the paths of the stores.
    stores: whether the settings name all models, raw files and pictures that are still in use.

    Raises VlmflowError if a store is inside another one: their files cannot be told apart.
    """
    _refuse_shared_stores(folder, settings)
    leftovers: list[Leftover] = []
    notes: list[str] = []
    for run in sorted(entry.name for entry in _folders(folder / "checkpoints")):
        try:
            made_of = finished(folder, run)
        except VlmflowError as error:
            why = f"it is not finished: {error.cause}"
            if isinstance(error, OtherVersionError):
                why = f"another version of vlmflow wrote its reports ({error.cause})"
            notes.append(f"{run}: keeping its trainings, because {why}")
            continue
        work = folder / "work" / run
        if work.is_dir() and any(work.iterdir()):
            leftovers.append(Leftover(work, f"intermediate merged weights; merged/{run} is proven"))
        if store := _own_store(folder, settings.stores.runs, "runs", notes):
            leftovers += of_trainings(store / run, made_of)
            leftovers += of_trials(folder, store / run)
    leftovers += _unfinished(folder)
    if not stores:
        notes.append("models, raw files and pictures: kept; to include them, name what uses them: vlmflow clean FILE")
        return leftovers, list(dict.fromkeys(notes))
    if store := _own_store(folder, settings.stores.models, "models", notes):
        leftovers += _of_models(folder, store, settings, pins)
    if store := _own_store(folder, settings.stores.raw, "raw", notes):
        sources = [address for dataset in settings.raw_datasets.values() for address in dataset.all_addresses]
        leftovers += _of_hub(store, sources, pins, "data set", set())
    if store := _own_store(folder, settings.stores.pictures, "pictures", notes):
        leftovers += _of_pictures(folder, store, settings)
    return leftovers, list(dict.fromkeys(notes))


def finished(folder: Path, run: str) -> dict[str, TrainingReport]:
    """Return the reports of a run's trainings ("smoke", "full"), if its weights are merged, proven and published.

    Raises VlmflowError if one of these is missing, or does not belong to the others.
    """
    reports = {
        stage: read_account(folder / "checkpoints" / run / stage / "report.json", TrainingReport)
        for stage in ("smoke", "full")
    }
    read_release(folder / "checkpoints" / run / "full")
    merged = folder / "merged" / run
    provenance, proof = read_account(merged / "provenance.json", Provenance), read_proof(folder / "verified" / run)
    again = "run the same command again"
    if provenance.training.digests != reports["full"].digests:
        raise VlmflowError(f"{merged} comes from another training than checkpoints/{run}/full", again)
    limited = provenance.picture_limits
    for name, file in proof.files.items():
        path = merged / name
        if name in WRITTEN_AFTERWARDS:
            continue
        if limited and name == limited.file:
            if not path.is_file() or sha256_of(path) != limited.published:
                raise VlmflowError(f"{path} differs from the file that was published", again)
        elif not path.is_file() or path.stat().st_size != file.size:
            raise VlmflowError(f"{path} differs from the file that was proven", again)
    return reports


def _refuse_shared_stores(folder: Path, settings: Config) -> None:
    places = {name: (folder / path).resolve() for name, path in settings.stores}
    for (name, path), (other, above) in permutations(places.items(), 2):
        if path.is_relative_to(above):
            raise VlmflowError(
                f"stores.{name} ({path}) is inside stores.{other} ({above})",
                "give each store a folder of its own, or delete by hand what is no longer needed",
            )


def size_of(path: Path) -> int:
    """Return the bytes that removing `path` frees: those of files without other hard links."""
    places = [path] if path.is_symlink() or not path.is_dir() else path.rglob("*")
    stats = (file.lstat() for file in places)
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def _own_store(folder: Path, store: str, name: str, notes: list[str]) -> Path | None:
    """Return a store inside the working directory, else None: others may use a store elsewhere."""
    path = folder / store
    if not path.is_dir():
        return None
    if path.resolve().is_relative_to(folder.resolve()):
        return path
    notes.append(f"{path} (stores.{name}): kept, because it is outside {folder} and others may use it")
    return None


def of_trainings(store: Path, reports: dict[str, TrainingReport]) -> Iterator[Leftover]:
    """Yield the former trainings of a finished run, and checkpoints that are neither the last nor the best.

    store: the run's own folder of all its trainings. reports: those of the finished ones, by stage.
    """
    for stage, report in reports.items():
        kept = report.digests.job
        former = {job.folder.name: str(job) for job in former_trainings(store / stage, report)}
        for path in _folders(store / stage):
            if RUN_FOLDER.fullmatch(path.name) and path.name != kept:
                told = former.get(path.name, "it never began")
                why = f"a former {stage} training, kept nowhere else: {told} (the finished one is {kept})"
                yield Leftover(path, why, is_run_folder=True)
        yield from _older_checkpoints(store / stage / kept / "checkpoints", report)


def of_trials(folder: Path, store: Path) -> Iterator[Leftover]:
    """Yield the trainings of a finished run's searches, unless a search has not chosen its best settings yet.

    folder: the working directory. store: the run's own folder of all its trainings.
    """
    if all((search / "best.yaml").is_file() for search in _folders(folder / "search")):
        for path in _folders(store / "search"):
            if RUN_FOLDER.fullmatch(path.name):
                yield Leftover(path, "a trial of a search that has ended", is_run_folder=True)


def _older_checkpoints(output: Path, report: TrainingReport) -> Iterator[Leftover]:
    """Yield all checkpoints but the last and the best one, if both of these can be read."""
    kept = {f"checkpoint-{report.steps}", f"checkpoint-{report.best.step}"}
    strategy, tuner = strategy_of(report.strategy, report.deepspeed), tuner_of(report.tuner)
    if all(read_checkpoint(output / name, report.world_size, strategy, tuner) for name in kept):
        for path in _folders(output):
            if path.name.startswith("checkpoint-") and path.name not in kept:
                yield Leftover(path, f"neither the last nor the best checkpoint ({', '.join(sorted(kept))})")


def _unfinished(folder: Path) -> Iterator[Leftover]:
    """Yield what killed stages left beside target folders; these stages start from the beginning."""
    parents = [folder / name for name in ("verified", "merged", "fitted", "models", "model_files")]
    parents += [path for name in ("checkpoints", "work") for path in _folders(folder / name)]
    for parent in parents:
        for path in _folders(parent):
            if path.name.endswith(UNFINISHED):
                yield Leftover(path, "a stage was killed while writing this; it starts again")


def _of_models(folder: Path, store: Path, settings: Config, pins: dict[str, Pin]) -> Iterator[Leftover]:
    # Targets are elsewhere, so the files in use are unknown here.
    if not (folder / "models").is_dir():
        return
    manifests = [read_account(file, ModelManifest) for file in sorted((folder / "models").glob(f"*/{MANIFEST}"))]
    views = {manifest.folder.resolve() for manifest in manifests}
    for view in _folders(store / VIEWS):
        if view.resolve() not in views:
            yield Leftover(view, "links to former model files; no manifest under models/ names them")
    sources = [model.source for model in settings.models.values()] + [manifest.source for manifest in manifests]
    in_use = {parent for view in views for file in _targets_of_links(view) for parent in file.parents}
    for made in _folders(store / DEQUANTISED):
        if made.resolve() not in in_use:
            yield Leftover(made, "a bfloat16 copy of a model in FP8; no manifest under models/ names its files")
    yield from _of_hub(store, sources, pins, "model", in_use)


def _of_hub(
    store: Path, sources: Iterable[str], pins: dict[str, Pin], kind: str, in_use: set[Path]
) -> Iterator[Leftover]:
    """Yield the folders of a store for repositories at commits that the configuration does not name.

    in_use: folders that stay anyway.
    """
    for address in sources:
        source, pin = parse_source(address), pin_of(address, pins)
        if isinstance(source, HubSource) and pin is not None and pin.revision is not None:
            in_use.add(store_folder(store, source, pin.revision).resolve())
    for path in _folders(store):
        if HUB_FOLDER.fullmatch(path.name) and path.resolve() not in in_use:
            yield Leftover(path, f"no {kind} in the configuration comes from it")


def _of_pictures(folder: Path, store: Path, settings: Config) -> Iterator[Leftover]:
    # Targets are elsewhere, so the pictures in use are unknown here.
    if not (folder / "images").is_dir():
        return
    of_datasets = [path for path in _folders(store) if not path.name.startswith(".")]
    others = [path for path in of_datasets if path.name not in settings.datasets]
    unused = {path for path in others if not (folder / "images" / path.name).exists()}
    for path in sorted(unused):
        yield Leftover(path, "pictures of a data set that is neither in the configuration nor under images/")
    kept = {".rewritten": "a rewritten picture", named.ROOT: "a picture out of data files"}
    shared = {store / name for name in kept}
    in_use = {file for path in _folders(store) if path not in shared | unused for file in _targets_of_links(path)}
    for name, kind in kept.items():
        for copy in sorted((store / name).rglob("*")):
            if copy.is_file() and not copy.name.endswith(UNFINISHED) and copy.resolve() not in in_use:
                yield Leftover(copy, f"{kind} that no data set uses")


def _targets_of_links(folder: Path) -> set[Path]:
    return {link.resolve() for link in folder.rglob("*") if link.is_symlink()} if folder.is_dir() else set()


def _folders(parent: Path) -> list[Path]:
    """Return the folders in a folder; [] if its path has a link, since the target may belong to somebody else."""
    own = parent.is_dir() and parent.resolve() == Path(os.path.abspath(parent))
    places = parent.iterdir() if own else ()
    return sorted(path for path in places if path.is_dir() and not path.is_symlink())
