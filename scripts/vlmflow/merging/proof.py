"""The proof of a model folder, `proof.json`: the checks' results and the digest of every file.

A merged folder must have the files of its base, and weights with the base's layout. Before it is proven it gets the
run's picture limits, for all who load it.
"""

import filecmp
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from vlmflow import __version__
from vlmflow.core.account import read_account, read_files, refuse_changed, remember, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import FOLDER_MARK, link_or_copy, read_json, remove, sha256_of
from vlmflow.fetch.model_files import CONFIG, FETCH_AGAIN, INDEX, SINGLE
from vlmflow.fetch.model_weights import LENGTH_BYTES, MAX_HEADER_BYTES, WEIGHT_SUFFIXES
from vlmflow.fetch.placed import digest_of_files
from vlmflow.pictures.budget import PictureBudget, ScaleLimits

PROOF = "proof.json"

WRITTEN_AFTERWARDS = frozenset({"README.md", "provenance.json"})
"""Files about the model that a published folder gets; they may be new, or differ from the base's."""

PACKAGES = (
    *("snakemake", "ms-swift", "torch", "transformers", "peft", "accelerate"),
    *("safetensors", "pillow", "msgspec"),
)

COMMIT_VARIABLE = "VLMFLOW_COMMIT"
"""The environment variable with the commit if there is no checkout, as in an image."""


TOKENIZER = frozenset({"tokenizer_config.json"})

PROCESSOR = frozenset({"preprocessor_config.json", "processor_config.json"})
"""Files of which a model needs one: every model one of the first, a vision model also one of the second."""

MERGE_AGAIN = "remove the merged folder and run the same command again; if this happens again, please report it"


class ChangedTensors(msgspec.Struct, frozen=True):
    """Touched tensors of one kind. name: that of a tensor, with * for each number. tensors, numbers: how many.

    changed_share: the share of the numbers that differ from the base's after rounding.
    """

    name: str
    tensors: int
    numbers: int
    changed_share: float


class TensorProof(msgspec.Struct, frozen=True):
    """The result of `verify_tensors`.

    shards: files of weights, with the base's layout.
    tensors, touched, untouched: their numbers; the untouched ones equal the base's byte for byte.
    changed_share: the share of the numbers in touched tensors that differ from the base's after rounding.
    largest_deviation: from the sum in float64, beyond the error of float32, in ulps of the stored type; at most 0.5.
    largest_deviation_tensor: the tensor with it; "" if there is none.
    kinds: the touched tensors by kind.
    """

    shards: int
    tensors: int
    touched: int
    untouched: int
    changed_share: float
    largest_deviation: float
    largest_deviation_tensor: str
    kinds: list[ChangedTensors]


class QuantisationEffect(msgspec.Struct, frozen=True):
    """How the model with a quantised base, as it was trained, differs from the one with the unquantised base.

    layers: how many were quantised. type, double: as in `runs.NAME.train.quantisation`. deviation: root mean square of
    the difference of the logits, as a share of their spread. top1_agreement: share of the positions at which the best
    token is the same.
    """

    layers: int
    type: str
    double: bool
    deviation: float
    top1_agreement: float


class LogitProof(msgspec.Struct, frozen=True):
    """The result of `verify_logits` or `verify_stored_logits`, which judges the figures.

    After a training of the model's own weights, read the trained model in the trainer for "base + adapter", and the
    checkpoint for "peft's own merge".

    verdict: "agree"; or "inconclusive" if rounding hides the adapter's effect and explains what is missing.
    rows, positions: compared rows, and token positions in them.
    dtype, device: of the computation.
    spread: root mean square of the logits, relative to their mean at a position, since a shift of all of them changes
    no probability. The next three are shares of it.
    deviation: root mean square of merged - (base + adapter); with experts, of merged - peft's own merge.
    allowed_deviation: what rounding explains. unrounded: with experts, that of merged - (base + adapter), whose tokens
    may go to other experts; null without.
    effect: root mean square of (base + adapter) - base.
    effect_found: share of the effect that the merged model shows; 1 is all of it.
    effect_rounded: share that peft's own merge shows, rounded to the stored type; 1 if rounding hides nothing.
    top1_agreement: share of the positions at which the best token is the same.
    clear_positions: positions with a clear best token. clear_disagreements: those with another best token.
    quantisation: its effect; null if the base was not quantised for the training.
    """

    verdict: str
    rows: int
    positions: int
    dtype: str
    device: str
    spread: float
    deviation: float
    allowed_deviation: float
    effect: float
    effect_found: float
    effect_rounded: float
    top1_agreement: float
    clear_positions: int
    clear_disagreements: int
    quantisation: QuantisationEffect | None = None
    unrounded: float | None = None


