"""The proof of a model folder, `proof.json`: the checks' results and the digest of every file."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import FOLDER_MARK
from vlmflow.core.integrity import Record, read_files, refuse_changed, remember

PROOF = "proof.json"

WRITTEN_AFTERWARDS = frozenset({"README.md", "provenance.json"})
"""Files about the model that a published folder gets; they may be new, or differ from the base's."""

PACKAGES = (
    "snakemake",
    "ms-swift",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "pillow",
    "msgspec",
)

COMMIT_VARIABLE = "VLMFLOW_COMMIT"
"""The environment variable with the commit if there is no checkout, as in an image."""


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
    """The result of `verify_logits` or `verify_stored_logits`; `logit_proof` judges the figures.

    After a training of the model's own weights, read the trained model in the trainer for "base + adapter", and the
    checkpoint for "peft's own merge".

    verdict: "agree"; or "inconclusive" if rounding hides the adapter's effect and explains what is missing.
    rows, positions: compared rows, and token positions in them.
    dtype, device: of the computation.
    spread: root mean square of the logits, relative to their mean at a position, since a shift of all of them changes
    no probability. The next three are shares of it.
    deviation: root mean square of merged - (base + adapter). allowed_deviation: what rounding explains.
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


class Checks(msgspec.Struct, frozen=True):
    """The results of the checks of merged weights; logits: null if the run did not compare them."""

    tensors: TensorProof
    logits: LogitProof | None


class ProvenFile(msgspec.Struct, frozen=True):
    """A file of a proven folder; size: in bytes."""

    size: int
    sha256: str


class Proof(msgspec.Struct, frozen=True):
    """The content of `proof.json`.

    files: by name in the folder. git_commit: that of the verifying code; null without a checkout.
    versions: of Python and of packages, by name.
    """

    checks: Checks
    files: dict[str, ProvenFile]
    git_commit: str | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Proven:
    """How the files of a proven folder looked when `write_proof` read them, and when it began to, in ns."""

    files: Record
    began: int


def write_proof(folder: Path, checks: Checks, code: Path) -> Proven:
    """Write `proof.json` into a folder whose files passed `checks`. code: the checkout, for its commit."""
    # A base may have its own proof.json, which this one replaces.
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / PROOF]
    began = time.time_ns()
    names = [file.relative_to(folder).as_posix() for file in files]
    found = read_files("writing the digests of proven files", "files", folder, names)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    proof = Proof(
        checks=checks,
        files={name: ProvenFile(seen.size, seen.sha256) for name, seen in found.items()},
        git_commit=git_commit(code),
        versions={"python": platform.python_version()} | versions,
    )
    write_account(folder / PROOF, proof)
    return Proven(found, began)


def read_proof(folder: Path) -> Proof:
    """Return the proof of `folder`, after checking that its files are still the same.

    Raises VlmflowError if a file is missing, new or changed.
    """
    proof = read_account(folder / PROOF, Proof)
    proven = {name: file.size for name, file in proof.files.items()}
    found = {
        file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()
    }
    ours = {PROOF, FOLDER_MARK}
    changed = sorted(name for name in (proven.keys() | found.keys()) - ours if proven.get(name) != found.get(name))
    again = f"remove {folder} and run the same command again: the workflow merges and proves it again"
    if changed:
        raise VlmflowError(
            f"{folder}: {len(changed)} files differ from those that were proven: {', '.join(changed[:5])}", again
        )
    digests = {name: file.sha256 for name, file in proof.files.items()}
    refuse_changed("model files", folder, digests, _record(folder), again)
    return proof


def remember_proven(folder: Path, proven: Proven) -> None:
    """Record how the files of `folder` look, so that `read_proof` need not read them again."""
    remember(_record(folder), proven.files, proven.began)


def _record(folder: Path) -> str:
    return f"verified/{folder.name}"


def take_over(folder: Path, target: Path) -> None:
    """Hard-link every file of `folder` below `target`; on another disk, copy it."""
    shutil.copytree(folder, target, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def git_commit(code: Path) -> str | None:
    """Return the commit of the checkout `code`, with "+changes" if files differ; None without a checkout."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    try:
        head = _git(code, "rev-parse", "HEAD")
        return head + ("+changes" if _git(code, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(code: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(code), *words], capture_output=True, text=True, check=True).stdout.strip()