class Checks(msgspec.Struct, frozen=True):
    """The results of the checks of merged weights; logits: null if the run did not compare them."""

    tensors: TensorProof
    logits: LogitProof | None


class ProvenFile(msgspec.Struct, frozen=True):
    """A file of a proven folder; size: in bytes."""

    size: int
    sha256: str


class VerifiedTensors(msgspec.Struct, frozen=True):
    """The content of `tensors.json`. files: those of the merged folder when its tensors were verified, by name."""

    tensors: TensorProof
    files: dict[str, ProvenFile]


class Proof(msgspec.Struct, frozen=True):
    """The content of `proof.json`.

    files: by name in the folder. git_commit: that of the verifying code; null without a checkout.
    versions: of Python and of packages, by name.
    """

    checks: Checks
    files: dict[str, ProvenFile]
    git_commit: str | None
    versions: dict[str, str]


def verified_files(folder: Path, run: str) -> dict[str, ProvenFile]:
    """Read a run's merged files; return the size and digest of each, by name in the folder.

    It also records how they look, so that later stages need not read them again.
    """
    began = time.time_ns()
    files = read_files("writing the digests of the merged files", "files", folder, list(_sizes(folder)))
    remember(f"verified/{run}", files, began)
    return {name: ProvenFile(seen.size, seen.sha256) for name, seen in files.items()}


def refuse_other_files(folder: Path, files: Mapping[str, ProvenFile], run: str, next_step: str) -> None:
    """Raise VlmflowError with their names if files in `folder` are missing, new or changed. files: its own."""
    expected, sizes = {name: file.size for name, file in files.items()}, _sizes(folder)
    if changed := sorted(name for name in expected.keys() | sizes.keys() if expected.get(name) != sizes.get(name)):
        names = ", ".join(changed[:5])
        raise VlmflowError(f"{folder}: {len(changed)} files differ from those that were proven: {names}", next_step)
    digests = {name: file.sha256 for name, file in files.items()}
    refuse_changed("model files", folder, digests, f"verified/{run}", next_step)


def write_proof(folder: Path, checks: Checks, files: dict[str, ProvenFile], code: Path) -> None:
    """Write `proof.json` into a folder with the `files` that passed `checks`. code: the checkout, for its commit."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    versions = {"python": platform.python_version(), "vlmflow": __version__} | versions
    write_account(folder / PROOF, Proof(checks, files, git_commit(code), versions))


def read_proof(folder: Path) -> Proof:
    """Return the proof of a run's folder `verified/RUN`, after checking that its files are still the same.

    Raises VlmflowError if a file is missing, new or changed.
    """
    proof = read_account(folder / PROOF, Proof)
    again = f"remove {folder} and run the same command again: the workflow merges and proves it again"
    refuse_other_files(folder, proof.files, folder.name, again)
    return proof


def proven_digest(proof: Proof) -> str:
    """Return one SHA-256 over the files of a proven folder, as `fetch.placed.digest_of` gives it for a model."""
    return digest_of_files({name: file.sha256 for name, file in proof.files.items()})


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's files by name; a base may have its own proof.json, which ours replaces."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    return {name: size for name, size in sizes.items() if name not in (PROOF, FOLDER_MARK)}


def take_over(folder: Path, target: Path) -> None:
    """Hard-link every file of `folder` below `target`; on another disk, copy it."""
    shutil.copytree(folder, target, copy_function=link_or_copy, dirs_exist_ok=True)


def git_commit(code: Path) -> str | None:
    """Return the commit of the checkout `code`, with "+changes" if files differ; None without a checkout.

    That of an installed package was written when it was built (envs/built_from.py).
    """
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    if (built := code / "built_from.txt").is_file():
        return built.read_text().strip()
    try:
        head = _git(code, "rev-parse", "HEAD")
        return head + ("+changes" if _git(code, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(code: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(code), *words], capture_output=True, text=True, check=True).stdout.strip()


class LimitedFile(msgspec.Struct, frozen=True):
    """The file of a published folder that holds the picture limits.

    file: its name. proven, published: its SHA-256 in verified/RUN, where it is the base's, and in merged/RUN.
    limits: those in merged/RUN.
    """

    file: str
    proven: str
    published: str
    limits: ScaleLimits


def publish_limits(folder: Path, most_tokens: int) -> LimitedFile | None:
    """Give the processor file of a model the limits of its training, and return what changed.

    folder: the model's files, hard links to those of another folder, which stay as they are.
    most_tokens: the training's `image_max_tokens`.

    Returns None if the model sees no pictures, or scales them by a rule without such limits.
    Raises VlmflowError if the file cannot hold the limits.
    """
    budget = PictureBudget.of(folder, most_tokens)
    processor, limits = budget.processor, budget.limits
    if processor is None or limits is None:
        return None
    file = folder / processor.file
    proven = sha256_of(file)
    remove(file)  # writing would go through the link into the proven file
    file.write_bytes(processor.limited(limits))
    return LimitedFile(processor.file, proven, sha256_of(file), limits)


def verify_files(base: Path, merged: Path, files: Collection[str]) -> list[str]:
    """Compare everything but the weights' numbers; returns the names of the shards.

    base: the base model's folder. files: the names of the model's files in it.

    Raises VlmflowError with the file that the base lacks for use without network, or that is missing, new or changed in
    `merged`; or with the tensor at which a shard's layout differs from the base's.
    """
    shards = [SINGLE] if SINGLE in files else sorted(set(read_json(base / INDEX)["weight_map"].values()))
    _require_usable(base, set(files))
    present = {path.relative_to(merged).as_posix() for path in merged.rglob("*") if not path.is_dir()}
    present.discard(FOLDER_MARK)
    for name in sorted(set(files) - present):
        if name in shards or name == INDEX or not name.endswith(WEIGHT_SUFFIXES):
            raise VlmflowError(f"{merged / name}: is missing; the base has it", MERGE_AGAIN)
    for name in sorted(present):
        if name not in files and name not in WRITTEN_AFTERWARDS:
            raise VlmflowError(f"{merged / name}: the base has no such file", MERGE_AGAIN)
        if name in shards:
            _compare_layout(base / name, merged / name)
        elif name not in WRITTEN_AFTERWARDS and not filecmp.cmp(base / name, merged / name, shallow=False):
            raise VlmflowError(f"{merged / name}: differs from the base's file", MERGE_AGAIN)
    return shards


def _require_usable(base: Path, files: set[str]) -> None:
    """Require the files without which the model does not load offline."""
    needed = [frozenset({CONFIG}), TOKENIZER]
    if "vision_config" in read_json(base / CONFIG):
        needed.append(PROCESSOR)
    for choice in needed:
        if not files & choice:
            raise VlmflowError(f"{base}: has no {' or '.join(sorted(choice))}", FETCH_AGAIN)


def _compare_layout(base: Path, merged: Path) -> None:
    """Require the base's layout of a shard: the same length and, byte for byte, the same header."""
    size, expected_size = merged.stat().st_size, base.stat().st_size
    if size != expected_size:
        state = "truncated" if size < expected_size else "too long"
        raise VlmflowError(f"{merged}: {state}: {size:,} bytes, the base has {expected_size:,}", MERGE_AGAIN)
    header, expected = _header(merged), _header(base)
    if header == expected:
        return
    try:
        tensors, base_tensors = (json.loads(raw[LENGTH_BYTES:]) for raw in (header, expected))
    except ValueError as error:
        raise VlmflowError(f"{merged}: its header cannot be read: {error}", MERGE_AGAIN) from None
    for name in sorted(base_tensors.keys() | tensors.keys()):
        if tensors.get(name) != base_tensors.get(name):
            raise VlmflowError(
                f"{merged}: tensor {name} is {tensors.get(name, 'missing')}, in the base "
                f"{base_tensors.get(name, 'missing')}",
                MERGE_AGAIN,
            )
    raise VlmflowError(f"{merged}: its header is written differently from the base's", MERGE_AGAIN)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
